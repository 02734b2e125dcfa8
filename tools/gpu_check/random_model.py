"""A model of a real model's shape with random weights: as fast as the real one, and nothing to download."""

from itertools import pairwise

import torch
from torch import Tensor

from wire.model_spec import DeltaSpec, ModelSpec, MtpSpec, RopeSpec, tensor_shapes

POOL_VALUES = 64 << 20  # random numbers that all large tensors are cut from: making billions would take a minute


def qwen35_4b(context: int = 262144) -> ModelSpec:
    """Qwen3.5-4B with its head: 24 recurrent layers and 8 with attention. Its numbers of query heads and of the MLP's rows are
    assumed."""
    layers = tuple(index for index in range(32) if index % 4 != 3)
    return ModelSpec(
        arch="qwen35", num_layers=32, hidden=2560, num_heads=16, num_kv_heads=4, head_dim=256, intermediate=9216, vocab=248320,
        rms_eps=1e-6, rope=RopeSpec(theta=1e7), tied=True, qkv_bias=False, o_bias=False, qk_norm=True, mlp_bias=False,
        max_context=context, rotary_dim=64, attn_gate=True, norm_offset=1.0,
        delta=DeltaSpec(layers, key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4), mtp=MtpSpec(9216),
    )  # fmt: skip


def tiny(context: int = 4096) -> ModelSpec:
    """A small model of the same kinds of layers, to try the check itself where there is no card."""
    return ModelSpec(
        arch="qwen35", num_layers=4, hidden=128, num_heads=4, num_kv_heads=2, head_dim=64, intermediate=256, vocab=512,
        rms_eps=1e-6, rope=RopeSpec(theta=1e6), tied=True, qkv_bias=False, o_bias=False, qk_norm=True, mlp_bias=False,
        max_context=context, rotary_dim=16, attn_gate=True, norm_offset=1.0,
        delta=DeltaSpec((0, 1, 2), key_heads=2, value_heads=4, key_dim=32, value_dim=32, kernel=4), mtp=MtpSpec(256),
    )  # fmt: skip


class RandomSource:
    """Tensors by uniform name, as `model/weights.py` gives them: the same for the same spec and seed."""

    def __init__(self, spec: ModelSpec, seed: int = 1) -> None:
        self._shapes = tensor_shapes(spec)
        self._names = {name: at for at, name in enumerate(self._shapes)}
        largest = max(torch.Size(shape).numel() for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(min(POOL_VALUES, largest + 1), generator=generator)
        self._scaled: dict[int, Tensor] = {}  # the pool in bf16 for rows of so many numbers

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dense(self, name: str, dtype: torch.dtype) -> Tensor:
        shape, part = torch.Size(self._shapes[name]), name.rpartition(".")[2]
        if len(shape) == 1:
            return torch.full(shape, {"decay": -0.5, "dt_bias": 0.1}.get(part, 1.0)).to(dtype)
        pool = self._scaled.get(shape[-1])
        if pool is None:
            pool = self._scaled[shape[-1]] = (self._pool * shape[-1] ** -0.5).bfloat16()
        first = self._names[name] * 7919 % len(pool)
        cuts = [*range(-first, shape.numel(), len(pool)), shape.numel()]
        parts = [pool[max(0, -start) : end - start] for start, end in pairwise(cuts)]
        return torch.cat(parts)[: shape.numel()].view(shape).to(dtype)
