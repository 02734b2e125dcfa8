"""A clock that jumps ends nothing early and holds nothing up: the code measures time with monotonic clocks only."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.test_architecture import PRODUCT, ROOT, files

JUMPING = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"),
           ("date", "today"), ("time", "localtime"), ("time", "gmtime"), ("time", "CLOCK_REALTIME")}  # fmt: skip
ALLOWED = {  # what a human reads
    "router/openai/completions.py": ["time.time"],  # `created` of an answer
    "router/openai/chat.py": ["time.time"],
    "router/openai/text.py": ["datetime.now"],  # the date that a chat template may write
    "parkade/supervisor.py": ["time.time", "time.localtime"],  # the time at the start of a log line
}


def jumping(source: str) -> list[str]:
    """The clocks that a source reads, other than monotonic ones."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if (owner, name) in JUMPING:
                found.append(f"{owner}.{name}")
            case ast.ImportFrom(module="time", names=names):
                found += [f"time.{alias.name}" for alias in names if ("time", alias.name) in JUMPING]
    return found


@pytest.mark.parametrize("path", files(*PRODUCT), ids=lambda path: str(path.relative_to(ROOT)))
def test_time_is_measured_with_clocks_that_do_not_jump(path: Path) -> None:
    found = Counter(jumping(path.read_text()))
    allowed = Counter(ALLOWED.get(str(path.relative_to(ROOT)), []))
    assert found == allowed, "time.monotonic() is the clock; a wall clock is for what people read, and named here"


@pytest.mark.parametrize(
    "source",
    ["import time\ntime.time()", "from time import time", "import datetime\ndatetime.datetime.now()", "c = time.time"],
)
def test_a_jumping_clock_is_found(source: str) -> None:
    assert jumping(source)


def test_monotonic_clocks_are_not() -> None:
    assert not jumping("import time\ntime.monotonic() + time.perf_counter()\nfrom time import monotonic")
