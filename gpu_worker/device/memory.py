"""Where the memory of pools and states comes from: a parameter, so that their layout is the same on every device."""

import mmap
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Allocate = Callable[[int], Tensor]  # uint8 [n] for n bytes: zeroed, aligned to 256 bytes, its owner's until it drops the tensor


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed private memory that becomes resident when touched, on huge pages where the system grants them."""
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: only slower
            pass
    return memory


def host_memory(nbytes: int) -> Tensor:
    """Allocate on the CPU: `anonymous` as a tensor, which keeps it."""
    return torch.frombuffer(anonymous(nbytes), dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]


class Memory(Protocol):
    """Memory of a device, for those who look into a pool from outside: `device/torch_on_card.py`, or the host's."""

    def zeros(self, nbytes: int) -> Tensor: ...  # Allocate
    def put(self, target: Tensor, rows: Tensor) -> None: ...  # into the first rows of `target`
    def download(self, tensor: Tensor) -> Tensor: ...  # a copy in host memory, when all steps enqueued so far are over


class HostMemory:
    """Memory of the CPU."""

    def zeros(self, nbytes: int) -> Tensor:
        return host_memory(nbytes)

    def put(self, target: Tensor, rows: Tensor) -> None:
        target[: len(rows)] = rows

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()
