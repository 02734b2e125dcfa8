"""The weights of a layer in torch, with attention or with a recurrent state, and of the head that drafts."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from gpu_worker.device.reference import DenseLinear, Linear

Fused = tuple[Linear, ...]  # products of one input, whose results are concatenated


@dataclass(frozen=True, slots=True)
class Mlp:
    norm: Tensor  # float32 [hidden]
    gate_up: Fused
    down: Linear


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    norm: Tensor  # float32 [hidden]
    q: Fused  # rows of the query heads, then those of their gates where the model has them
    kv: Fused
    q_norm: Tensor | None  # float32 [head_dim]
    k_norm: Tensor | None
    o: Linear
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A gated delta net. What is not a product is float32."""

    norm: Tensor  # [hidden]
    qkvz: Fused  # rows: channels of the convolution, then the output gate
    ab: Fused  # rows: decay, then strength, of each value head
    conv: Tensor  # [channels, taps]
    dt_bias: Tensor  # [value_heads]
    decay: Tensor  # [value_heads]: -exp(A_log)
    state_norm: Tensor  # [value_dim]
    out: Linear
    mlp: Mlp


Layer = AttentionLayer | DeltaLayer


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The head: (embedding of token p, hidden row p - 1) through one attention layer predicts token p + 1."""

    embed_norm: Tensor  # float32 [hidden]
    hidden_norm: Tensor
    fc: Fused  # [hidden, 2 * hidden]; columns: embedding, then hidden row
    layer: AttentionLayer
    norm: Tensor
    logits: DenseLinear  # float32: the trunk's, or those of its rows that are drafted
    draft_ids: Tensor | None  # int64: the tokens of the rows of `logits`; None: all


def apply(parts: Fused, x: Tensor) -> Tensor:
    return parts[0](x) if len(parts) == 1 else torch.cat([part(x) for part in parts], -1)


def kind(layer: Layer) -> tuple[type, ...]:
    """Which products a layer runs, by their formats: layers of one kind run the same code on the same shapes."""
    match layer:
        case AttentionLayer():
            own = (*layer.q, *layer.kv, layer.o)
        case DeltaLayer():
            own = (*layer.qkvz, *layer.ab, layer.out)
    return (type(layer), *map(type, (*own, *layer.mlp.gate_up, layer.mlp.down)))


def nbytes(*parts: object) -> int:
    """Bytes of all tensors in some weights; what two of them share counts once."""
    return sum({t.data_ptr(): t.nbytes for part in parts for t in _tensors(part)}.values())


def _tensors(part: object) -> Iterator[Tensor]:
    match part:
        case Tensor():
            yield part
        case list() | tuple():
            for inner in part:
                yield from _tensors(inner)
        case _ if is_dataclass(part):
            for field in fields(part):
                yield from _tensors(getattr(part, field.name))
