"""cuda/cells.cu against float64: norm and rotation of queries and keys, and where new cells land."""

import pytest
import torch

from gpu_worker.device import reference
from tests.kernels.harness import poisoned, relative, run
from tests.kernels.paging import Paged, Shape

pytestmark = pytest.mark.usefixtures("schedule")
EPS = 1e-6


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _turned(x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.double()
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@pytest.mark.parametrize(
    ("dim", "rotary", "heads", "kv_heads", "norms"),
    [
        (64, 64, 4, 2, False),
        (64, 16, 3, 1, True),
        (96, 96, 3, 3, False),
        (128, 128, 16, 1, True),
        (256, 64, 5, 1, True),  # a partial rotation, as the hybrids have it
        (256, 256, 2, 2, False),
    ],
)
def test_write_cells(dim: int, rotary: int, heads: int, kv_heads: int, norms: bool):
    paged = Paged.of(Shape(num_kv_heads=kv_heads, head_dim=dim), [0, 31, 15, 700], [2, 1, 3, 1], seed=dim + rotary, padding=1)
    rows, kv, layer = 7, paged.kv, 1
    # query heads, then a gate that the kernel leaves alone, then keys and values
    columns = {"q": 8, "k": 8 + 2 * heads * dim, "v": 8 + 2 * heads * dim + kv_heads * dim}
    stride = columns["v"] + kv_heads * dim + 16
    qkv = _random(1, rows + 1, stride).bfloat16()
    q_norm, k_norm = (_random(2, dim), _random(3, dim)) if norms else (None, None)
    angles = _random(4, 701, rotary // 2)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    q = poisoned(rows + 1, heads * dim, dtype=torch.bfloat16)
    where = [paged.positions, paged.seq_of, paged.seats, paged.tables, paged.tables.shape[1]]
    args = [kv.memory, kv.block_bytes, qkv, stride, *columns.values(), *where, cos, sin, rotary, q_norm, k_norm]
    grid = (rows + 1, -(-(heads + 2 * kv_heads) // 8))
    run("cells", f"write_cells_d{dim}", grid, 256, [q, *args, heads, kv_heads, layer, EPS])

    at = paged.positions[:rows].long()
    c, s = cos[at, None].double(), sin[at, None].double()
    part = {name: qkv[:rows, column:].float() for name, column in columns.items()}
    queries = _turned(part["q"][:, : heads * dim].reshape(rows, heads, dim), q_norm, c, s)
    keys = _turned(part["k"][:, : kv_heads * dim].reshape(rows, kv_heads, dim), k_norm, c, s)
    values = part["v"][:, : kv_heads * dim].reshape(rows, kv_heads, dim)
    assert relative(q[:rows], queries.reshape(rows, -1)) < 4e-3
    assert q[rows].isnan().all()

    blocks = torch.tensor([paged.block(int(s), int(p)) for s, p in zip(paged.seq_of, paged.positions[:rows])])
    expected = poisoned(*kv.tensor.shape, dtype=torch.bfloat16)
    found = kv.tensor[blocks, layer, :, :, at % 16]
    assert relative(found[:, 0], keys) < 4e-3
    assert torch.equal(found[:, 1].float(), values)
    expected[blocks, layer, :, :, at % 16] = found
    assert torch.equal(kv.tensor.view(torch.int16), expected.view(torch.int16))  # nothing else was touched

    # without queries the same cells
    kv.memory.fill_(0xFF)
    run("cells", f"write_cells_d{dim}", grid, 256, [None, *args, heads, kv_heads, layer, EPS])
    assert torch.equal(kv.tensor.view(torch.int16), expected.view(torch.int16))

    # as the CPU does it, but for one rounding between norm and rotation
    twin = qkv[:rows, columns["k"] : columns["v"]].reshape(rows, kv_heads, dim)
    twin = reference.rope(twin if k_norm is None else reference.rms_norm(twin, k_norm, EPS), cos[at], sin[at])
    assert relative(found[:, 0], twin) < 1e-2
