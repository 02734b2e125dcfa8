"""cuda/mlp.cu against float64 and its twin in device/reference.py."""

import pytest
import torch

from gpu_worker.device import reference
from tests.kernels.harness import poisoned, relative, run


@pytest.mark.parametrize(("rows", "inter", "grid"), [(1, 8, 1), (3, 136, 1), (5, 1000, 4)])
@pytest.mark.usefixtures("schedule")
def test_silu_mul(rows: int, inter: int, grid: int):
    gate_up = 3 * torch.randn(rows, 2 * inter, generator=torch.Generator().manual_seed(rows)).bfloat16()
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])  # where exp overflows
    y = poisoned(rows, inter, dtype=torch.bfloat16)
    run("mlp", "silu_mul", (grid,), 256, [y, gate_up, rows, inter])
    gate, up = gate_up.double().chunk(2, -1)
    assert relative(y, gate * gate.sigmoid() * up) < 4e-3
    assert relative(y, reference.silu_mul(gate_up)) < 1e-3
