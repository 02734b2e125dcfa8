"""A model whose whole step is one call into the native library. Row-invariant by construction, so rows need no padding."""

import ctypes
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import native
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.native import BF16, F32, Q4, Q8, HeadStruct, LayerStruct, Packed, ShapeStruct, StepStruct
from gpu_worker.model.batch import Batch
from gpu_worker.model.rope import RopeTable
from gpu_worker.model.weights import GROUP, Weights, four_bits
from wire.model_spec import ModelSpec

_ATTENTION = ("q", "k", "v", "q_gate", "o", "gate", "up", "down")  # products of a layer
_RECURRENT = ("in_qkv", "in_z", "in_a", "in_b", "out", "gate", "up", "down")
_VECTORS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "dt_bias", "decay", "state_norm")
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
        self.draft_ids: Tensor | None = None  # int64 [draft vocab]: the tokens that are drafted; None: all
        self._lib = lib
        self._weights: Weights | None = weights
        self._kept: list[Tensor | Packed] = []  # memory that the library points into
        self._formats: list[tuple[object, ...]] = []  # of each layer's products
        self._rope = RopeTable(spec.rope, spec.rotary_dim or spec.head_dim, spec.max_context)
        self._step = StepStruct()
        self._model = lib.pk_model(ctypes.byref(_shape(spec, dtype_name == "f32")), threads)
        self._set_rope()
        for index in range(spec.num_layers):
            self._load_layer(index)
        embed = self._matrix("embed", keep_8bit_head)
        output = embed if spec.tied else self._matrix("head", keep_8bit_head)
        norm = self._vector("norm")
        lib.pk_set_ends(self._model, ctypes.byref(embed.struct), ctypes.byref(output.struct), norm)
        if spec.mtp:
            self._load_head(output, keep_8bit_head)
        self.weight_bytes = sum(kept.nbytes for kept in self._kept)
        self._weights = None

    def close(self) -> None:
        """End the threads and give the memory back; the model cannot be used any more."""
        if self._model:
            self._lib.pk_free(self._model)
            self._model = None
            self._kept.clear()

    def __del__(self) -> None:
        self.close()

    def distinct_layers(self) -> list[int]:
        """One layer of each kind (attention or recurrent, and the formats of its products); their shapes are the same."""
        return sorted({formats: index for index, formats in enumerate(self._formats)}.values())

    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor:
        """float32 [n_out, hidden]: hidden rows after the final norm; writes the cells of every row, the head's included, and
        the states of its sequences.

        IndexError if a number of the batch is out of range, ValueError if a slot's state is of another position. `layers` runs
        only some layers (the proof of exactness does).
        """
        out = torch.empty(len(batch.out_rows), self.spec.hidden)
        only = None if layers is None else np.array(layers, dtype=np.int32)
        step = self._step
        step.out_count, step.out_rows = len(batch.out_rows), batch.out_rows.data_ptr()
        step.only, step.only_count = (None, 0) if only is None else (only.ctypes.data, len(only))
        step.known, step.slots = batch.known.data_ptr(), batch.state_slots.data_ptr()
        step.hidden = out.data_ptr()
        self._run(self._lib.pk_forward, batch.token_ids, batch.positions, batch.seq_of, batch.block_tables, kv)
        return out

    def draft(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, tables: Tensor, kv: KvCache) -> Tensor:
        """float32 [n, hidden]: one pass of the head for one row of each of n sequences, for `draft_logits` and the next pass.

        token_ids int64 [n], positions int32 [n] from 1 on, hidden float32 [n, hidden] of the positions before, tables int32
        [n, w]. Writes the head's cells there. IndexError if a number is out of range.
        """
        out = torch.empty(len(token_ids), self.spec.hidden)
        self._step.hidden = out.data_ptr()
        self._draft(self._lib.pk_draft, token_ids, positions, hidden, tables, kv)
        return out

    def draft_greedy(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, tables: Tensor, counts: list[int], kv: KvCache
    ) -> list[list[int]]:
        """`counts[i]` drafts behind row i, each the best of `draft_logits` and fed to the next pass: the same as one by one, in
        one call. Tables need room for the last draft but one."""
        most = max(counts)
        wanted = np.array(counts, dtype=np.int32)
        ids = None if self.draft_ids is None else self.draft_ids.data_ptr()
        out = np.empty((len(counts), most), dtype=np.int64)
        last = max(position + count for position, count in zip(positions.tolist(), counts, strict=True)) - 1
        if last >= len(self._rope.cos):
            self._rope.reach(last)
            self._set_rope()

        def chain(model: int, step: object) -> int:
            return self._lib.pk_draft_greedy(model, step, wanted.ctypes.data, ids, most, out.ctypes.data)

        self._draft(chain, token_ids, positions, hidden, tables, kv)
        return [row[:count] for row, count in zip(out.tolist(), counts, strict=True)]

    def _draft(
        self, function: Callable[..., int], token_ids: Tensor, positions: Tensor, hidden: Tensor, tables: Tensor, kv: KvCache
    ) -> None:
        """One row for each of the sequences, through the head only."""
        hidden, tables = hidden.float().contiguous(), tables.contiguous()
        step = self._step
        step.out_count, step.out_rows, step.only, step.only_count = 0, None, None, 0
        step.known, step.slots = None, None
        step.given = hidden.data_ptr()
        self._run(function, token_ids, positions, torch.arange(len(token_ids), dtype=torch.int32), tables, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n_out, vocab] of hidden rows [n_out, hidden]."""
        return self._logits(self._lib.pk_logits, hidden, self.spec.vocab)

    def draft_logits(self, rows: Tensor) -> Tensor:
        """float32 [n, draft vocab] of rows [n, hidden] of `draft`: the columns of `logits` that `draft_ids` names."""
        return self._logits(self._lib.pk_draft_logits, rows, self.spec.vocab if self.draft_ids is None else len(self.draft_ids))

    def _logits(self, function: Callable[..., None], hidden: Tensor, columns: int) -> Tensor:
        hidden = hidden.float().contiguous()
        out = torch.empty(len(hidden), columns)
        function(self._model, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    def _run(
        self,
        function: Callable[..., int],
        token_ids: Tensor,
        positions: Tensor,
        seq_of: Tensor,
        tables: Tensor,
        kv: KvCache,
    ) -> None:
        """Fill in what every step has and call the library."""
        if kv.block_size % 16 or kv.dtype != self.kv_dtype or kv.layers != self.spec.kv_layers:
            raise ValueError(f"{kv.layers} layers of cells of {kv.dtype} in blocks of {kv.block_size} do not fit this model")
        step = self._step
        step.rows, (step.sequences, step.table_width) = len(token_ids), tables.shape
        step.tokens, step.positions, step.seq_of = token_ids.data_ptr(), positions.data_ptr(), seq_of.data_ptr()
        step.tables = tables.data_ptr()
        _point_to(step, kv)
        done = function(self._model, ctypes.byref(step))
        if not done:
            self._rope.reach(int(positions.max()))  # a sequence has outgrown the table, or the step is wrong
            self._set_rope()
            done = function(self._model, ctypes.byref(step))
        if not done:
            raise IndexError("a token id, a position, a block or a state slot of the step is out of range")
        if done < 0:
            raise ValueError("a state slot holds the state of another position")

    def _set_rope(self) -> None:
        self._lib.pk_set_rope(self._model, self._rope.cos.data_ptr(), self._rope.sin.data_ptr(), len(self._rope.cos))

    # loading ----------------------------------------------------------------------------------------------------------
    def _keep(self, thing: Kept) -> Kept:
        self._kept.append(thing)
        return thing

    def _load_layer(self, index: int) -> None:
        delta, cells = self.spec.delta, self.spec.attention_layers
        recurrent = delta is not None and index in delta.layers
        layer, formats = self._layer(f"layers.{index}.", _RECURRENT if recurrent else _ATTENTION)
        if delta is not None and recurrent:
            layer.conv = self._keep(self._read(f"layers.{index}.conv").t().contiguous()).data_ptr()
        layer.cells = -1 if recurrent else cells.index(index)
        layer.state = delta.layers.index(index) if delta is not None and recurrent else -1
        self._formats.append((recurrent, *formats))
        self._lib.pk_set_layer(self._model, index, ctypes.byref(layer))

    def _load_head(self, output: Packed, keep_8bit: bool) -> None:
        head = HeadStruct()
        head.fc = self._matrix("mtp.fc", False).struct
        head.embed_norm, head.hidden_norm, head.norm = (self._vector(f"mtp.{n}") for n in ("embed_norm", "hidden_norm", "norm"))
        head.layer, _ = self._layer("mtp.layer.", _ATTENTION)
        head.layer.cells, head.layer.state = self.spec.kv_layers - 1, -1
        head.draft = output.struct
        assert self._weights is not None
        if self._weights.has("mtp.draft_ids"):
            self.draft_ids = self._weights.dense("mtp.draft_ids", torch.int64)
            name = "embed" if self.spec.tied else "head"
            head.draft = self._matrix(name, keep_8bit, self.draft_ids.numpy()).struct
        self._lib.pk_set_head(self._model, ctypes.byref(head))

    def _layer(self, prefix: str, products: tuple[str, ...]) -> tuple[LayerStruct, tuple[int, ...]]:
        """The matrices and vectors that a layer has, and the matrices' formats."""
        assert self._weights is not None
        layer = LayerStruct()
        formats = []
        for part in products:
            if self._weights.has(prefix + part):
                packed = self._matrix(prefix + part, False)
                setattr(layer, part, packed.struct)
                formats.append(packed.form)
        for part in _VECTORS:
            if self._weights.has(prefix + part):
                setattr(layer, part, self._vector(prefix + part))
        return layer, tuple(formats)

    def _read(self, name: str) -> Tensor:
        assert self._weights is not None
        return self._weights.dense(name, torch.float32)

    def _vector(self, name: str) -> int:
        """Address of a float32 tensor."""
        return self._keep(self._read(name).contiguous()).data_ptr()

    def _matrix(self, name: str, keep_8bit: bool, pick: np.ndarray | None = None) -> Packed:
        """One matrix, or the rows `pick` of it: 4 bits if the file and the model's type say so, or for the head of such a model;
        8 bits if wanted and in the file; dense otherwise."""
        weights = self._weights
        assert weights is not None
        n, k = weights.shape(name)
        bias = weights.dense(f"{name}_bias", torch.float32) if weights.has(f"{name}_bias") else None
        quantised = (self.dtype_name == "int4" and weights.is_four_bit(name)) or (keep_8bit and weights.is_eight_bit(name))
        rows = len(pick) if pick is not None else n
        if quantised:
            packed = Packed(self._lib, Q4 if weights.is_four_bit(name) else Q8, rows, k, bias)
            for first, part in weights.quants(name):
                for at, chosen in _picked(pick, first, len(part.quants)):
                    minimum = None if part.minimum is None else part.minimum[chosen]
                    packed.put_quants(part.quants[chosen], part.scale[chosen], minimum, at)
            return self._keep(packed)
        if self.dtype_name == "int4" and name.startswith("mtp.") and k % GROUP == 0:
            return self._keep(self._in_four_bits(name, bias))
        form, dtype = (F32, torch.float32) if self.dtype_name == "f32" else (BF16, torch.bfloat16)
        packed = Packed(self._lib, form, rows, k, bias)
        for first, values in weights.parts(name, dtype):
            for at, chosen in _picked(pick, first, len(values)):
                packed.put_dense(values[chosen], at)
        return self._keep(packed)

    def _in_four_bits(self, name: str, bias: Tensor | None) -> Packed:
        """A matrix of the head like those of its model: what it drafts changes the speed only, and so it costs a third."""
        weights = self._weights
        assert weights is not None
        n, k = weights.shape(name)
        packed = Packed(self._lib, Q4, n, k, bias)
        for first, values in weights.parts(name, torch.float32):
            part = four_bits(values.numpy())
            packed.put_quants(part.quants, part.scale, part.minimum, first)
        return packed


def _picked(pick: np.ndarray | None, first: int, count: int) -> list[tuple[int, slice | np.ndarray]]:
    """Where some of the rows first .. first + count go, and which of these rows (counted from 0): all of them in order, or
    those that `pick` names, each to its place there, in runs."""
    if pick is None:
        return [(first, slice(None))]
    places = np.flatnonzero((pick >= first) & (pick < first + count))
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [(int(run[0]), pick[run] - first) for run in runs if len(run)]


def _point_to(step: StepStruct, kv: KvCache) -> None:
    """Where the blocks and the state slots lie."""
    blocks, states = step.blocks, step.states
    blocks.base, blocks.block_bytes, blocks.count = kv.tensor.data_ptr(), kv.block_bytes, kv.num_blocks + 1
    blocks.block_size, blocks.layers = kv.block_size, kv.layers
    blocks.hidden_at = kv.hidden.data_ptr() - kv.tensor.data_ptr() if kv.hidden is not None else 0
    states.base = None
    if kv.states is not None:
        states.base, states.stride, states.slots = kv.states.flat.data_ptr(), kv.states.stride, kv.states.slots
        states.log_entries, states.conv_entries = kv.states.log_k.shape[2], kv.states.conv.shape[2]
        for name, offset in kv.states.offsets.items():
            setattr(states, name, offset)


def _shape(spec: ModelSpec, is_f32: bool) -> ShapeStruct:
    shape = ShapeStruct(
        layers=spec.num_layers,
        hidden=spec.hidden,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        vocab=spec.vocab,
        is_f32=is_f32,
        rotary_dim=spec.rotary_dim or spec.head_dim,
        mtp_intermediate=spec.mtp.intermediate if spec.mtp else 0,
        eps=spec.rms_eps,
    )
    if delta := spec.delta:
        shape.key_heads, shape.value_heads, shape.kernel = delta.key_heads, delta.value_heads, delta.kernel
        shape.key_dim, shape.value_dim = delta.key_dim, delta.value_dim
    return shape


def fits(spec: ModelSpec) -> bool:
    """Whether the library can run this shape."""
    widths = [spec.hidden, spec.intermediate]
    if spec.mtp:
        widths.append(spec.mtp.intermediate)
    if spec.delta:
        widths += [spec.delta.key_dim, spec.delta.value_dim]
    return native.supports(widths, spec.head_dim)
