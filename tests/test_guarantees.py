"""docs/guarantees.md and docs/faults.md name tests that are there, and no promise stands without one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
FAULTS = (ROOT / "docs" / "faults.md").read_text()
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]*)\| ([^|]*)\| ([^|]*)\|$", re.MULTILINE)
_LINE = re.compile(r"^- `(tests/[\w/]+\.py)::(\w+)`( \(long\))?(: .+)?$")


def sections() -> dict[str, str]:
    """Heading -> text of the promises."""
    parts = re.split(r"^## (G\d+\. .+)$", PAGE.split("\n## Not promised\n")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def names_in(path: str) -> dict[str, bool]:
    """Name -> whether it is for the long tier. A state machine counts by its name too."""
    tree = ast.parse((ROOT / path).read_text())
    found = {}
    whole = "mark.long" in "".join(ast.unparse(node) for node in tree.body if "pytestmark" in ast.unparse(node))
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = whole or any(ast.unparse(mark) == "pytest.mark.long" for mark in node.decorator_list)
            case ast.Assign(targets=[ast.Name(name)]):
                found[name] = False
    return {name: is_long for name, is_long in found.items() if name.lower().startswith("test")}


@pytest.mark.parametrize("heading", sections())
def test_a_promise_names_tests_that_are_there(heading: str) -> None:
    named = [match for line in sections()[heading].splitlines() if line.startswith("- ") and (match := _LINE.match(line))]
    lines = [line for line in sections()[heading].splitlines() if line.startswith("- ")]
    assert len(named) == len(lines) >= 2, "a line of the list is no test"
    for match in named:
        path, name, is_long = match[1], match[2], bool(match[3])
        assert name in names_in(path), f"{path} has no test {name}"
        whole = names_in(path)[name]
        assert whole == is_long, f"{path}::{name} is {'' if whole else 'not '}of the long tier"


def test_every_test_that_is_named_anywhere_is_there() -> None:
    named = _TEST.findall(PAGE + FAULTS)
    assert len(named) > 50
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []


def test_the_promises_are_numbered() -> None:
    assert [heading.split(".")[0] for heading in sections()] == [f"G{n}" for n in range(1, len(sections()) + 1)]


def test_every_row_of_faults_names_a_test_or_says_that_it_is_open() -> None:
    rows = _ROW.findall(FAULTS)
    assert [int(number) for number, *_ in rows] == list(range(1, 29))
    for number, _, promise, shown, left in rows:
        assert _TEST.search(shown) or left.strip(), f"row {number} has neither"
        assert bool(promise.strip()) == bool(_TEST.search(shown)), f"row {number}: a promise without a test, or a test of none"
        for path, name in _TEST.findall(shown):
            is_long = f"`{path}::{name}` (long)" in shown
            assert names_in(path).get(name) == is_long, f"row {number}: {path}::{name}"
