"""The harness's `run` on a real card: the same tests, with KERNELS_ON=card. `make gpu-check` does that.

Whole storages travel, so a pool and a view of it stay one memory, and what a kernel must leave alone is looked at too.
"""

import atexit
import functools
from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.device.cuda import Card
from gpu_worker.device.ops import Ops
from gpu_worker.device.torch_on_card import TorchOnCard, prepare


def run(kernel: str, grid: Sequence[int], args: Sequence) -> None:
    """Run one of ops.KERNELS to its end, with the block and the shared memory that the product gives it."""
    card, on_card = _card()
    tensors = [torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    bytes_of = {at: torch.empty(0, dtype=torch.uint8).set_(storage) for at, storage in storages.items() if len(storage)}
    there = {at: on_card.upload(data) for at, data in bytes_of.items()}

    def value(arg: object) -> object:
        if not isinstance(arg, torch.Tensor):
            return 0 if arg is None else arg
        start = arg.untyped_storage().data_ptr()
        return there[start].data_ptr() + arg.data_ptr() - start if start in there else 0

    _ops(kernel).prepare(kernel, tuple(grid), *map(value, tensors))()
    card.compute.synchronize()
    for at, data in bytes_of.items():
        data.copy_(on_card.download(there[at]))


def reachable(array: np.ndarray) -> np.ndarray:
    """The same in page-locked memory, which has one address for the host and the card."""
    there = _card()[0].pinned(array.nbytes).view(array.dtype).reshape(array.shape)
    there[...] = array
    return there


@functools.cache
def _card() -> tuple[Card, TorchOnCard]:
    prepare(0)
    card = Card(0)

    def close() -> None:
        _ops.cache_clear()
        card.close()

    atexit.register(close)
    return card, TorchOnCard(card)


@functools.cache
def _ops(kernel: str) -> Ops:
    return Ops(_card()[0], [kernel])
