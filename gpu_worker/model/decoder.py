"""A model's step in torch, over the operations of `device/reference.py`: Llama, Qwen2, Qwen3, the hybrids of Qwen3.5, and the
head that drafts.

The residual stream is float32, what enters a linear layer has the model's type, logits are float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.device import reference as ops
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.reference import AttentionPlan, DenseLinear
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta import DeltaStep
from gpu_worker.model.layers import AttentionLayer, DeltaLayer, Layer, Mlp, MtpHead, apply, kind, nbytes
from gpu_worker.model.rope import RopeTable
from wire.model_spec import ModelSpec

F = torch.nn.functional


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows of a pass lie. Tensors have padded rows, whose cells are scratch."""

    count: int  # without padding
    blocks: Tensor  # int64
    offsets: Tensor  # int64
    cos: Tensor  # float32 [rows, rotary_dim / 2]
    sin: Tensor
    plan: AttentionPlan


class TorchModel:
    """A model whose step runs in torch operators. Rows are padded for exactness; padding writes to the scratch block."""

    backend = "torch"
    draft_greedy = None  # drafts are chained by the caller

    def __init__(
        self,
        spec: ModelSpec,
        dtype_name: str,
        embed: Tensor,  # float32 or the model's type [vocab, hidden]
        layers: list[Layer],
        norm: Tensor,
        head: DenseLinear,  # float32
        mtp: MtpHead | None,
        rope: RopeTable,
        exact: bool,
    ) -> None:
        self.spec = spec
        self.dtype_name = dtype_name
        self.dtype = self.kv_dtype = torch.float32 if dtype_name == "f32" else torch.bfloat16
        self._embed, self._layers, self._norm, self._head, self._mtp = embed, layers, norm, head, mtp
        self._rope = rope
        self.exact = exact
        self.weight_bytes = nbytes(embed, layers, norm, head, mtp)
        self._place = {index: at for at, index in enumerate(spec.attention_layers)}  # among those with cells, or with a state
        if spec.delta:
            self._place |= {index: at for at, index in enumerate(spec.delta.layers)}

    @property
    def draft_ids(self) -> Tensor | None:
        """int64: the only tokens that the head drafts, in the order of `draft_logits`; None: all."""
        return self._mtp.draft_ids if self._mtp else None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor:
        """Hidden rows after the final norm, [n_out, hidden] in the model's type; writes the cells of every row.

        With a head also its cells, and the hidden row of the newest cell of each block. With recurrent layers the states
        come to stand at `batch.known`. `layers` runs only some layers (the proof of exactness does).
        """
        rows = self._place_rows(batch.positions, batch.seq_of, batch.block_tables, kv)
        states = None
        if self.spec.delta and kv.states:
            states = DeltaStep.of(batch, kv.states, self.spec.delta, self.spec.rms_eps)
        x = F.embedding(self._pad(batch.token_ids), self._embed).float()
        for index in layers if layers is not None else range(len(self._layers)):
            match self._layers[index]:
                case AttentionLayer() as layer:
                    x = self._attend(layer, x, kv, self._place[index], rows)
                case DeltaLayer() as layer:
                    assert states, "a model with recurrent layers needs a cache with states"
                    x = self._recur(layer, x, self._place[index], rows, states)
            x = self._feed_forward(layer.mlp, x)
        if states:
            states.finish()
        if not self._mtp:
            return ops.rms_norm(x[batch.out_rows], self._norm, self.spec.rms_eps).to(self.dtype)
        hidden = ops.rms_norm(x[: rows.count], self._norm, self.spec.rms_eps).to(self.dtype)
        self._fill(self._mtp, batch, rows, hidden.float(), kv)
        return hidden[batch.out_rows]

    def distinct_layers(self) -> list[int]:
        """One layer of each kind (attention or state, formats and fusing of its products); their shapes are the same."""
        return sorted({kind(layer): index for index, layer in enumerate(self._layers)}.values())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n_out, vocab] of hidden rows [n_out, hidden]."""
        rows = len(hidden)
        return self._head(self._pad(hidden.float()))[:rows]

    @torch.inference_mode()
    def draft(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, tables: Tensor, kv: KvCache) -> Tensor:
        """One pass of the head for one row each of n sequences, float32 [n, hidden]: its logits draft the token after.

        token_ids int64 [n] at positions int32 [n], 1 or more; hidden float32 [n, hidden]: of the position before, the
        trunk's or what this gave for it; tables int32 [n, blocks]. Writes the head's cell at each position.
        """
        mtp = self._mtp
        if mtp is None:
            raise ValueError("this model has no head that drafts")
        if int(positions.min()) < 1:
            raise ValueError("the head has nothing to pair the first token with")
        rows = self._place_rows(positions, torch.arange(len(positions), dtype=torch.int32), tables, kv, first=1)
        x = self._pair(mtp, token_ids, hidden)
        x = self._feed_forward(mtp.layer.mlp, self._attend(mtp.layer, x, kv, kv.layers - 1, rows))
        return ops.rms_norm(x[: rows.count], mtp.norm, self.spec.rms_eps)

    @torch.inference_mode()
    def draft_logits(self, rows: Tensor) -> Tensor:
        """float32 [n, draft vocabulary] of rows that `draft` gave."""
        if self._mtp is None:
            raise ValueError("this model has no head that drafts")
        return self._mtp.logits(self._pad(rows))[: len(rows)]

    # parts ------------------------------------------------------------------------------------------------------------
    def _place_rows(self, positions: Tensor, seq_of: Tensor, tables: Tensor, kv: KvCache, first: int = 0) -> _Rows:
        """`first`: the cell at which attention begins."""
        count, at = len(positions), self._pad(positions).long()
        self._rope.reach(int(at.max()))
        blocks = tables[self._pad(seq_of).long(), at // kv.block_size].long()
        blocks[count:] = kv.scratch
        plan = AttentionPlan.of(positions, seq_of, tables, kv, self.spec.num_heads, first)
        return _Rows(count, blocks, at % kv.block_size, self._rope.cos[at], self._rope.sin[at], plan)

    def _attend(self, layer: AttentionLayer, x: Tensor, kv: KvCache, index: int, rows: _Rows) -> Tensor:
        spec, width = self.spec, self.spec.num_heads * self.spec.head_dim
        normed = self._normed(x, layer.norm)
        self._write(layer, normed, kv, index, rows)
        q, gate = apply(layer.q, normed).tensor_split([width], -1)
        q = q.reshape(len(x), spec.num_heads, spec.head_dim)
        if layer.q_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.rms_eps)
        q = ops.rope(q, rows.cos, rows.sin)
        attended = torch.zeros(len(x), width, dtype=self.dtype)
        attended[: rows.count] = ops.attention(q[: rows.count], kv, index, rows.plan)
        if spec.attn_gate:
            attended = (attended.float() * gate.float().sigmoid()).to(self.dtype)
        return x + layer.o(attended).float()

    def _write(self, layer: AttentionLayer, normed: Tensor, kv: KvCache, index: int, rows: _Rows) -> None:
        """The cells of the rows in one layer."""
        spec = self.spec
        k, v = apply(layer.kv, normed).view(len(normed), 2, spec.num_kv_heads, spec.head_dim).unbind(1)
        if layer.k_norm is not None:
            k = ops.rms_norm(k, layer.k_norm, spec.rms_eps)
        ops.write_cells(kv, index, rows.blocks, rows.offsets, ops.rope(k, rows.cos, rows.sin), v)

    def _recur(self, layer: DeltaLayer, x: Tensor, index: int, rows: _Rows, states: DeltaStep) -> Tensor:
        normed = self._normed(x, layer.norm)
        qkvz, ab = (apply(parts, normed)[: rows.count].float() for parts in (layer.qkvz, layer.ab))
        y = states.run(layer, index, qkvz, ab).to(self.dtype)
        return x + layer.out(self._pad(y)).float()

    def _feed_forward(self, mlp: Mlp, x: Tensor) -> Tensor:
        return x + mlp.down(ops.silu_mul(apply(mlp.gate_up, self._normed(x, mlp.norm)))).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self.spec.rms_eps).to(self.dtype)

    def _pair(self, mtp: MtpHead, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """What enters the head's layer, float32 [padded rows, hidden]."""
        embedded = F.embedding(self._pad(token_ids), self._embed).float()
        both = [self._normed(embedded, mtp.embed_norm), self._normed(self._pad(hidden), mtp.hidden_norm)]
        return apply(mtp.fc, torch.cat(both, -1)).float()

    def _fill(self, mtp: MtpHead, batch: Batch, rows: _Rows, hidden: Tensor, kv: KvCache) -> None:
        """The head's cells of all rows, from hidden rows float32 [T, hidden]; and the newest hidden row of each block."""
        assert kv.hidden is not None, "a model with a head needs a cache with hidden rows"
        positions, seq_of = batch.positions.long(), batch.seq_of.long()
        begins = torch.ones(rows.count, dtype=torch.bool)
        begins[1:] = seq_of[1:] != seq_of[:-1]
        ends = begins.roll(-1) | (positions % kv.block_size == kv.block_size - 1)
        before = hidden.roll(1, 0)
        back = (positions[begins] - 1).clamp(min=0)
        kept = kv.hidden[batch.block_tables[seq_of[begins], back // kv.block_size].long()]
        before[begins] = torch.where(positions[begins, None] > 0, kept, 0.0)  # the first token's cell is never attended
        normed = self._normed(self._pair(mtp, batch.token_ids, before), mtp.layer.norm)
        self._write(mtp.layer, normed, kv, kv.layers - 1, rows)
        kv.hidden[rows.blocks[: rows.count][ends]] = hidden[ends]

    def _pad(self, rows: Tensor) -> Tensor:
        """Repeat the last row until the rows are whole products of one size."""
        count = ops.padded_rows(len(rows)) - len(rows)
        if not self.exact or not count or not len(rows):
            return rows
        return torch.cat([rows, rows[-1:].expand(count, *rows.shape[1:])])
