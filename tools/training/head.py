"""The MTP head as a torch module to train: the layout of Qwen3.5's `mtp.*`, and the loss of chained drafts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

F = torch.nn.functional


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`gated`: queries carry an output gate. `zero_centred`: norms multiply by 1 + weight. `rotary_dim`: rotated dimensions."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rotary_dim: int
    rope_theta: float
    rms_eps: float
    qk_norm: bool
    gated: bool
    zero_centred: bool


class Norm(nn.Module):
    """RMSNorm with weight w, or 1 + w."""

    def __init__(self, size: int, shape: HeadShape) -> None:
        super().__init__()
        self.zero_centred, self.eps = shape.zero_centred, shape.rms_eps
        self.weight = nn.Parameter(torch.zeros(size) if shape.zero_centred else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * (self.weight + float(self.zero_centred))


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width * (2 if shape.gated else 1), bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        if shape.qk_norm:
            self.q_norm, self.k_norm = Norm(shape.head_dim, shape), Norm(shape.head_dim, shape)

    def forward(self, x: Tensor, first: int, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, hidden] at positions first, first + 1, ...

        `own` collects (keys, values) of each depth. Row p sees the rows up to p of depth 1, whose hidden rows are true, and
        of each deeper pass only its own chain: so it is when drafts are chained.
        """
        s = self.shape
        batch, rows, _ = x.shape
        q = self.q_proj(x).view(batch, rows, s.heads, -1)
        gate = None
        if s.gated:
            q, gate = q.chunk(2, -1)
        k = self.k_proj(x).view(batch, rows, s.kv_heads, s.head_dim)
        v = self.v_proj(x).view(batch, rows, s.kv_heads, s.head_dim).transpose(1, 2)
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q, first).transpose(1, 2), self._rotate(k, first).transpose(1, 2)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        own.append((k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if len(own) == 1 else _chained(q, own)
        out = out.transpose(1, 2)
        if gate is not None:
            out = out * gate.sigmoid()
        return self.o_proj(out.reshape(batch, rows, -1))

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        half = self.shape.rotary_dim // 2
        inverse = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(first, first + x.shape[1]).float(), inverse)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _chained(q: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Row p at depth k: the true rows up to p, then its own drafts of depth 2 to k."""
    rows, scale = q.shape[2], q.shape[-1] ** -0.5
    keys, values = own[0]
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    scores = (q @ keys.transpose(2, 3) * scale).float().masked_fill(~causal, float("-inf"))
    chain = [((q * k).sum(-1, keepdim=True) * scale).float() for k, _ in own[1:]]
    weights = torch.cat([scores, *chain], -1).softmax(-1).to(q.dtype)
    out = weights[..., :rows] @ values
    for index, (_, v) in enumerate(own[1:]):
        out = out + weights[..., rows + index, None] * v
    return out


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, first: int, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), first, own)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpHead(nn.Module):
    """One layer that predicts the token after next from (hidden row p, token p + 1), at position p + 1."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.pre_fc_norm_embedding = Norm(shape.hidden, shape)
        self.pre_fc_norm_hidden = Norm(shape.hidden, shape)
        self.norm = Norm(shape.hidden, shape)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden: Tensor, embedded: Tensor, first: int, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """hidden and embedded [B, T, hidden] -> rows [B, T, hidden] for the trunk's head, and for the next depth."""
        pair = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(pair), first, own))


def chained_rows(head: MtpHead, hidden: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
    """What the head gives at each depth, for hidden rows 0..T-1 and the embedded tokens 0..T-1 of whole sequences.

    Depth k (from 1) has T - k rows; row p predicts token p + k + 1, having seen the tokens up to p + k.
    """
    own: list[tuple[Tensor, Tensor]] = []
    rows = hidden
    found = []
    for depth in range(1, depths + 1):
        count = hidden.shape[1] - depth
        own = [(k[:, :, :count], v[:, :, :count]) for k, v in own]
        rows = head(rows[:, :count], embedded[:, depth:], depth, own)
        found.append(rows)
    return found


def divergence(drafted: Tensor, target: Tensor) -> Tensor:
    """Mean KL(target || drafted) of logits [N, vocab], in nats."""
    return F.kl_div(drafted.float().log_softmax(-1), target.float().log_softmax(-1), log_target=True, reduction="batchmean")
