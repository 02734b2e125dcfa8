"""How the budget is chosen and refused: the machine's memory and the control groups' limits."""

from pathlib import Path

import pytest

from wire.config import ConfigError
from wire.memory import GIB, available_bytes, budget_bytes, total_bytes


def machine(tmp_path: Path, gib: int, cgroup: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """(proc, groups) of a made-up machine; `limits`: file below the groups' mount -> its text."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {gib << 19} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "limits", "gib"),
    [
        ("0::/\n", {}, 64),
        ("0::/a/b\n", {"a/memory.max": f"{3 * GIB}\n", "a/b/memory.max": "max\n"}, 3),
        ("0::/a/b\n", {"a/memory.max": f"{3 * GIB}", "a/b/memory.max": f"{2 * GIB}"}, 2),
        ("0::/gone\n", {"memory.max": f"{5 * GIB}"}, 5),
        ("4:cpu,memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": f"{7 * GIB}"}, 7),
        ("4:memory:/outside/of/this/mount\n", {"memory/memory.limit_in_bytes": f"{7 * GIB}"}, 7),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 64),
        ("4:memory:/\n0::/s\n", {"memory/memory.limit_in_bytes": f"{9 * GIB}", "unified/s/memory.max": f"{4 * GIB}"}, 4),
    ],
)
def test_the_smallest_limit_counts(tmp_path, cgroup, limits, gib):
    assert total_bytes(*machine(tmp_path, 64, cgroup, limits)) == gib * GIB


def test_available(tmp_path):
    assert available_bytes(machine(tmp_path, 64, "0::/\n", {})[0]) == 32 * GIB
    assert available_bytes() > 0 and total_bytes() > 0


def test_auto_is_8_gib_or_a_quarter_and_says_so():
    assert budget_bytes("auto", 64 * GIB) == (8 * GIB, "budget 8.0 GiB (auto: 8 GiB)")
    budget, line = budget_bytes("auto", 10 * GIB)
    assert budget == 10 * GIB // 4 and "quarter" in line and "10.0 GiB" in line


def test_an_explicit_budget_may_be_anything_that_exists():
    assert budget_bytes("16MiB", GIB)[0] == 16 << 20
    assert budget_bytes("1GiB", GIB)[0] == GIB
    assert budget_bytes("0", GIB)[0] == 0
    with pytest.raises(ConfigError, match=r"1073741825 .*1073741824"):
        budget_bytes("1073741825", GIB)
