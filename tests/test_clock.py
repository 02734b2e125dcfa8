"""A clock that jumps moves no timeout: the time of day is read only where it is shown, all else is monotonic."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import PRODUCT, files

ROOT = Path(__file__).parent.parent
TIME_OF_DAY = {
    "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "datetime.now", "datetime.utcnow",
    "datetime.today", "date.today", "time.clock_gettime",
}  # fmt: skip
SHOWN = {
    "router/openai/completions.py": "`created` of an answer",
    "router/openai/chat.py": "`created` of an answer",
    "router/openai/text.py": "templates may show the date",
    "parkade/supervisor.py": "the time before a child's line in the log",
}


def readings(source: str) -> Iterator[str]:
    """Where the time of day is read: by a call, or by taking the function."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if f"{module}.{name}" in TIME_OF_DAY:
                yield f"{module}.{name} in line {node.lineno}"
            case ast.Attribute(value=ast.Attribute(attr="datetime"), attr="now" | "utcnow" | "today" as name):
                yield f"datetime.datetime.{name} in line {node.lineno}"
            case ast.ImportFrom(module="time", names=names) if {f"time.{alias.name}" for alias in names} & TIME_OF_DAY:
                yield f"import in line {node.lineno}"


@pytest.mark.parametrize("path", files(*PRODUCT), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_time_of_day_is_only_shown(path: Path) -> None:
    found = list(readings(path.read_text()))
    assert bool(found) == (str(path.relative_to(ROOT)) in SHOWN), found or "it is listed and reads no time of day"


@pytest.mark.parametrize(
    "source",
    ["import time\ntime.time()", "deadline = time.time", "from time import time", "import datetime\ndatetime.datetime.now()",
     "from datetime import datetime\ndatetime.now()", "time.clock_gettime(0)"],
)  # fmt: skip
def test_a_reading_is_found(source: str) -> None:
    assert list(readings(source))


def test_the_monotonic_clock_is_none() -> None:
    assert not list(readings("import time\ntime.monotonic()\ntime.perf_counter()\nfrom time import monotonic"))
