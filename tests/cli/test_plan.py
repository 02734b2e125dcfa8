"""`parkade plan`: its figures are those of the worker, and what does not fit is told."""

from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner, Result

from gpu_worker.__main__ import DRAFT_AUTO, Draft, model_on_cpu
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.on_card import MOST_BLOCKS
from parkade import plan as planning
from parkade.cli import main
from wire.config import Config
from wire.model_files import find_model

GB = 10**9


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_arithmetic_and_the_capacity_are_printed() -> None:
    result = run("--model", "bard", "--ctx", "4096", "--park-ram", "64MiB")
    assert result.exit_code == 0
    labels = [line.split()[0] for line in result.output.split("\n\n")[0].splitlines()]
    assert labels == ["model", "weights", "cell", "block", "pool", "states", "a", "a", "budget", "memory"]
    assert "= 1536 bytes" in result.output
    assert "16 cells x 1536 + a hidden row = 26624 bytes" in result.output
    assert "capacity of one worker:" in result.output


@pytest.mark.parametrize("dtype", ["auto", "f32"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_pool_and_states_are_to_the_byte_what_the_worker_takes_and_weights_nearly(dtype: str, drafts: int) -> None:
    config = Config(model="bard", dtype=dtype, ctx=512, draft=str(drafts), park_ram="0")
    made = planning.make_plan(config, None)
    model = model_on_cpu(config, find_model("bard"), Draft(drafts))
    kv = KvCache(model.spec, 32, 16, model.kv_dtype, made.state_slots, drafts)
    assert made.pool_bytes == len(kv.memory)
    assert made.states_bytes == kv.states.bytes
    assert 0.9 < made.weight_bytes / model.weight_bytes < 1.1


def test_four_bit_files_stay_as_they_are() -> None:
    made = planning.make_plan(Config(model="smollm2", park_ram="0"), None)
    model = model_on_cpu(Config(model="smollm2"), find_model("smollm2"), Draft(2))
    assert 0.9 < made.weight_bytes / model.weight_bytes < 1.1


def test_what_does_not_fit_is_told_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 29))
    result = run("--model", "bard", "--park-ram", "64MiB")
    assert result.exit_code == 1
    assert "does not fit: " in result.output
    assert "512.0 MiB are available" in result.output


def test_a_card_that_is_filled_and_one_that_is_too_small() -> None:
    made = planning.make_plan(Config(model="smollm2", ctx=0, device="cuda:0", park_ram="0"), 80 * GB)
    assert not planning.shortages(made, 0)
    need = made.weight_bytes + made.pool_bytes
    assert 72 * GB - made.found.block_bytes < need <= 72 * GB
    assert run("--ctx", "65536", "--card-memory", "1GB", "--park-ram", "0").exit_code == 1
    assert run("--ctx", "0", "--card-memory", "1MB", "--park-ram", "0").exit_code == 1


def test_a_pool_of_all_there_is_without_a_card_is_one_line() -> None:
    result = run("--ctx", "0")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "--card-memory" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--card-memory", "much"], ["--park-ram", "900TiB"], ["--model", "/no/such"], ["--ctx", "3"]]
)
def test_a_mistake_is_one_line(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def test_several_workers_take_as_much_each() -> None:
    one = planning.make_plan(Config(model="bard", device="cpu", park_ram="0"), None)
    two = planning.make_plan(Config(model="bard", device="cpu,cpu", park_ram="0"), None)
    each = planning.PROCESS_BYTES + one.weight_bytes + one.pool_bytes + one.states_bytes
    assert planning.shortages(two, planning.SMALL_BYTES + 2 * each) == []
    assert planning.shortages(two, planning.SMALL_BYTES + 2 * each - 1)


def test_the_constants_are_the_workers() -> None:
    assert (planning.DRAFT_AUTO, planning.MOST_BLOCKS) == (DRAFT_AUTO, MOST_BLOCKS)
