"""The harness computes what CUDA would, in every order of the threads, and names what a kernel does wrong."""

from pathlib import Path

import pytest
import torch

from tests.kernels.harness import KernelError, parameters, poisoned, relative, run

FILE = Path(__file__).parent / "harness_kernels.cu"


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def _product(wait: int, sync: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _random(16, 16, dtype=torch.bfloat16), _random(8, 16, dtype=torch.bfloat16)
    c = poisoned(16, 8)
    run(FILE, "product", (1,), 32, [c, a, b, wait, sync])
    return c, a.double() @ b.double().T


@pytest.mark.usefixtures("schedule")
def test_asynchronous_copies_matrices_and_products():
    c, expected = _product(1, 1)
    assert relative(c, expected) < 1e-6


def test_a_copy_that_is_read_too_early_is_not_the_data_and_one_nobody_waits_for_is_named():
    with pytest.raises(KernelError, match="never waited for"):
        _product(0, 1)


def test_a_missing_barrier_shows_in_some_order():
    x, wrong = _random(64), 0
    for order in ("forward", "reverse", "random"):
        y = poisoned(64)
        run(FILE, "rotate", (1,), 64, [y, x, 64, 0], shared=256, order=order, seed=1)
        wrong += not torch.equal(y, x.roll(-1))
        run(FILE, "rotate", (1,), 64, [y, x, 64, 1], shared=256, order=order, seed=1)
        assert torch.equal(y, x.roll(-1))
    assert wrong


@pytest.mark.usefixtures("schedule")
def test_transposed_matrices():
    m, t = _random(8, 8, dtype=torch.bfloat16), poisoned(64, dtype=torch.bfloat16)
    run(FILE, "transpose", (1,), 32, [t, m])
    # each quarter of the warp stored the words of another of the four equal matrices
    assert torch.equal(t.view(8, 8), m.T)


@pytest.mark.usefixtures("schedule")
def test_the_last_block_and_atomics():
    x, total, part, done = _random(1000), poisoned(1), poisoned(17), torch.zeros(1, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int64)
    for i in range(2):
        run(FILE, "sum", (17,), 32, [total, count, part, done, x, 1000])
        assert abs(float(total) - float(x.double().sum())) < 1e-3 and int(done) == 0 and int(count) == 17 * 20 * (i + 1)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (1, "different collectives|deadlock|wait at"),
        (2, "exited|deadlock"),
        (3, r"__trap\(\) by thread 40"),
        (4, "not in the mask"),
        (5, "never waited"),
    ],
)
@pytest.mark.usefixtures("schedule")
def test_mistakes_have_names(which: int, message: str):
    with pytest.raises(KernelError, match=message):
        run(FILE, "mistake", (1,), 64, [poisoned(64), which])


def test_arguments_are_checked():
    assert parameters(FILE, "sum") == ["Pf", "PQ", "Pf", "PI", "Pf", "q"]
    x = poisoned(64)
    with pytest.raises(KernelError, match="takes 2 arguments"):
        run(FILE, "mistake", (1,), 64, [x])
    with pytest.raises(KernelError, match="bfloat16"):
        run(FILE, "mistake", (1,), 64, [x.bfloat16(), 0])
    with pytest.raises(KernelError, match="not contiguous"):
        run(FILE, "mistake", (1,), 64, [x.view(8, 8).T, 0])
    with pytest.raises(KernelError, match="is a value"):
        run(FILE, "mistake", (1,), 64, [x, x])
    with pytest.raises(KernelError, match="invalid launch"):
        run(FILE, "mistake", (1,), 1056, [x, 0])
    with pytest.raises(KernelError, match="no kernel nothing"):
        run(FILE, "nothing", (1,), 64, [])
