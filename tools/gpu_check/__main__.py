"""`python -m tools.gpu_check`: what only a card can show, as a table, and in JSON with --json. Under four minutes.

Whatever fails is a line of the table and does not keep the rest from running. Exit status 1 if anything is not as it should be.
`--small` runs a tiny model and short tests: for a machine where only the check itself is to be tried.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from gpu_worker.device import proven
from gpu_worker.on_card import OpenCard, open_card, place_of
from tools.gpu_check import basics, serving, speed
from tools.gpu_check.figures import Figure, Section, held
from tools.gpu_check.random_model import qwen35_4b, tiny
from wire.config import Config, ConfigError

LIMIT_S = 230
ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = [f"tests/kernels/test_{name}.py" for name in ("norm", "mlp", "cells", "image", "attention", "delta", "sample")]
SANITIZED = KERNEL_TESTS[:3]


class Size(msgspec.Struct, frozen=True):
    """How much of everything."""

    spec: object
    seconds: float  # of a pressure run
    contexts: tuple[int, ...]
    prompt: int
    answer: int
    cells: int  # of a long sequence
    sequences: int
    tokens: int


FULL = Size(qwen35_4b(), 60.0, (8192, 16384), 2000, 2000, 8192, 32, 400)
SMALL = Size(tiny(), 8.0, (256,), 40, 100, 256, 4, 12)


def kernels_on_card(size: Size) -> Iterator[Figure]:
    """The kernels' own tests on the card, against the same references."""
    tests = KERNEL_TESTS if size is FULL else KERNEL_TESTS[:1]
    done = pytest_on_card([], tests, limit_s=60)
    yield held(
        f"kernels equal their references on the card, {len(tests)} of {len(KERNEL_TESTS)} files", passed(done), _last(done)
    )


def sanitized() -> Iterator[Figure]:
    """Some of these tests under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield Figure("compute-sanitizer", "is not here")
        return
    for check in ("memcheck", "racecheck"):
        done = pytest_on_card([tool, "--tool", check, "--error-exitcode", "9"], SANITIZED, limit_s=25)
        yield held(f"compute-sanitizer {check}", passed(done), _last(done))


def exactness(opened: OpenCard, serve: serving.Serving, size: Size) -> Iterator[Figure]:
    """Whether rows are independent of their company on this card; the answer is kept for the worker."""
    place, kept = place_of(opened.card), proven.path()
    figures = list(speed.same_rows(opened.card, opened.on_card, size.spec))
    yield from figures
    if exact := all(figure.ok for figure in figures):
        proven.keep(proven.Proof(place, True))  # so that the engine tries; it proves the model as a whole when it starts
        try:
            engine = serve.engine(2048, "on")
        except BaseException:
            proven.keep(proven.Proof(place, False, "the proof broke off"))
            raise
        exact, note = engine.exact, engine.exact_note
        engine.close()
        yield held("exactness of the whole model at 64 rows", exact, note)
    proven.keep(proven.Proof(place, exact, "" if exact else "rows differ in company"))
    yield Figure("kept for the worker", str(kept))


def sections(opened: OpenCard, size: Size) -> Iterator[tuple[str, Section]]:
    """In the order of what is worth most if time runs out."""
    card, on_card, small = opened.card, opened.on_card, size is SMALL
    yield "versions", lambda: basics.versions(card)
    yield "context and streams", lambda: basics.sharing(card, on_card)
    yield "graphs", lambda: basics.graphs(card, on_card)
    yield "link", lambda: basics.links(card, on_card)
    yield "kernels", lambda: kernels_on_card(size)
    config = Config(slots=4, park_ram="64MiB" if small else "8GiB", exact="off", step_tokens=64 if small else 512)
    serve = serving.Serving(opened, size.spec, config)
    try:
        engine = cache(lambda: serve.engine(2 * size.cells + max(size.contexts) // 4))  # made within a section: it may fail
        yield "stalls", lambda: serving.stalls(serve, engine(), size.cells, size.tokens)
        yield "idle", lambda: serving.idle_cost(serve, engine(), size.tokens)
        yield "floors", lambda: speed.floors(card, on_card, size.spec, size.sequences, size.cells)
        for ctx in size.contexts:
            yield (
                f"pressure, {ctx} cells",
                lambda ctx=ctx: serving.pressure(serve, engine(), ctx, size.seconds, size.prompt, size.answer),
            )
        if engine.cache_info().currsize:
            engine().close()
        engine.cache_clear()
        yield "exactness", lambda: exactness(opened, serve, size)
        yield "sanitizers", sanitized
    finally:
        serve.close()


def run(opened: OpenCard, size: Size) -> dict[str, list[Figure]]:
    """Every section's figures, shown as they come."""
    ends, console, found = time.monotonic() + LIMIT_S, Console(), {}
    for name, section in sections(opened, size):
        if time.monotonic() > ends:
            found[name] = [held(name, False, "no time left")]
            continue
        started, figures = time.monotonic(), []
        try:
            figures += section()
        except Exception as error:  # noqa: BLE001  one section that breaks must not cost the others their turn on the card
            figures.append(held(name, False, f"{type(error).__name__}: {error}".splitlines()[0]))
        found[name] = figures
        table = Table("figure", "found", "wanted", title=f"{name}, {time.monotonic() - started:.1f} s", title_justify="left")
        for figure in figures:
            style = {True: "green", False: "red", None: ""}[figure.ok]
            table.add_row(figure.name, figure.value, figure.wanted, style=style)
        console.print(table)
    return found


def pytest_on_card(before: list[str], chosen: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Without the project's own settings, which need plugins that this Python may lack."""
    settings = ("-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    command = [*before, sys.executable, "-m", "pytest", "-q", "-x", *settings, *chosen]
    environ = {**os.environ, "KERNELS_ON": "card"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, f"not done in {limit_s:.0f} s", "")


def passed(done: subprocess.CompletedProcess[str]) -> bool:
    """Tests that are all skipped prove nothing."""
    return done.returncode == 0 and " passed" in done.stdout


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout.strip() or done.stderr.strip() or "no word").splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--small", action="store_true", help="a tiny model and short tests")
    options = parser.parse_args()
    try:
        opened = open_card(0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        found = run(opened, SMALL if options.small else FULL)
    finally:
        opened.close()
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    wrong = [figure.name for figures in found.values() for figure in figures if figure.ok is False]
    print("not as it should be: " + "; ".join(wrong) if wrong else "all as it should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
