"""The pool's memory: block-major key-value cells, `[block][layer][k|v][kv_head][cell][head_dim]`, and beside them the
hidden row of each block's newest cell, which a model's MTP head pairs with the token after it."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.memory import Allocate, host_memory
from gpu_worker.device.state_cache import StateCache
from wire.model_spec import DeltaSpec, MtpSpec


class KvShape(Protocol):
    """The part of a model's spec that shapes its cells."""

    @property
    def kv_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def delta(self) -> DeltaSpec | None: ...
    @property
    def mtp(self) -> MtpSpec | None: ...


def block_bytes(spec: KvShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` cells in all layers, and the hidden row if the model has a head."""
    return _rows(spec, block_size, dtype) * block_size * spec.head_dim * dtype.itemsize


def _rows(spec: KvShape, block_size: int, dtype: torch.dtype) -> int:
    """A block in rows of one head's keys or values, so that one index finds any of them in the whole pool."""
    row_bytes = block_size * spec.head_dim * dtype.itemsize
    hidden_bytes = 4 * spec.hidden if spec.mtp else 0
    return spec.kv_layers * 2 * spec.num_kv_heads + -(-hidden_bytes // row_bytes)


class KvCache:
    """`num_blocks` blocks of `block_size` cells, and one scratch block behind them that padding rows write to; and the recurrent
    state of as many sequences as there are `state_slots`, where the model has such a state."""

    def __init__(
        self,
        spec: KvShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        state_slots: int = 8,
        draft_max: int = 0,
        allocate: Allocate = host_memory,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.layers = spec.kv_layers
        self.rows_per_block = _rows(spec, block_size, dtype)
        self.block_bytes = block_bytes(spec, block_size, dtype)
        values = self.block_bytes // dtype.itemsize
        self.memory = allocate((num_blocks + 1) * self.block_bytes)  # uint8, all blocks one after another
        flat = self.memory.view(dtype)
        self.rows: Tensor = flat.view(-1, block_size * spec.head_dim)  # see `row`
        shape = (spec.kv_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        cells = int(np.prod(shape))
        self.tensor: Tensor = flat.view(num_blocks + 1, values)[:, :cells].unflatten(1, shape)
        self.hidden: Tensor | None = None  # float32 [num_blocks + 1, hidden]: of the newest cell written to each block
        if spec.mtp:
            behind = flat.view(num_blocks + 1, values)[:, cells:].view(torch.float32)
            self.hidden = behind[:, : spec.hidden]
        self.hidden_at = cells * dtype.itemsize  # in a block, of its hidden row
        self.states = StateCache(spec.delta, state_slots, draft_max, allocate) if spec.delta else None

    @property
    def scratch(self) -> int:
        """The number of the scratch block."""
        return self.num_blocks

    @property
    def bytes(self) -> int:
        """Size of the pool without the scratch block and without the states."""
        return self.num_blocks * self.block_bytes

    @property
    def state_bytes(self) -> int:
        """Size of one state slot; 0 where the model has no recurrent state."""
        return self.states.slot_bytes if self.states else 0

    @property
    def address(self) -> int:
        """Of block 0, on the device."""
        return self.memory.data_ptr()

    def state_address(self, index: int) -> int:
        """Of one state slot, on the device."""
        if self.states is None or not 0 <= index < self.states.slots:
            raise IndexError(f"state slot {index} of {self.states.slots if self.states else 0}")
        return self.states.flat.data_ptr() + index * self.states.slot_bytes

    def row(self, block: Tensor, layer: Tensor | int, part: Tensor | int, head: Tensor | int) -> Tensor:
        """Index into `rows` of one head's keys (part 0) or values (part 1) of a block: all `block_size` cells in one row."""
        heads = self.tensor.shape[3]
        return block * self.rows_per_block + (layer * 2 + part) * heads + head

    def block(self, index: int) -> np.ndarray:
        """The bytes of one block in host memory: uint8 [block_bytes], a writable view."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of {self.num_blocks}")
        return self.memory[index * self.block_bytes : (index + 1) * self.block_bytes].numpy()

    def state(self, index: int) -> np.ndarray:
        """The bytes of one state slot in host memory: uint8 [state_bytes], a writable view."""
        if self.states is None:
            raise IndexError(f"state slot {index}: this model has no recurrent state")
        return self.states.slot(index)
