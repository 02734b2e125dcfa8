"""Bugs planted in the kernels are found, and the kernels as they are pass under ASan, UBSan and TSan."""

import json
from pathlib import Path

import pytest

from tests.kernels.bugs import PLANTED
from tests.kernels.harness import CUDA
from tests.kernels.sanitized import python, reports

HERE = Path(__file__).parent
# of each kind one, for the tests that always run
FEW = {
    "plain": "cells: the block after at its border",
    "asan": "norm: no room for the sums of all warps",
    "tsan": "norm: no barrier between partial sums and their sum",
}


def _plant(folder: Path, by: str, *names: str) -> dict:
    done = python("" if by == "plain" else by, folder / "logs", "-m", "tests.kernels.plant", str(folder), by, *names)
    if done is None:
        pytest.skip(f"this compiler has no library for {by}")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_bugs_fit_the_kernels():
    """Who changes a line in which a bug is planted changes the bug, too."""
    for bug in PLANTED:
        assert (CUDA / bug.file).read_text().count(bug.old) == 1, f"{bug.name}: {bug.file} has changed"
    assert {bug.file for bug in PLANTED} >= {path.name for path in CUDA.glob("*.cu")}
    assert set(FEW.values()) <= {bug.name for bug in PLANTED}


@pytest.mark.parametrize("by", ["plain", "asan", pytest.param("tsan", marks=pytest.mark.long)])
def test_a_bug_is_found(by: str, tmp_path: Path):
    assert _plant(tmp_path, by, FEW[by]) == {"planted": 1, "missed": [], "failing": []}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by", ["plain", "asan", "tsan"])
def test_all_bugs_are_found(by: str, tmp_path: Path):
    count = sum(bug.found_by == by for bug in PLANTED)
    assert _plant(tmp_path, by) == {"planted": count, "missed": [], "failing": []}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
def test_kernels_are_clean(sanitizer: str, tmp_path: Path):
    """All tests that run kernels, but for those that make mistakes on purpose."""
    without = [f"--ignore={HERE / name}" for name in ("test_harness.py", "test_planted.py", "test_compile.py")]
    args = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        "-o",
        "timeout=900",
        *without,
        str(HERE),
    ]
    done = python(sanitizer, tmp_path, *args)
    if done is None:
        pytest.skip(f"this compiler has no library for {sanitizer}")
    assert not reports(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
