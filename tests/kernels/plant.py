"""Plants one bug after another and says which are found: `python -m tests.kernels.plant WHERE plain|asan|tsan NAME...`

NAME is how the names of bugs begin; none: all of them. Writes to the folder WHERE and prints a line of JSON: what was not found,
and which tests fail without a bug. Each run of a test is a fork of this process, as a bug may end it. For asan and tsan it must
run in the environment that `sanitized.environment` makes, as test_planted.py does; else every bug is missed:

    python -c 'from pathlib import Path; from tests.kernels.sanitized import python
    print(python("asan", Path("WHERE/logs"), "-m", "tests.kernels.plant", "WHERE", "asan", "NAME").stdout)'
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels import harness
from tests.kernels.bugs import PLANTED
from tests.kernels.bugs.planted import Planted

HERE = Path(__file__).parent
REAL = harness.CUDA


def main() -> None:
    torch.zeros(1), np.zeros(1)
    where, by, names = Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:])
    bugs = [bug for bug in PLANTED if bug.found_by == by and (not names or bug.name.startswith(names))]
    failing = [f"{test}: {text[-2000:]}" for test in sorted({bug.test for bug in bugs}) if (text := _control(where, test))]
    missed = [bug.name for bug in bugs if not _found(where, bug)]
    print(json.dumps({"planted": len(bugs), "missed": missed, "failing": failing}))


def _control(where: Path, test: str) -> str:
    """Why a test fails with no bug planted; empty: it does not."""
    code, text = _run(where, REAL, test)
    return text if code or "WARNING: ThreadSanitizer" in text else ""


def _found(where: Path, bug: Planted) -> bool:
    sources = where / "cuda"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(REAL, sources)
    path = sources / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: {bug.file} holds the text to replace {text.count(bug.old)} times")
    path.write_text(text.replace(bug.old, bug.new))
    harness.CUDA = sources
    for source in sources.glob("*.cu"):
        if bug.file in (source.name, "common.cuh", "values.cuh"):
            harness.build(source)  # a bug that does not compile is not found but an error
    code, text = _run(where, sources, bug.test)
    if bug.found_by == "plain":
        return code != 0 and re.search(bug.says or "AssertionError|KernelError|signal", text) is not None
    return re.search(bug.says, text) is not None


def _run(where: Path, sources: Path, test: str) -> tuple[int, str]:
    """Exit status and all output of a test, in a fork of this process with the kernels of `sources`."""
    output, logs = where / "output", where / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    child = os.fork()
    if not child:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        harness.CUDA = sources
        node, _, expression = test.partition(" -k ")
        only = ["-k", expression] if expression else []
        code = pytest.main(["-x", "-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=60", str(HERE / node), *only])
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    text = output.read_text(errors="replace") + "".join(log.read_text(errors="replace") for log in logs.iterdir())
    return code, text + (f"\nsignal {-code}" if code < 0 else "")


if __name__ == "__main__":
    main()
