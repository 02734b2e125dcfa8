"""The transformer of Llama, Qwen2 and Qwen3 in torch, over the operations of `device/reference.py`.

The residual stream is float32, what enters a linear layer has the model's type, logits are float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.device import reference as ops
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.reference import AttentionPlan, DenseLinear, Linear
from gpu_worker.model.batch import Batch
from gpu_worker.model.rope import RopeTable
from wire.model_spec import ModelSpec

F = torch.nn.functional


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. A fused product is a tuple: its parts' results are concatenated."""

    attn_norm: Tensor  # float32 [hidden]
    qkv: tuple[Linear, ...]
    q_norm: Tensor | None  # float32 [head_dim]
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: tuple[Linear, ...]
    down: Linear


class TorchModel:
    """A model whose step runs in torch operators. Rows are padded for exactness; padding writes to the scratch block."""

    backend = "torch"

    def __init__(
        self,
        spec: ModelSpec,
        dtype_name: str,
        embed: Tensor,  # float32 or the model's type [vocab, hidden]
        layers: list[Layer],
        norm: Tensor,
        head: DenseLinear,  # float32
        rope: RopeTable,
        exact: bool,
    ) -> None:
        self.spec = spec
        self.dtype_name = dtype_name
        self.dtype = self.kv_dtype = torch.float32 if dtype_name == "f32" else torch.bfloat16
        self._embed, self._layers, self._norm, self._head = embed, layers, norm, head
        self._rope = rope
        self.exact = exact
        self.weight_bytes = _nbytes(embed, layers, norm, head)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor:
        """Hidden rows after the final norm, [n_out, hidden] in the model's type; writes the cells of every row.

        `layers` runs only some layers (the proof of exactness does).
        """
        rows, tables = len(batch.token_ids), batch.block_tables
        ids, positions, seq_of = self._pad(batch.token_ids), self._pad(batch.positions), self._pad(batch.seq_of)
        at = positions.long()
        self._rope.reach(int(at.max()))
        cos, sin = self._rope.cos[at], self._rope.sin[at]
        blocks = tables[seq_of.long(), at // kv.block_size].long()
        blocks[rows:] = kv.scratch
        offsets = at % kv.block_size
        plan = AttentionPlan.of(batch.positions, batch.seq_of, tables, kv, self.spec.num_heads)
        x = F.embedding(ids, self._embed).float()
        for index in layers if layers is not None else range(len(self._layers)):
            layer = self._layers[index]
            q, k, v = self._project(layer, x, cos, sin)
            ops.write_cells(kv, index, blocks, offsets, k, v)
            attended = torch.zeros(len(ids), self.spec.num_heads * self.spec.head_dim, dtype=self.dtype)
            attended[:rows] = ops.attention(q[:rows], kv, index, plan)
            x = x + layer.o(attended).float()
            normed = ops.rms_norm(x, layer.mlp_norm, self.spec.rms_eps).to(self.dtype)
            x = x + layer.down(ops.silu_mul(_fused(layer.gate_up, normed))).float()
        return ops.rms_norm(x[batch.out_rows], self._norm, self.spec.rms_eps).to(self.dtype)

    def distinct_layers(self) -> list[int]:
        """One layer of each kind (formats and fusing of its products); their shapes are the same."""
        kinds = {tuple(type(part).__name__ for part in (*layer.qkv, layer.o, *layer.gate_up, layer.down)): index
                 for index, layer in enumerate(self._layers)}  # fmt: skip
        return sorted(kinds.values())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n_out, vocab] of hidden rows [n_out, hidden]."""
        rows = len(hidden)
        return self._head(self._pad(hidden.float(), torch.float32))[:rows]

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        normed = ops.rms_norm(x, layer.attn_norm, spec.rms_eps).to(self.dtype)
        heads = _fused(layer.qkv, normed).view(len(x), -1, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        if layer.q_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.rms_eps)
        if layer.k_norm is not None:
            k = ops.rms_norm(k, layer.k_norm, spec.rms_eps)
        return ops.rope(q, cos, sin), ops.rope(k, cos, sin), v

    def _pad(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Repeat the last row until the number of rows is one at which linear layers are row-invariant."""
        multiple, least = ops.row_multiple(dtype or self.dtype)
        count = max(-(-len(rows) // multiple) * multiple, least) - len(rows)
        if not self.exact or not count or not len(rows):
            return rows
        return torch.cat([rows, rows[-1:].expand(count, *rows.shape[1:])])


def _fused(parts: tuple[Linear, ...], x: Tensor) -> Tensor:
    return parts[0](x) if len(parts) == 1 else torch.cat([part(x) for part in parts], -1)


def _nbytes(embed: Tensor, layers: list[Layer], norm: Tensor, head: DenseLinear) -> int:
    total = embed.nbytes + norm.nbytes
    if head.weight.data_ptr() != embed.data_ptr():
        total += head.nbytes
    for layer in layers:
        total += sum(part.nbytes for part in (*layer.qkv, layer.o, *layer.gate_up, layer.down))
        total += sum(t.nbytes for t in (layer.attn_norm, layer.q_norm, layer.k_norm, layer.mlp_norm) if t is not None)
    return total
