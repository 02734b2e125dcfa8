"""The recurrent state of sequences: per slot a state at a multiple of 16 and a log of what has come since.

A row at position q reads S, the state after the tokens below `16 * (q // 16)`, and the log of the tokens from there to q. A fold
makes the S of the next 16 tokens out of S and 16 entries of the log: by position, never "when full". So one form is rollback
(rejected drafts are entries that the next row overwrites), exact recompute (the split into steps changes no number) and a
snapshot. What a step does with a slot whose S holds the first `folded` tokens, for rows at positions start to last:

    at the start    start 0: S = 0, folded = 0. Then, while folded < 16 * (start // 16): fold (at most once: drafts were accepted)
    before row q    if q is a multiple of 16 and q > start: fold; in place if q <= known, else on a copy that only this step reads
    at the end      folded = 16 * (min(known, last) // 16), or what it was at the start if that is more
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.memory import Allocate, host_memory
from wire.model_spec import DeltaSpec

FOLD = 16  # tokens between two states


class StateShape(Protocol):
    """The part of a model's spec that shapes its state."""

    @property
    def delta(self) -> DeltaSpec | None: ...


def state_bytes(spec: StateShape, draft_max: int) -> int:
    """Bytes of one slot; 0 for a model without recurrent layers."""
    return 4 * sum(_sizes(spec.delta, draft_max).values()) if spec.delta else 0


def log_entries(draft_max: int) -> int:
    """Tokens that the log holds: those since the last fold, the next one, and its drafts."""
    return FOLD + draft_max


def conv_entries(delta: DeltaSpec, draft_max: int) -> int:
    """Inputs of the convolution that are kept: those that the next token and its drafts reach back to, and their own."""
    return delta.kernel + draft_max


def _shapes(delta: DeltaSpec, draft_max: int) -> dict[str, tuple[int, ...]]:
    layers, log = len(delta.layers), log_entries(draft_max)
    return {
        "state": (layers, delta.value_heads, delta.key_dim, delta.value_dim),
        "log_k": (layers, log, delta.key_heads, delta.key_dim),
        "log_d": (layers, log, delta.value_heads, delta.value_dim),
        "log_g": (layers, log, delta.value_heads),
        "conv": (layers, conv_entries(delta, draft_max), delta.conv_width),
        "folded": (1,),
    }


def _sizes(delta: DeltaSpec, draft_max: int) -> dict[str, int]:
    """float32 values of each part, rounded up to 16 so that each begins on a cache line."""
    return {name: -(-int(np.prod(shape)) // 16) * 16 for name, shape in _shapes(delta, draft_max).items()}


class StateCache:
    """`slots` slots. All float32, `folded` apart. The log and `conv` are rings: position p lies at p modulo their length. What a
    slot holds at positions that its sequence has not reached is never read, so nothing needs clearing."""

    state: Tensor  # [slots, layers, value_heads, key_dim, value_dim]
    log_k: Tensor  # [slots, layers, log, key_heads, key_dim]: normalised keys
    log_d: Tensor  # [slots, layers, log, value_heads, value_dim]: what each token adds: S += k d^T
    log_g: Tensor  # [slots, layers, log, value_heads]: logarithm of each token's decay
    conv: Tensor  # [slots, layers, inputs, conv_width]: what enters the convolution
    folded: Tensor  # int32 [slots, 1]: tokens that `state` has taken in, a multiple of 16

    def __init__(self, delta: DeltaSpec, slots: int, draft_max: int, allocate: Allocate = host_memory) -> None:
        self.slots = slots
        sizes, shapes = _sizes(delta, draft_max), _shapes(delta, draft_max)
        self.stride = sum(sizes.values())  # float32 values of a slot
        self.slot_bytes = 4 * self.stride
        self._memory = allocate(slots * self.slot_bytes)
        self.flat: Tensor = self._memory.view(torch.float32)
        self.offsets: dict[str, int] = {}  # of each part in a slot, in float32 values
        start = 0
        for name, shape in shapes.items():
            self.offsets[name] = start
            whole = self.flat.view(slots, self.stride)[:, start : start + int(np.prod(shape))]
            setattr(self, name, whole.view(slots, *shape))
            start += sizes[name]
        self.folded = self.folded.view(torch.int32)

    @property
    def bytes(self) -> int:
        """Size of all slots."""
        return self.slots * self.slot_bytes

    def slot(self, index: int) -> np.ndarray:
        """The bytes of one slot in host memory: uint8 [slot_bytes], a writable view."""
        if not 0 <= index < self.slots:
            raise IndexError(f"state slot {index} of {self.slots}")
        return self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes].numpy()
