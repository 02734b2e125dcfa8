"""A model whose whole step is one call into the native library. Row-invariant by construction, so rows need no padding."""

import ctypes
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import native
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.native import BF16, F32, Q4, Q8, LayerStruct, Packed, ShapeStruct, StepStruct
from gpu_worker.model.batch import Batch
from gpu_worker.model.rope import RopeTable
from gpu_worker.model.weights import Weights
from wire.model_spec import ModelSpec

_PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
Kept = TypeVar("Kept", Tensor, Packed)


class NativeModel:
    """Weights packed for the library, and its team of threads."""

    backend = "native"
    exact = True

    def __init__(
        self, lib: ctypes.CDLL, weights: Weights, spec: ModelSpec, dtype_name: str, keep_8bit_head: bool, threads: int
    ) -> None:
        self.spec = spec
        self.dtype_name = dtype_name
        self.kv_dtype = torch.float32 if dtype_name == "f32" else torch.bfloat16
        self._lib = lib
        self._kept: list[Tensor | Packed] = []  # memory that the library points into
        self._formats: list[tuple[int, ...]] = []  # of each layer's products
        self._rope = RopeTable(spec.rope, spec.head_dim, spec.max_context)
        shape = ShapeStruct(
            spec.num_layers,
            spec.hidden,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.intermediate,
            spec.vocab,
            dtype_name == "f32",
            spec.rms_eps,
        )
        self._model = lib.pk_model(ctypes.byref(shape), threads)
        self._set_rope()
        for index in range(spec.num_layers):
            self._load_layer(weights, index)
        embed = self._matrix(weights, "embed", keep_8bit_head)
        head = embed if spec.tied else self._matrix(weights, "head", keep_8bit_head)
        norm = self._keep(weights.dense("norm", torch.float32))
        lib.pk_set_ends(self._model, ctypes.byref(embed.struct), ctypes.byref(head.struct), norm.data_ptr())
        self.weight_bytes = sum(kept.nbytes for kept in self._kept)
        self._step = StepStruct()

    def close(self) -> None:
        """End the threads and give the memory back; the model cannot be used any more."""
        if self._model:
            self._lib.pk_free(self._model)
            self._model = None
            self._kept.clear()

    def __del__(self) -> None:
        self.close()

    def distinct_layers(self) -> list[int]:
        """One layer of each kind (formats of its products); their shapes are the same."""
        return sorted({formats: index for index, formats in enumerate(self._formats)}.values())

    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor:
        """float32 [n_out, hidden]: hidden rows after the final norm; writes the cells of every row.

        IndexError if a token id or position is out of range. `layers` runs only some layers (the proof of exactness does).
        """
        if kv.block_size % 16 or kv.dtype != self.kv_dtype:
            raise ValueError(f"cells of {kv.dtype} in blocks of {kv.block_size} do not fit this model")
        out = torch.empty(len(batch.out_rows), self.spec.hidden)
        only = None if layers is None else np.array(layers, dtype=np.int32)
        step = self._step
        step.rows, step.out_count, step.table_width = len(batch.token_ids), len(batch.out_rows), batch.block_tables.shape[1]
        step.tokens, step.positions, step.seq_of = batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.seq_of.data_ptr()
        step.tables, step.out_rows = batch.block_tables.data_ptr(), batch.out_rows.data_ptr()
        step.only, step.only_count = (None, 0) if only is None else (only.ctypes.data, len(only))
        step.pool, step.block_size, step.pool_layers = kv.tensor.data_ptr(), kv.block_size, kv.tensor.shape[1]
        step.hidden = out.data_ptr()
        if not self._lib.pk_forward(self._model, ctypes.byref(step)):
            self._rope.reach(int(batch.positions.max()))  # a sequence has outgrown the table, or the step is wrong
            self._set_rope()
            if not self._lib.pk_forward(self._model, ctypes.byref(step)):
                raise IndexError("a token id, a position or a block of the step is out of range")
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n_out, vocab] of hidden rows [n_out, hidden]."""
        hidden = hidden.float().contiguous()
        out = torch.empty(len(hidden), self.spec.vocab)
        self._lib.pk_logits(self._model, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def _set_rope(self) -> None:
        self._lib.pk_set_rope(self._model, self._rope.cos.data_ptr(), self._rope.sin.data_ptr(), len(self._rope.cos))

    def _keep(self, thing: Kept) -> Kept:
        self._kept.append(thing)
        return thing

    def _load_layer(self, weights: Weights, index: int) -> None:
        prefix = f"layers.{index}."
        layer = LayerStruct()
        packed = [self._matrix(weights, prefix + part, False) for part in _PRODUCTS]
        for part, matrix in zip(_PRODUCTS, packed):
            setattr(layer, part, matrix.struct)
        for part in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
            if weights.has(prefix + part):
                setattr(layer, part, self._keep(weights.dense(prefix + part, torch.float32).contiguous()).data_ptr())
        self._formats.append(tuple(matrix.form for matrix in packed))
        self._lib.pk_set_layer(self._model, index, ctypes.byref(layer))

    def _matrix(self, weights: Weights, name: str, keep_8bit: bool) -> Packed:
        """One matrix: 4 bits if the file and the model's type say so, 8 bits if wanted and in the file, dense otherwise."""
        n, k = weights.shape(name)
        bias = weights.dense(f"{name}_bias", torch.float32) if weights.has(f"{name}_bias") else None
        if (self.dtype_name == "int4" and weights.is_four_bit(name)) or (keep_8bit and weights.is_eight_bit(name)):
            packed = Packed(self._lib, Q4 if weights.is_four_bit(name) else Q8, n, k, bias)
            for first, rows in weights.quants(name):
                packed.put_quants(rows.quants, rows.scale, rows.minimum, first)
            return self._keep(packed)
        form, dtype = (F32, torch.float32) if self.dtype_name == "f32" else (BF16, torch.bfloat16)
        packed = Packed(self._lib, form, n, k, bias)
        for first, rows in weights.parts(name, dtype):
            packed.put_dense(rows, first)
        return self._keep(packed)


def fits(spec: ModelSpec) -> bool:
    """Whether the library can run this shape."""
    return native.supports(spec.hidden, spec.intermediate, spec.num_heads, spec.head_dim)
