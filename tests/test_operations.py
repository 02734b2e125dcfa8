"""docs/operations.md is whole: every metric and every log line that the code can write stands in it, and no other metric."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.ledger import Ledger
from router.metrics import Metrics
from tests.test_architecture import PRODUCT, files
from wire.config import FIELDS, flag_name

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
BLOCKS = {"gpu_worker/__main__.py", "hostcache/__main__.py"}  # that log a text made elsewhere: the capacity, the budget
_PLACE = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")
_METRIC = re.compile(r"\bparkade_[a-z_]+\b")


def exposed() -> dict[str, set[str]]:
    """Name as it is asked for -> names of its labels. Histograms without their suffixes."""
    text = Metrics(Ledger(1, lambda: 0)).text(None, 0.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        name = family.name if family.type in ("gauge", "histogram") else family.name + "_total"
        found[name] = labels
    return found


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the tables below a heading of the page, up to the next heading of its level."""
    part = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= set("-|: ")]


def lines_of(path: Path, source: str) -> Iterator[str]:
    """What a file can write to the log, as the page shows it: … for what is put in."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logging"), attr=attr), args=[first, *_]) if (
                attr in LEVELS
            ):
                yield from texts(path, first)


def texts(path: Path, argument: ast.expr) -> Iterator[str]:
    """The format, or those of both sides of a choice. What is no constant cannot be looked up, and is an error."""
    match argument:
        case ast.Constant(value=str() as text):
            yield _PLACE.sub("…", text).replace("\n", " ").replace("`", "")
        case ast.IfExp(body=body, orelse=orelse):
            yield from texts(path, body)
            yield from texts(path, orelse)
        case _:
            raise AssertionError(f"{path}: the text of a log line is no constant: {ast.unparse(argument)}")


@pytest.mark.parametrize("path", files(*PRODUCT), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_log_line_is_on_the_page(path: Path) -> None:
    told = {re.sub(r"^`|`$", "", row[0]).replace("`", "") for row in table("Log lines")}
    for line in lines_of(path, path.read_text()):
        if line == "…":
            assert str(path.relative_to(ROOT)) in BLOCKS
            continue
        assert line in told, f"docs/operations.md, Log lines, lacks: | `{line}` | meaning |"


def test_log_lines_are_found() -> None:
    source = 'log.info("a %s of %.1f s", 1, 2)\nlog.warning("x" if y else "z")\nother.info("no")'
    assert list(lines_of(Path("f"), source)) == ["a … of … s", "x", "z"]
    with pytest.raises(AssertionError, match="no constant"):
        list(lines_of(Path("f"), "log.error(f'{x}')"))


def test_no_log_line_on_the_page_is_of_the_past() -> None:
    known = {line for path in files(*PRODUCT) for line in lines_of(path, path.read_text())}
    told = {row[0].strip("`").replace("`", "") for row in table("Log lines")} - {"line"}
    made = {text for text in told if text.startswith(("capacity of …", "budget …", "(… lines dropped"))}
    assert told - made <= known, told - made - known
    assert len(made) == 3


def test_metrics_on_the_page_are_those_that_there_are() -> None:
    told = {match[0]: row for row in table("Metrics") if (match := _METRIC.search(row[0]))}
    found = exposed()
    assert told.keys() == found.keys(), told.keys() ^ found.keys()
    for name, labels in found.items():
        if name not in ("parkade_drafted_tokens_total", "parkade_accepted_tokens_total"):  # no position without a worker
            assert set(re.findall(r"\w+", "".join(re.findall(r"\{(.*?)\}", told[name][0])))) == labels, name
        assert len(told[name]) == 3 and told[name][1], name


def known_metrics(text: str) -> set[str]:
    """Names in an expression, without the suffixes of histograms."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in _METRIC.findall(text)}


def test_alerts_ask_for_metrics_that_there_are() -> None:
    asked = set().union(*(known_metrics(row[2]) for row in table("Metrics")))
    assert asked and asked <= exposed().keys(), asked - exposed().keys()


def test_the_dashboard_asks_for_metrics_that_there_are_and_shows_each() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = set().union(*map(known_metrics, expressions))
    assert asked == exposed().keys(), asked ^ exposed().keys()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        assert re.search(r"parkade_\w+(\{[^}]*)?instance=~", expression), expression


def test_panels_do_not_overlap_and_fit_the_width() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        area = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not area & taken, panel["title"]
        taken |= area


def test_settings_on_the_page_are_those_that_there_are() -> None:
    others = {"--card-memory", "--mode", "--root", "--check", "--gpus", "--config", "--listen", "--curve-file", "--curve-clients"}
    others |= {"--minutes", "--seed", "--set", "--read"}  # of `make soak`
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert told - {flag_name(field.name) for field in FIELDS} <= others
