"""A model's weights on a card: bf16 matrices, those with one input fused, and what is no matrix in float32."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.torch_on_card import TorchOnCard
from gpu_worker.model.layers import nbytes
from gpu_worker.model.rope import RopeTable
from wire.model_spec import ModelError, ModelSpec

HEAD_DIMS, KEY_DIMS = (64, 96, 128, 256), (32, 64, 128)  # that there are kernels for
QUERY_HEADS = 16  # a key-value head, at most
ALIGNED = 8  # outputs of a product are a multiple of this: kernels read 16 bytes at once


class Source(Protocol):
    """Where tensors come from, by uniform name: `model/weights.py`, or random numbers."""

    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dense(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W^T + b"""

    weight: Tensor  # bf16 [N, K]
    bias: Tensor | None = None  # bf16 [N]

    def rows(self, first: int) -> "Product":
        """The same without the first outputs."""
        return Product(self.weight[first:], None if self.bias is None else self.bias[first:])


@dataclass(frozen=True, slots=True)
class CardMlp:
    norm: Tensor  # float32 [hidden]
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class CardAttention:
    norm: Tensor  # float32 [hidden]
    qkv: Product  # outputs: query heads, their gates where the model has them, keys, values
    q_norm: Tensor | None  # float32 [head_dim]
    k_norm: Tensor | None
    o: Product
    mlp: CardMlp


@dataclass(frozen=True, slots=True)
class CardDelta:
    """A gated delta net."""

    norm: Tensor  # float32 [hidden]
    mixed: Product  # outputs: channels of the convolution, output gate, decay and strength of each value head, padding
    conv: Tensor  # float32 [taps, channels]
    dt_bias: Tensor  # float32 [value_heads]
    decay: Tensor  # float32 [value_heads]: -exp(A_log)
    state_norm: Tensor  # float32 [value_dim]
    out: Product
    mlp: CardMlp


@dataclass(frozen=True, slots=True)
class CardHead:
    """The head that drafts."""

    embed_norm: Tensor  # float32 [hidden]
    hidden_norm: Tensor
    fc: Product  # [hidden, 2 * hidden]; inputs: embedding, then hidden row
    layer: CardAttention
    norm: Tensor
    logits: Product  # the trunk's, or its rows that are drafted
    draft_ids: Tensor | None  # int32: the tokens of these rows; None: all
    column_of: Tensor | None  # int32 [vocab]: the row of each token, -1: none


@dataclass(frozen=True, slots=True)
class CardWeights:
    embed: Tensor  # bf16 [vocab, hidden]
    layers: list[CardAttention | CardDelta]
    norm: Tensor  # float32 [hidden]
    head: Product
    mtp: CardHead | None
    cos: Tensor  # float32 [positions, rotary_dim / 2]
    sin: Tensor

    @property
    def nbytes(self) -> int:
        return nbytes(self.embed, self.layers, self.norm, self.head, self.mtp, self.cos, self.sin)


def check(spec: ModelSpec) -> None:
    """ModelError, in one line, if there are no kernels for this shape."""
    widths = {"hidden": spec.hidden, "intermediate": spec.intermediate}
    if spec.mtp:
        widths["intermediate of the head"] = spec.mtp.intermediate
    for name, width in widths.items():
        if width % 8:
            raise ModelError(f"on a card the model's width ({name}) must be a multiple of 8, it is {width}; use --device cpu")
    if spec.head_dim not in HEAD_DIMS:
        raise ModelError(f"on a card heads have {_list(HEAD_DIMS)} dimensions, here {spec.head_dim}; use --device cpu")
    if (group := spec.num_heads // spec.num_kv_heads) > QUERY_HEADS:
        raise ModelError(f"on a card at most {QUERY_HEADS} query heads share one of keys, here {group} do; use --device cpu")
    if (delta := spec.delta) and (delta.key_dim not in KEY_DIMS or delta.value_dim % 32):
        raise ModelError(
            f"on a card recurrent layers have keys of {_list(KEY_DIMS)} and values of a multiple of 32 dimensions, "
            f"this model has {delta.key_dim} and {delta.value_dim}; use --device cpu"
        )


def load(spec: ModelSpec, source: Source, on_card: TorchOnCard, positions: int) -> CardWeights:
    """The weights of `spec` (without `mtp` no head is loaded), and the angles of the first `positions` positions."""
    check(spec)
    loader = _Loader(spec, source, on_card)
    embed = loader.matrix("embed")
    head = Product(embed if spec.tied else loader.matrix("head"))
    layers = [loader.layer(i) for i in range(spec.num_layers)]
    rope = RopeTable(spec.rope, spec.rotary_dim or spec.head_dim, spec.max_context)
    rope.reach(min(positions, spec.max_context) - 1)
    return CardWeights(
        embed=embed,
        layers=layers,
        norm=loader.vector("norm"),
        head=head,
        mtp=loader.head(head) if spec.mtp else None,
        cos=on_card.upload(rope.cos),
        sin=on_card.upload(rope.sin),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    spec: ModelSpec
    source: Source
    on_card: TorchOnCard

    def layer(self, index: int) -> CardAttention | CardDelta:
        prefix = f"layers.{index}."
        return self._delta(prefix) if self.spec.delta and index in self.spec.delta.layers else self._attention(prefix)

    def head(self, trunk: Product) -> CardHead:
        ids = self.source.dense("mtp.draft_ids", torch.int32) if self.source.has("mtp.draft_ids") else None
        logits, columns = trunk, None
        if ids is not None:
            columns = torch.full((self.spec.vocab,), -1, dtype=torch.int32)
            columns[ids.long()] = torch.arange(len(ids), dtype=torch.int32)
            rows = self.source.dense("embed" if self.spec.tied else "head", torch.bfloat16)[ids.long()]
            logits = Product(self.on_card.upload(rows))
        return CardHead(
            embed_norm=self.vector("mtp.embed_norm"),
            hidden_norm=self.vector("mtp.hidden_norm"),
            fc=self._product("mtp.", "fc"),
            layer=self._attention("mtp.layer."),
            norm=self.vector("mtp.norm"),
            logits=logits,
            draft_ids=None if ids is None else self.on_card.upload(ids),
            column_of=None if columns is None else self.on_card.upload(columns),
        )

    def matrix(self, name: str) -> Tensor:
        return self.on_card.upload(self.source.dense(name, torch.bfloat16))

    def vector(self, name: str) -> Tensor:
        return self.on_card.upload(self.source.dense(name, torch.float32).contiguous())

    def _attention(self, prefix: str) -> CardAttention:
        has = self.source.has
        return CardAttention(
            norm=self.vector(prefix + "attn_norm"),
            qkv=self._product(prefix, *(("q", "q_gate", "k", "v") if self.spec.attn_gate else ("q", "k", "v"))),
            q_norm=self.vector(prefix + "q_norm") if has(prefix + "q_norm") else None,
            k_norm=self.vector(prefix + "k_norm") if has(prefix + "k_norm") else None,
            o=self._product(prefix, "o"),
            mlp=self._mlp(prefix),
        )

    def _delta(self, prefix: str) -> CardDelta:
        return CardDelta(
            norm=self.vector(prefix + "attn_norm"),
            mixed=self._product(prefix, "in_qkv", "in_z", "in_a", "in_b"),
            conv=self.on_card.upload(self.source.dense(prefix + "conv", torch.float32).t().contiguous()),
            dt_bias=self.vector(prefix + "dt_bias"),
            decay=self.vector(prefix + "decay"),
            state_norm=self.vector(prefix + "state_norm"),
            out=self._product(prefix, "out"),
            mlp=self._mlp(prefix),
        )

    def _mlp(self, prefix: str) -> CardMlp:
        return CardMlp(
            norm=self.vector(prefix + "mlp_norm"),
            gate_up=self._product(prefix, "gate", "up"),
            down=self._product(prefix, "down"),
        )

    def _product(self, prefix: str, *names: str) -> Product:
        """One fused product. A part without a bias of its own has zeros."""
        source, dtype, parts = self.source, torch.bfloat16, [prefix + name for name in names]
        bias = None
        if any(source.has(f"{part}_bias") for part in parts):
            found = [
                source.dense(f"{part}_bias", dtype)
                if source.has(f"{part}_bias")
                else torch.zeros(source.shape(part)[0], dtype=dtype)
                for part in parts
            ]
            bias = self.on_card.upload(torch.cat(found))
        weights = [source.dense(part, dtype) for part in parts]
        if padding := -sum(map(len, weights)) % ALIGNED:
            assert bias is None, "a padded product has no bias"
            weights.append(torch.zeros(padding, weights[0].shape[1], dtype=dtype))
        return Product(self.on_card.upload(torch.cat(weights)), bias)


def _list(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
