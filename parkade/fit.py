"""`parkade bench --fit FILE.json`: measures a server of its own, step by step, and fits the simulator's cost model to it.

The server keeps a journal. Streams of different numbers, lengths and depths run, each parked at every 100 tokens; then the model
of `sim.costs` is fitted to the times from plan to plan, so that everything in the worker's loop counts.
"""

import asyncio
import contextlib
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from parkade.api import Api, ApiError
from parkade.bench import percentile, prompt
from parkade.local import started
from parkade.streams import Followed, follow
from sim.costs import LEAST_STEP_S, CostModel, Work, encode
from sim.samples import JournalError, Samples, Step, samples

SERVER = ("--draft", "0", "--no-reuse", "--park-every", "100")  # flags of --serve come later and win
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
LEAST_STEPS = 50
BUSY = 0.25  # p90 of the errors beyond which the machine did something else, too
LEAST_SAMPLES = 5  # of a segment of the table
_REST = ("decodes", "decode_cells", "prefill_cells")  # of the work of a step, beside its rows
STALL = 3.0  # a step that took so many times what it should is the machine's doing
DECODE_TOKENS = 120  # of each stream: one park
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 400, 700, 1500, 3000)


class Errors(Struct, frozen=True):
    """How far the model is from the steps it was fitted to. Relative; `total` of all their time together."""

    name: str
    steps: int
    median_s: float
    median: float
    p90: float
    total: float


class Fitted(Struct, frozen=True):
    costs: CostModel
    errors: list[Errors]
    stalls: int  # steps left out because the machine was elsewhere


def fit_server(path: str, serve_flags: list[str], rounds: int) -> int:
    """Run a server, measure it, write the model to `path` and print how well it fits. ApiError if something fails."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ApiError(f"--fit {path}: there is no folder {target.parent}")
    if target.is_dir():
        raise ApiError(f"--fit {path}: this is a folder")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "fit.journal"
        with started([*SERVER, "--journal", str(journal), *serve_flags]) as url:
            api = Api(url)
            for round_ in range(1, rounds + 1):
                console.print(f"round {round_} of {rounds}", style="dim")
                asyncio.run(_measure(api, round_))
        try:
            found = samples(journal)
        except (OSError, JournalError) as error:
            raise ApiError(f"the journal cannot be read: {error}; a server with several workers cannot be fitted") from None
    fitted = fit(found, target.stem, where(found))
    try:
        target.write_bytes(encode(fitted.costs))
    except OSError as error:
        raise ApiError(f"--fit {path}: {error.strerror}") from None
    _show(console, fitted, target)
    return 0


async def _measure(api: Api, round_: int) -> None:
    """Decodes of 1 to all seats, shallow and deep; prompts of many lengths, alone and beside decodes."""
    props = api.get("/props")
    slots, deepest = props["slots"], min(props["max_context"], props["pool_cells"] * 3 // 4)
    numbers = iter(range(10_000 * round_, 10_000 * (round_ + 1)))  # of prompts: each is another

    def streams(lengths: list[int], tokens: int) -> list:
        body = {"model": api.model(), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        prompts = [prompt(api, next(numbers), length) for length in lengths]
        return [follow(api, "/v1/completions", {**body, "prompt": ids}, Followed("fit")) for ids in prompts]

    async def one_by_one(lengths: list[int], tokens: int) -> list[Followed]:
        return [await stream for stream in streams(lengths, tokens)]

    for count in _counts(slots):
        for share in (0.1, 0.5, 1.0):  # of what fits
            length = max(8, int(deepest * share / count) - DECODE_TOKENS)
            _check(await asyncio.gather(*streams([length] * count, DECODE_TOKENS)))
    lengths = [length for length in LENGTHS if length < deepest]
    _check(await one_by_one(lengths, 2))
    for count in _counts(max(1, slots - 1)):
        short = [length for length in lengths if length < deepest // 4]
        beside = streams([32] * count, DECODE_TOKENS)
        _, *ended = await asyncio.gather(one_by_one(short, 1), *beside)
        _check(ended)


def _counts(slots: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, ... up to all seats."""
    return sorted({min(count, slots) for count in KNOTS if count < 2 * slots})


def _check(streams: list[Followed]) -> None:
    for stream in streams:
        if stream.error:
            raise ApiError(f"a stream failed: {stream.error}")


def where(found: Samples) -> str:
    """The model and the machine, as people name them."""
    header = found.header
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{header.model} {header.dtype} on {len(os.sched_getaffinity(0))} cores of {line.split(':', 1)[1].strip()}"
    return f"{header.model} {header.dtype} on {len(os.sched_getaffinity(0))} cores ({platform.machine()})"


# the fit --------------------------------------------------------------------------------------------------------------
def fit(found: Samples, name: str, where: str) -> Fitted:
    """The model with the least squares of relative errors. ApiError if the samples are too few or have no sizes."""
    if len(found.steps) < LEAST_STEPS:
        raise ApiError(f"only {len(found.steps)} steps without drafts and copies were measured, too few to fit anything to")
    limits = found.header.limits
    if not limits.block_bytes:
        raise ApiError("the journal does not say how large a block is")
    steps, expected = found.steps, [step.seconds for step in found.steps]
    for _ in range(3):  # fit, leave out what the machine has stalled, fit again
        table, rest = _solve(steps, expected)
        costs = CostModel(
            name=name,
            where=where,
            rows_s=table,
            cell_bytes=max(1, limits.block_bytes // limits.block_size),
            sequence_s=rest[0],
            decode_cell_s=rest[1],
            prefill_cell_s=rest[2],
            save_bytes_per_s=_rate(found.saves),
            load_bytes_per_s=_rate(found.loads),
            state_bytes=limits.state_bytes,
            block_size=limits.block_size,
        )
        steps = [step for step in found.steps if step.seconds <= STALL * seconds_of(costs, step.work)]
        expected = [seconds_of(costs, step.work) for step in steps]
    errors = [
        _errors("all", costs, steps),
        _errors("decodes only", costs, [step for step in steps if not step.work.prefill_tokens]),
        _errors("with prefill", costs, [step for step in steps if step.work.prefill_tokens]),
    ]
    every = errors[0]
    error = f"of {every.steps} steps: median {every.median:.1%}, p90 {every.p90:.1%}, in total {every.total:+.1%}"
    costs = msgspec.structs.replace(costs, error=error)
    return Fitted(costs, [one for one in errors if one.steps], len(found.steps) - len(steps))


def seconds_of(costs: CostModel, work: Work) -> float:
    """What the model says of a step."""
    return costs.step_s(work.decodes, work.prefill_tokens, work.decode_cells, work.prefill_cells)


def _solve(steps: list[Step], expected: list[float]) -> tuple[tuple[tuple[int, float], ...], tuple[float, float, float]]:
    """(table, (seconds per decode, per cell of a decode, per cell of a prefill)). The table is a base and slopes of its
    segments, none negative, so that more rows never take less time. Errors count relative to what was expected of a step: to
    what it took, those that happened to be quick would count most."""
    rows = np.array([step.work.decodes + step.work.prefill_tokens for step in steps], float)
    knots = _knots(rows)
    columns = [np.ones(len(steps))]
    columns += [np.clip(rows - low, 0, high - low) for low, high in zip(knots, knots[1:])]
    columns += [np.array([getattr(step.work, name) for step in steps], float) for name in _REST]
    seconds = np.array([step.seconds for step in steps])
    weights = 1 / np.array(expected) / np.sqrt(_crowd(steps))
    scale = [max(float(np.linalg.norm(column * weights)), 1e-300) for column in columns]
    matrix = np.stack([column * weights / norm for column, norm in zip(columns, scale)], axis=1)
    found = non_negative(matrix, seconds * weights) / scale
    base, slopes, rest = found[0], found[1 : len(knots)], found[len(knots) :]
    base = max(base, LEAST_STEP_S)  # a decode may be all that its sequence costs; the model wants a step to take some time
    values = [base, *(base + np.cumsum(slopes * np.diff(knots)))]
    return tuple((int(knot), float(value)) for knot, value in zip(knots, values)), tuple(map(float, rest))


def _knots(rows: np.ndarray) -> list[int]:
    """Ends of the table's segments: each segment has samples enough, the last end is the most rows there were."""
    knots = [int(rows.min())]
    for knot in (*(knot for knot in KNOTS if knot < rows.max()), int(rows.max())):
        if knot > knots[-1] and np.count_nonzero((rows > knots[-1]) & (rows <= knot)) >= LEAST_SAMPLES:
            knots.append(knot)
    return knots


def _crowd(steps: list[Step]) -> np.ndarray:
    """How many steps are of each one's kind: a thousand equal decodes must not outweigh every prefill."""
    kinds = [(step.work.decodes, step.work.prefill_tokens.bit_length()) for step in steps]
    counts = Counter(kinds)
    return np.array([counts[kind] for kind in kinds], float)


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix x - target|: the active-set method of Lawson and Hanson (1974), chapter 23."""
    count = matrix.shape[1]
    x, used = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gain = matrix.T @ (target - matrix @ x)
        if used.all() or gain[~used].max() <= 1e-10 * float(np.linalg.norm(target)):
            break
        used[np.argmax(np.where(used, -np.inf, gain))] = True
        while True:
            trial = np.zeros(count)
            trial[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
            if trial[used].min() > 0:
                x = trial
                break
            below = used & (trial <= 0)
            part = float((x[below] / (x[below] - trial[below] + 1e-300)).min())
            x = x + part * (trial - x)
            used &= x > 1e-14
            x[~used] = 0
            if not used.any():
                break
    return x


def _errors(name: str, costs: CostModel, steps: list[Step]) -> Errors:
    if not steps:
        return Errors(name, 0, 0, 0, 0, 0)
    said = [seconds_of(costs, step.work) for step in steps]
    off = [abs(one - step.seconds) / step.seconds for one, step in zip(said, steps)]
    measured = sum(step.seconds for step in steps)
    median_s = percentile([step.seconds for step in steps], 50)
    return Errors(name, len(steps), median_s, percentile(off, 50), percentile(off, 90), sum(said) / measured - 1)


def _rate(copies: list) -> float:
    """Bytes a second of all copies together; 0 if there were none."""
    seconds = sum(copy.seconds for copy in copies)
    return sum(copy.nbytes for copy in copies) / seconds if seconds else 0.0


# what people see ------------------------------------------------------------------------------------------------------
def _show(console: Console, fitted: Fitted, path: Path) -> None:
    costs = fitted.costs
    table = Table(box=None, pad_edge=False, header_style="bold", title=costs.where, title_justify="left")
    for name in ("steps", "count", "median ms", "error p50", "error p90", "in total"):
        table.add_column(name, justify="left" if name == "steps" else "right")
    for one in fitted.errors:
        cells = [f"{1000 * one.median_s:.2f}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.total:+.1%}"]
        table.add_row(one.name, str(one.steps), *cells)
    console.print(table)
    console.print("\n".join(_in_words(costs)))
    if fitted.errors[0].p90 > BUSY:
        console.print("The steps vary much: is the machine busy with something else? Run it again when it is quiet.", style="red")
    console.print(f"{fitted.stalls} steps took {STALL:g} times what they should: left out. Written to {path}")


def _in_words(costs: CostModel) -> Iterator[str]:
    yield "a step of rows -> ms: " + ", ".join(f"{rows} {1000 * seconds:.2f}" for rows, seconds in costs.rows_s)
    yield (
        f"and {1000 * costs.sequence_s:.3f} ms a decode, {1e6 * costs.decode_cell_s:.3f} us a cell of a decode, "
        f"{1e6 * costs.prefill_cell_s:.4f} us a cell of a prefill"
    )
    yield f"copies: save {costs.save_bytes_per_s / 2**20:.0f} MiB/s, load {costs.load_bytes_per_s / 2**20:.0f} MiB/s"
