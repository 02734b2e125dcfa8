"""Operations in torch against their formulas, written out."""

import math

import pytest
import torch

from gpu_worker.device import reference as ops
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.reference import AttentionPlan
from wire.model_spec import ModelSpec, RopeSpec


def spec(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec("llama", 2, 64, heads, kv_heads, head_dim, 96, 300, 1e-5, RopeSpec(), True, False, False, False, False, 4096)


def test_rms_norm_and_silu_by_hand():
    x = torch.tensor([[3.0, -4.0]])
    expected = x / math.sqrt((9 + 16) / 2 + 0.5) * torch.tensor([1.0, 2.0])
    assert torch.allclose(ops.rms_norm(x, torch.tensor([1.0, 2.0]), 0.5), expected)
    gate, up = 0.7, -2.0
    assert ops.silu_mul(torch.tensor([[gate, up]])).item() == pytest.approx(gate / (1 + math.exp(-gate)) * up)


def test_rope_turns_halves_by_the_angle():
    angle = 0.3
    x = torch.tensor([[[1.0, 0.0]]])
    turned = ops.rope(x, torch.tensor([[math.cos(angle)]]), torch.tensor([[math.sin(angle)]]))
    assert torch.allclose(turned, torch.tensor([[[math.cos(angle), math.sin(angle)]]]))


def test_rope_leaves_the_other_dimensions():
    x = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0))
    angles = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    turned = ops.rope(x, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], ops.rope(x[..., :8], angles.cos(), angles.sin()))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "first"), [(4, 4, 16, 0), (9, 3, 64, 0), (9, 3, 64, 1), (14, 2, 80, 1)])
def test_attention_equals_softmax_over_the_sequence_in_scattered_blocks(heads, kv_heads, dim, first):
    generator = torch.Generator().manual_seed(0)
    kv = KvCache(spec(heads, kv_heads, dim), 60, 16, torch.float32)
    kv.tensor.fill_(math.nan)  # whatever is not a cell of the sequence must not matter
    lengths, fed = [530, 7, 2, 40], [20, 7 - first, 1, 1]
    order = torch.randperm(60, generator=generator).tolist()
    tables, keys, values = [], [], []
    for length in lengths:
        tables.append([order.pop() for _ in range(-(-length // 16))])
        keys.append(torch.randn(length, kv_heads, dim, generator=generator))
        values.append(torch.randn(length, kv_heads, dim, generator=generator))
        at = torch.arange(length)
        ops.write_cells(kv, 1, torch.tensor(tables[-1])[at // 16], at % 16, keys[-1], values[-1])
        kv.tensor[tables[-1][0], 1, :, :, :first] = math.nan  # the cells before the first that is attended
    width = max(map(len, tables))
    tables = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, fed)]).int()
    seq_of = torch.cat([torch.full((m,), i) for i, m in enumerate(fed)]).int()
    q = torch.randn(len(positions), heads, dim, generator=generator)
    got = ops.attention(q, kv, 1, AttentionPlan.of(positions, seq_of, tables, kv, heads, first))
    for row in range(len(positions)):
        s, n = int(seq_of[row]), int(positions[row]) + 1
        for head in range(heads):
            k, v = (part[s][first:n, head * kv_heads // heads].double() for part in (keys, values))
            expected = torch.softmax(k @ q[row, head].double() / math.sqrt(dim), 0) @ v
            assert torch.allclose(got[row, head * dim : (head + 1) * dim].double(), expected, atol=1e-5)


def test_four_bit_linear_equals_the_product_with_the_dequantised_weights():
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(16, (64, 96), generator=generator, dtype=torch.uint8)
    scale, minimum = torch.rand(64, 3, generator=generator) * 0.1, -torch.rand(64, 3, generator=generator)
    weight = quants * scale.repeat_interleave(32, 1) + minimum.repeat_interleave(32, 1)
    x, bias = torch.randn(5, 96, generator=generator).bfloat16(), torch.randn(64, generator=generator)
    got = ops.int4_linear(quants, scale, minimum, bias)(x).float()
    expected = x.float() @ weight.T + bias
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()
