"""`parkade sim`: what it compares, writes and draws, and one line for each mistake."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from parkade import simulate
from parkade.cli import main
from sim import trace as traces
from sim.costs import encode, load_costs
from wire.config import ConfigError

SMALL = ("--workload", "uniform", "--requests", "12", "--ctx", "512", "--slots", "4", "--jobs", "1")
TRACE = '{"id": "a", "prompt_tokens": 300, "output_tokens": 50}\n{"id": "b", "prompt_tokens": 90, "output_tokens": 300}\n'


def run(*arguments: str, **environ: str):
    return CliRunner().invoke(main, ["sim", *arguments], env=environ)


def test_combinations_stand_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    result = run(*SMALL, "--policy", "watermark,off", "--resume-order", "most-parked,head", "--seeds", "2..3", "--json", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "12 requests, 4 slots, pool of 512 cells" in result.output
    assert "means of 2 seeds" in result.output
    header = next(line for line in result.output.splitlines() if "watermark" in line)
    assert header.split() == ["watermark", "watermark", "off", "off"]
    found = json.loads(out.read_text())
    assert [(r["policy"], r["resume_order"], r["seed"]) for r in found["runs"]] == [
        (policy, order, seed) for policy in ("watermark", "off") for order in ("most-parked", "head") for seed in (2, 3)
    ]
    assert found["settings"]["ctx"] == 512
    assert found["costs"]["name"] == "cpu"
    by_policy = {r["policy"]: r["figures"] for r in found["runs"]}
    assert by_policy["off"]["failed"] > 0 == by_policy["watermark"]["failed"]
    assert f"{by_policy['off']['requests']}" == "12"


def test_processes_change_nothing(tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    many = (*SMALL[:-2], "--seeds", "1..4", "--policy", "lookahead,ondemand")
    assert run(*many, "--jobs", "1", "--json", str(one)).exit_code == 0
    assert run(*many, "--jobs", "2", "--json", str(two)).exit_code == 0
    assert one.read_text() == two.read_text()


def test_a_trace_of_a_file_is_played_and_a_workload_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACE)
    result = run("--trace", str(path), "--ctx", "512", "--json", str(tmp_path / "f.json"))
    assert result.exit_code == 0
    figures = json.loads((tmp_path / "f.json").read_text())["runs"][0]["figures"]
    assert (figures["requests"], figures["output_tokens"]) == (2, 350)
    assert run(*SMALL, "--seeds", "5", "--write", str(tmp_path / "w.jsonl")).exit_code == 0
    assert len(traces.read(str(tmp_path / "w.jsonl"))) == 12


def test_a_written_workload_plays_as_it_did(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("w.jsonl", "1.json", "2.json")]
    assert run(*SMALL, "--load", "2", "--write", files[0], "--json", files[1]).exit_code == 0
    assert run("--trace", files[0], "--ctx", "512", "--slots", "4", "--json", files[2]).exit_code == 0
    first, second = (json.loads(Path(name).read_text())["runs"][0]["figures"] for name in files[1:])
    assert first == second


def test_settings_mean_what_they_mean_in_serve() -> None:
    flags = dict.fromkeys(simulate.SETTINGS)
    (config,) = simulate.configs_of(flags | {"park_ram": "0", "high": "90", "no_reuse": True, "policy": "ondemand"})
    limits = simulate.limits_of(config, load_costs("cpu"))
    assert (limits.policy, limits.high, limits.reuse, limits.park_mode) == ("ondemand", 90, False, "recompute")
    assert (limits.pool_cells, limits.slots, limits.step_tokens, limits.max_park_s) == (8192, 8, 256, 300.0)
    assert simulate.park_ram_bytes(config) == 0
    recurrent = simulate.limits_of(config, replace(load_costs("cpu"), state_bytes=4096))
    assert (recurrent.reuse, recurrent.state_slots) == (False, 10)


def test_a_servers_environment_does_not_count() -> None:
    assert "pool of 512 cells" in run(*SMALL, PARKADE_CTX="1024", PARKADE_POLICY="off").output


def test_classes_are_told_apart() -> None:
    assert "priority 7: longest wait" in run(*SMALL, "--priorities", "0,7").output
    assert "priority" not in run(*SMALL).output


def test_reasons_of_parks_are_told() -> None:
    assert "parks: save asked" in run(*SMALL, "--load", "3", "--policy", "watermark").output
    assert "parks: recompute denied_full" in run(*SMALL, "--load", "3", "--policy", "watermark", "--park-ram", "4096").output
    assert "parks: recompute asked" in run(*SMALL, "--load", "3", "--policy", "watermark", "--park-ram", "0").output


def test_free_parks_and_files_of_costs(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(encode(replace(load_costs("cpu"), name="mine")))
    assert "costs: mine, free parks" in run(*SMALL, "--costs", str(path), "--free-parks").output


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    result = run(*SMALL, "--policy", "watermark,lookahead", "--seeds", "1..2", "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[suffix]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --trace FILE or --workload NAME"),
        (["--trace", "a", "--workload", "uniform"], "either --trace FILE or --workload NAME"),
        (["--workload", "chat"], "--workload 'chat' is not known; choose one of uniform, "),
        (["--trace", "/no/such"], "--trace /no/such: No such file"),
        (["--trace", ""], "--trace : Is a directory"),
        (["--trace", "/no/such", "--load", "2"], "--load: of a workload, but --trace is given"),
        (["--trace", "/no/such", "--seeds", "2"], "--seeds: of a workload, but --trace is given"),
        ([*SMALL, "--policy", "watermark,best"], "--policy 'best'"),
        ([*SMALL, "--resume-order", "first"], "--resume-order 'first'"),
        ([*SMALL, "--high", "70"], "--low 80 must be below --high 70"),
        ([*SMALL, "--park-ram", "much"], "--park-ram 'much'"),
        ([*SMALL, "--seeds", "5..2"], "--seeds '5..2'"),
        ([*SMALL, "--seeds", "1..999999999999"], "--seeds '1..999999999999' are more than 100000"),
        ([*SMALL, "--ctx", "2147483648"], "--ctx 2147483648 is more than 4194304 blocks of 16 cells"),
        ([*SMALL, "--priorities", "0,x"], "--priorities '0,x'"),
        ([*SMALL, "--mean-cells", "500"], "--mean-cells 500 must be at most 384"),
        ([*SMALL, "--rate", "1", "--load", "1"], "--rate and --load exclude each other"),
        ([*SMALL, "--costs", "dear"], "--costs dear: no such file"),
        ([*SMALL, "--costs", "a" * 300], "File name too long"),
        ([*SMALL, "--plot", "p.txt"], "--plot p.txt: the name must end with .svg, .png or .pdf"),
        ([*SMALL, "--plot", "/no/such/p.svg"], "--plot /no/such/p.svg: there is no such folder"),
        ([*SMALL, "--json", "/no/such/f.json"], "--json /no/such/f.json: No such file"),
        ([*SMALL, "--write", "/no/such/t.jsonl"], "--write /no/such/t.jsonl: No such file"),
        (["--journal", "/no/such"], "--journal /no/such: No such file"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*SMALL, "--plot", "p.svg")
    assert (result.exit_code, result.stdout) == (1, "")
    assert '--plot needs matplotlib: pip install "parkade[plot]"' in result.stderr


@pytest.mark.parametrize(("text", "seeds"), [("7", [7]), ("1..3", [1, 2, 3]), ("4..4", [4])])
def test_seeds(text: str, seeds: list[int]) -> None:
    assert simulate.seeds_of(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "1..", "..3", "3..1", "1...3"])
def test_what_is_no_seed(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        simulate.seeds_of(text)


def test_numbers_keep_three_digits() -> None:
    assert [simulate.number(values) for values in ([0.0], [], [1234.5], [12.345], [0.012345], [3.0], [1.0, 2.0])] == [
        "0", "0", "1234", "12.3", "0.0123", "3", "1.5",
    ]  # fmt: skip
