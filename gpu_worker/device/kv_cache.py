"""The pool's memory on the CPU: block-major key-value cells, `[block][layer][k|v][kv_head][cell][head_dim]`."""

import mmap
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class KvShape(Protocol):
    """The part of a model's spec that shapes its cells."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed private memory that becomes resident when touched, on huge pages where the system grants them."""
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: only slower
            pass
    return memory


def block_bytes(spec: KvShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` cells in all layers."""
    return spec.num_layers * 2 * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize


class KvCache:
    """`num_blocks` blocks of `block_size` cells, and one scratch block behind them that padding rows write to."""

    def __init__(self, spec: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_blocks + 1, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        cells = shape[1] * 2 * shape[3] * block_size * shape[5]
        self.block_bytes = cells * dtype.itemsize
        self._memory = anonymous((num_blocks + 1) * self.block_bytes)
        self.tensor: Tensor = torch.frombuffer(self._memory, dtype=dtype, count=(num_blocks + 1) * cells).view(shape)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8, count=(num_blocks + 1) * self.block_bytes)

    @property
    def scratch(self) -> int:
        """The number of the scratch block."""
        return self.num_blocks

    @property
    def bytes(self) -> int:
        """Size of the pool without the scratch block."""
        return self.num_blocks * self.block_bytes

    def block(self, index: int) -> np.ndarray:
        """The bytes of one block: uint8 [block_bytes], a writable view."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of {self.num_blocks}")
        return self._bytes[index * self.block_bytes : (index + 1) * self.block_bytes]
