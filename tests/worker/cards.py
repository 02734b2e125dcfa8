"""Pools on a fake card, and an arena that it copies to and from, for the tests of images on cards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_worker.card_image import CardPieces
from gpu_worker.device.arena_pins import ArenaPins
from gpu_worker.device.ops import Ops
from gpu_worker.image import Image
from gpu_worker.policy.events import Load, Save
from tests.cuda.fake.torch_on_card import in_host_memory
from wire import arena

SLAB_BYTES = 1 << 20
lazily = pytest.mark.parametrize("mode", ["lazy"], indirect=True)  # copies stay under way until somebody asks for them


class CardPool:
    """A pool of blocks and states in memory of the card. What `written` gets is there when the compute stream has run."""

    def __init__(
        self, gpu: SimpleNamespace, num_blocks: int, block_bytes: int = 100_000, state_bytes: int = 0, slots: int = 4
    ) -> None:
        self.num_blocks, self.block_bytes, self.state_bytes = num_blocks, block_bytes, state_bytes
        self._gpu = gpu
        self._memory = gpu.torch.zeros(num_blocks * block_bytes)
        self._states = gpu.torch.zeros(max(1, slots * state_bytes))
        self.cells = in_host_memory(self._memory).numpy().reshape(num_blocks, block_bytes)  # the fake card's memory is the host's
        self.states = in_host_memory(self._states).numpy()[: slots * state_bytes].reshape(slots, state_bytes)
        self._staging = gpu.card.pinned(num_blocks * block_bytes + slots * state_bytes)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def state_address(self, index: int) -> int:
        return self._states.data_ptr() + index * self.state_bytes

    def write(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Enqueue new contents on the compute stream, as a step does; what they are: cells and states."""
        at = self.num_blocks * self.block_bytes
        self._gpu.card.synchronize()  # the staging is used again
        self._staging[:] = np.random.default_rng(seed).integers(0, 256, len(self._staging), dtype=np.uint8)
        self._gpu.card.to_card(self.address, self._staging[:at], self._gpu.card.compute)
        if self.state_bytes:
            self._gpu.card.to_card(self._states.data_ptr(), self._staging[at:], self._gpu.card.compute)
        return self._staging[:at].reshape(self.cells.shape).copy(), self._staging[at:].reshape(self.states.shape).copy()


class Memory:
    """An arena without a host cache, and a card that copies to and from it."""

    def __init__(self, gpu: SimpleNamespace, pool: CardPool, nbytes: int = 64 << 20) -> None:
        self.pieces = CardPieces(gpu.card, pool, "cuda0-1-1", Ops(gpu.card, ["checksum"]), gpu.torch.zeros)
        fd = arena.create(nbytes)
        self.pins: ArenaPins = self.pieces.map(fd, nbytes, SLAB_BYTES)
        os.close(fd)
        self.unit = self.pieces.layout.unit_bytes

    def image(self, units: int, seed: int = 0) -> Image:
        """Units scattered over the arena, in runs of a few; none crosses the end of a slab."""
        per_slab = SLAB_BYTES // self.unit
        numbers = np.arange(4 * (units // 4 + 17)).reshape(-1, 4)
        np.random.default_rng(seed).shuffle(numbers)
        offsets = [int(n // per_slab * SLAB_BYTES + n % per_slab * self.unit) for n in numbers.ravel()[:units]]
        return Image(1, [(at, self.unit) for at in offsets], offsets)

    def save(self, blocks: tuple[int, ...], state_slot: int = -1, image: Image | None = None) -> Image:
        image = image or self.image(len(blocks) + self.pieces.layout.state_units)
        image.num_blocks, image.position = len(blocks), 16 * len(blocks)
        assert led(self.pieces.save(Save("r", 1, blocks, image.position, state_slot), image, self.pins))
        return image

    def load(self, image: Image, blocks: tuple[int, ...], first: int = 0, state_slot: int = -1, request_id: str = "r") -> bool:
        return led(self.pieces.load(Load(request_id, 1, blocks, first, state_slot), image, self.pins))


def led(pieces) -> bool:
    """Whether all is well at the end."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


@contextmanager
def busy(card: SimpleNamespace) -> Iterator[None]:
    """Within it, whatever the card was given is under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card.card.drv.Event, "query", lambda _event: False)
        yield
