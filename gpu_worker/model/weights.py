"""Tensors of a model's files by uniform name: dequantised, or taken apart into small integers and scales.

What comes back is the same for all files: rows of q and k in halves (GGUF files of the llama architecture store them for
interleaved rotation), value heads grouped by their key head (those of qwen35 store them tiled), queries and their gates
apart, norms ready to multiply with, decays negative.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

from wire.model_files import ModelFiles
from wire.model_spec import DeltaSpec, TensorInfo, tensor_shapes

GROUP = 32  # weights that share a scale
PART_VALUES = 4 << 20  # of a tensor converted at once
FOUR_BIT = ("Q4_0", "Q4_1", "Q4_K")
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_TORCH |= {"I32": torch.int32, "I64": torch.int64}
_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "norm", "embed_norm", "hidden_norm")  # those that may lack an offset


@dataclass(frozen=True, slots=True)
class Quantised:
    """W = quants * scale + minimum in groups of 32 along K."""

    quants: np.ndarray  # [N, K]: uint8 0..15, or int8
    scale: np.ndarray  # float16 [N, K / 32]
    minimum: np.ndarray | None  # float16 [N, K / 32]; None: zero


class Weights:
    """Reads one model's tensors. Nothing is kept: each call maps the file and lets go of it."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._spec = files.spec
        self._names = files.names
        self._shapes = tensor_shapes(files.spec)

    def kind(self, name: str) -> str:
        """The type in the file: F32, BF16, Q4_1, ..."""
        return self._info(name).dtype

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """In torch order: a linear layer is [out, in]."""
        return self._shapes[name]

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole tensor in `dtype`, in memory of its own."""
        out = torch.empty(self.shape(name), dtype=dtype)
        for first, rows in self.parts(name, dtype):
            out[first : first + len(rows)] = rows
        return out

    def parts(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The tensor in `dtype`, some rows at a time: (first row, rows [..., K]). Bounds what a conversion holds at once."""
        info, shape, columns = self._info(name), self.shape(name), self._column_order(name)
        for first, rows in self._rows(name):
            values = _dense(rows, info).view(len(rows), *shape[1:])
            if columns is not None:
                values = values[:, torch.from_numpy(columns)]
            yield first, self._changed(name, values).to(dtype)

    def is_four_bit(self, name: str) -> bool:
        """Whether the tensor has 4-bit quants of its own that `quants` can take apart."""
        return self.kind(name) in FOUR_BIT and self._has_groups(name)

    def is_eight_bit(self, name: str) -> bool:
        return self.kind(name) == "Q8_0" and self._has_groups(name)

    def quants(self, name: str) -> Iterator[tuple[int, Quantised]]:
        """The tensor's own small integers, some rows at a time: (first row, rows)."""
        take_apart = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q8_0": _q8_0}[self.kind(name)]
        columns = self._column_order(name)
        for first, rows in self._rows(name):
            part = take_apart(rows)
            yield first, part if columns is None else _columns(part, columns)

    def _info(self, name: str) -> TensorInfo:
        return self._files.tensors[self._names[name]]

    def _rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The file's bytes, some rows at a time in the wanted order: (first row, uint8 [rows, bytes of a row])."""
        info = self._info(name)
        raw = np.memmap(info.file, dtype=np.uint8, mode="c", offset=info.offset, shape=(info.nbytes,)).reshape(info.shape[0], -1)
        order = self._row_order(name)
        count = len(raw) if order is None else len(order)
        step = max(1, PART_VALUES // info.shape[-1])
        for first in range(0, count, step):
            yield first, raw[first : first + step] if order is None else raw[order[first : first + step]]

    def _changed(self, name: str, values: Tensor) -> Tensor:
        """What a file leaves to the reader: norms without their offset, decays as logarithms."""
        part = name.rpartition(".")[2]
        if part == "decay" and self._files.naming(name) == "hf":
            return -values.float().exp()
        if part in _NORMS and self._spec.norm_offset:
            return values.float() + self._spec.norm_offset
        return values

    def _row_order(self, name: str) -> np.ndarray | None:
        """File row of each wanted row; None: as they are."""
        spec, part = self._spec, name.rpartition(".")[2].removesuffix("_bias")
        if spec.attn_gate and part in ("q", "q_gate"):
            rows = np.arange(2 * spec.num_heads * spec.head_dim).reshape(spec.num_heads, 2, spec.head_dim)
            return rows[:, int(part == "q_gate")].reshape(-1)
        if self._files.naming(name) != "gguf":
            return None
        if spec.arch == "llama" and part in ("q", "k"):
            heads = spec.num_heads if part == "q" else spec.num_kv_heads
            return np.arange(heads * spec.head_dim).reshape(heads, spec.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        delta = spec.delta
        if delta is None or delta.value_heads == delta.key_heads:
            return None
        if part in ("in_z", "in_qkv", "conv"):
            first = 0 if part == "in_z" else 2 * delta.key_width
            return np.concatenate([np.arange(first), first + _untiled(delta, delta.value_dim)])
        return _untiled(delta, 1) if name.endswith((".in_a", ".in_b", ".dt_bias", ".decay")) else None

    def _column_order(self, name: str) -> np.ndarray | None:
        """File column of each wanted column; None: as they are."""
        delta = self._spec.delta
        if delta is None or delta.value_heads == delta.key_heads or not name.endswith(".out"):
            return None
        return _untiled(delta, delta.value_dim) if self._files.naming(name) == "gguf" else None

    def _has_groups(self, name: str) -> bool:
        """Whether rows are whole groups, and stay so when their columns are put in order."""
        moved = self._spec.delta.value_dim if self._spec.delta and self._column_order(name) is not None else 0
        return self.shape(name)[-1] % GROUP == 0 and moved % GROUP == 0


def _untiled(delta: DeltaSpec, width: int) -> np.ndarray:
    """File row of each row of the value heads, `width` rows each: the file has the heads tiled (first those that come first
    behind each key head), here they are grouped by key head."""
    heads = np.arange(delta.value_heads).reshape(-1, delta.key_heads).T.reshape(-1)
    return (heads[:, None] * width + np.arange(width)).reshape(-1)


def _columns(part: Quantised, order: np.ndarray) -> Quantised:
    """The same with its columns in another order, in which groups stay whole."""
    groups = order[::GROUP] // GROUP
    minimum = None if part.minimum is None else np.ascontiguousarray(part.minimum[:, groups])
    return Quantised(np.ascontiguousarray(part.quants[:, order]), np.ascontiguousarray(part.scale[:, groups]), minimum)


def _dense(rows: np.ndarray, info: TensorInfo) -> Tensor:
    """Rows of bytes -> numbers in the file's precision (dequantised: float32)."""
    if info.dtype in _TORCH:
        return torch.from_numpy(np.ascontiguousarray(rows)).view(-1).view(_TORCH[info.dtype])
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[info.dtype]))


def four_bits(values: np.ndarray) -> Quantised:
    """The nearest 4-bit form of float32 [N, K]: 16 even steps from the least to the greatest weight of each group of 32."""
    groups = values.reshape(len(values), -1, GROUP)
    least = groups.min(-1)
    scale = ((groups.max(-1) - least) / 15).astype(np.float16)
    minimum = least.astype(np.float16)
    step = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    quants = ((groups - minimum.astype(np.float32)[..., None]) / step).round().clip(0, 15).astype(np.uint8)
    return Quantised(quants.reshape(values.shape), scale, minimum)


def _half(two_bytes: np.ndarray) -> np.ndarray:
    """float16 [...] of little-endian bytes [..., 2]."""
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[N, blocks, 16] bytes -> [N, blocks * 32]: low nibbles first, then high ones, as ggml orders a block."""
    return np.concatenate([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def _q4_0(raw: np.ndarray) -> Quantised:
    """18 bytes a block: d, 32 nibbles; W = (q - 8) d."""
    blocks = raw.reshape(len(raw), -1, 18)
    scale = _half(blocks[:, :, :2])
    return Quantised(_nibbles(blocks[:, :, 2:]), scale, scale * np.float16(-8))


def _q4_1(raw: np.ndarray) -> Quantised:
    """20 bytes a block: d, m, 32 nibbles; W = q d + m."""
    blocks = raw.reshape(len(raw), -1, 20)
    return Quantised(_nibbles(blocks[:, :, 4:]), _half(blocks[:, :, :2]), _half(blocks[:, :, 2:4]))


def _q8_0(raw: np.ndarray) -> Quantised:
    """34 bytes a block: d, 32 signed bytes; W = q d."""
    blocks = raw.reshape(len(raw), -1, 34)
    return Quantised(blocks[:, :, 2:].reshape(len(raw), -1).view(np.int8), _half(blocks[:, :, :2]), None)


def _q4_k(raw: np.ndarray) -> Quantised:
    """144 bytes for 256 weights: d, dmin, 8 six-bit scales and minima, 128 bytes of nibbles; W = d sc q - dmin m.

    The product d sc is rounded to float16 (2^-11 of the scale, a hundredth of the quantisation's own error).
    """
    blocks = raw.reshape(len(raw), -1, 144)
    d, dmin = _half(blocks[:, :, :2]).astype(np.float32), _half(blocks[:, :, 2:4]).astype(np.float32)
    packed = blocks[:, :, 4:16]
    low, high, mixed = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = np.concatenate([low & 63, (mixed & 15) | ((low >> 6) << 4)], -1)
    minima = np.concatenate([high & 63, (mixed >> 4) | ((high >> 6) << 4)], -1)
    quants = _nibbles_k(blocks[:, :, 16:])
    scale = (d[..., None] * scales).reshape(len(raw), -1).astype(np.float16)
    minimum = (-dmin[..., None] * minima).reshape(len(raw), -1).astype(np.float16)
    return Quantised(quants, scale, minimum)


def _nibbles_k(packed: np.ndarray) -> np.ndarray:
    """[N, blocks, 128] bytes -> [N, blocks * 256]: of each 32 bytes the low nibbles are one group, the high the next."""
    parts = packed.reshape(len(packed), -1, 4, 32)
    return np.stack([parts & 15, parts >> 4], 3).reshape(len(packed), -1)
