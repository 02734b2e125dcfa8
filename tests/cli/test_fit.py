"""The fit finds the model that made the times, noise and stalls or not; and the command does it with a real server."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gpu_worker.policy.limits import Limits
from gpu_worker.policy.recording import Header
from parkade.api import ApiError
from parkade.cli import main
from parkade.fit import fit, non_negative, seconds_of
from sim.costs import CostModel, Work, attended, load_costs
from sim.samples import Copied, Samples, Step

HEADER = Header(Limits(num_blocks=512, block_size=16, slots=8, max_context=8192, block_bytes=1600), "cpu0", "m", "int4")
TRUTH = CostModel(
    name="truth", where="nowhere", rows_s=((1, 0.004), (2, 0.005), (8, 0.010), (64, 0.040), (256, 0.150)), cell_bytes=100,
    sequence_s=0.0005, decode_cell_s=1e-6, prefill_cell_s=2e-7,
)  # fmt: skip


def measured(noise: float, stalls: float, seed: int = 1) -> Samples:
    """Steps of all kinds as TRUTH has them, each off by up to `noise`; a share of them stalls."""
    rng = random.Random(seed)
    steps = []
    for _ in range(2000):
        decodes = rng.randint(0, 8)
        prefill = rng.choice([0, 0, 0, rng.randint(1, 30), 256 - decodes]) if decodes else rng.randint(1, 256)
        start = rng.randint(0, 2000)
        work = Work(decodes, prefill, decodes * rng.randint(10, 900), attended(start, prefill))
        seconds = seconds_of(TRUTH, work) * (1 + rng.uniform(-noise, noise))
        steps.append(Step(work, seconds * (50 if rng.random() < stalls else 1)))
    return Samples(HEADER, steps, [Copied(1000, 0.5), Copied(3000, 0.5)], [Copied(1000, 0.1)])


def farthest(costs: CostModel) -> float:
    """The largest relative difference from TRUTH over steps of all kinds."""
    works = [Work(decodes=n, decode_cells=n * depth) for n in range(1, 9) for depth in (10, 500, 900)]
    works += [Work(prefill_tokens=n, prefill_cells=attended(start, n)) for n in (4, 30, 100, 256) for start in (0, 1000)]
    works += [Work(4, 252, 2000, attended(500, 252))]
    return max(abs(seconds_of(costs, work) / seconds_of(TRUTH, work) - 1) for work in works)


def test_it_finds_the_model_behind_exact_times() -> None:
    fitted = fit(measured(0.0, 0.0), "x", "here")
    assert farthest(fitted.costs) < 0.02
    assert fitted.errors[0].p90 < 0.02


def test_it_finds_the_model_behind_noise_and_stalls() -> None:
    fitted = fit(measured(0.2, 0.02), "x", "here")
    assert farthest(fitted.costs) < 0.08
    assert abs(fitted.errors[0].total) < 0.01, "it leans to one side"
    assert 20 <= fitted.stalls <= 60
    assert 0.05 < fitted.errors[0].median < 0.15, "the error is of the steps, not of the model"


def test_bytes_and_rates_come_from_the_journal() -> None:
    costs = fit(measured(0.0, 0.0), "x", "here").costs
    assert (costs.name, costs.where, costs.block_size, costs.cell_bytes) == ("x", "here", 16, 100)
    assert (costs.save_bytes_per_s, costs.load_bytes_per_s) == pytest.approx((4000.0, 10000.0))


def test_errors_are_told_by_kind_of_step() -> None:
    every, decodes, prefills = fit(measured(0.1, 0.0), "x", "here").errors
    assert every.steps == decodes.steps + prefills.steps == 2000
    assert "p90" in fit(measured(0.1, 0.0), "x", "here").costs.error


def test_too_few_steps_are_one_line() -> None:
    few = measured(0.0, 0.0)
    few.steps = few.steps[:10]
    with pytest.raises(ApiError, match="only 10 steps"):
        fit(few, "x", "here")


def test_least_squares_without_negative_numbers() -> None:
    """Against a search over all sets of columns that may be above 0."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
        found = non_negative(matrix, target)
        assert found.min() >= 0
        best = float(np.linalg.norm(target))
        for chosen in range(1, 32):
            columns = [index for index in range(5) if chosen >> index & 1]
            part = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            if part.min() >= 0:
                best = min(best, float(np.linalg.norm(matrix[:, columns] @ part - target)))
        assert float(np.linalg.norm(matrix @ found - target)) == pytest.approx(best)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_command_fits_a_real_server(tmp_path: Path) -> None:
    path = tmp_path / "bard.json"
    flags = "--model bard --ctx 2048 --slots 2"
    command = [sys.executable, "-m", "parkade", "bench", "--fit", str(path), "--serve", flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    costs = load_costs(str(path))
    assert costs.name == "bard" and "bard" in costs.where
    assert costs.save_bytes_per_s > 0 and costs.load_bytes_per_s > 0
    assert costs.step_s(1, 0, 500, 0) < costs.step_s(0, 256, 0, attended(0, 256))
    assert "error p50" in done.stdout


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parkade", "bench", "--fit", str(tmp_path / "no" / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: --fit ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fit", "/no/such/f.json"], "--fit /no/such/f.json: there is no folder /no/such"),
        (["--fit", "/tmp"], "--fit /tmp: this is a folder"),
        (["--fit", "f.json", "--serve", '--model "bard'], "--serve '--model \"bard': No closing quotation"),
        (["--serve", '--model "bard'], "--serve '--model \"bard': No closing quotation"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {words}\n"


def test_steps_that_cost_nothing_but_their_sequences_are_fitted_too() -> None:
    steps = [Step(Work(decodes=count, decode_cells=0), 0.001 * count) for count in (1, 2, 4, 8) for _ in range(50)]
    costs = fit(Samples(HEADER, steps), "x", "here").costs
    assert [seconds_of(costs, Work(decodes=count)) for count in (1, 8)] == pytest.approx([0.001, 0.008], rel=0.01)
