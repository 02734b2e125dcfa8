"""`parkade sim`: traces through the real scheduler in virtual time, compared in a table, as JSON and as a plot."""

import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from parkade.sim_options import LISTS, SETTINGS
from sim import engine, workloads
from sim import trace as traces
from sim.costs import CostModel, CostsError, load_costs
from sim.engine import Limits
from sim.figures import Figures
from sim.timeline import Moment, Timeline
from sim.trace import Request, TraceError
from wire import config as settings
from wire.config import Config, ConfigError, size_bytes

AUTO_PARK_RAM = 8 << 30  # what `--park-ram auto` is on a machine with 32 GiB or more
REQUESTS = 300
MOST_SEEDS = 100_000
MOST_BLOCKS = 1 << 22  # of the pool: each is an object of this process
OVERSUBSCRIBED = 1.5  # by the usual mean: what all slots come to in the end, as a share of the pool


class Job(Struct, frozen=True):
    """One run. `trace` None: made from `made` in the process that runs it."""

    config: Config
    costs: CostModel
    seed: int
    trace: tuple[Request, ...] | None
    made: "Made | None"
    timeline: bool


class Made(Struct, frozen=True):
    """How a workload is made; see workloads.make."""

    name: str
    requests: int
    mean_cells: int
    most_cells: int
    priorities: tuple[int, ...]
    rate: float | None
    load: float

    def trace(self, seed: int, costs: CostModel, limits: Limits) -> list[Request]:
        """That of a seed."""
        trace = workloads.make(
            self.name,
            requests=self.requests,
            seed=seed,
            mean_cells=self.mean_cells,
            most_cells=self.most_cells,
            rate=1.0,
            priorities=self.priorities,
        )
        rate = self.rate if self.rate is not None else workloads.rate_of_load(self.load, trace, costs, limits)
        return workloads.at_rate(trace, rate)


class Run(Struct, frozen=True):
    """What one job came to."""

    policy: str
    resume_order: str
    seed: int
    figures: Figures
    moments: list[Moment] = []

    @property
    def name(self) -> tuple[str, str]:
        return self.policy, self.resume_order


def simulate(
    *,
    trace: str | None,
    workload: str | None,
    costs: str,
    seeds: str | None,
    free_parks: bool,
    jobs: int | None,
    write: str | None,
    json_file: str | None,
    plot: str | None,
    **options: Any,
) -> int:
    """Run every combination of policies, orders and seeds. ConfigError is one line for the user."""
    configs = configs_of({name: options.pop(name, None) for name in SETTINGS})
    model = _costs(costs, free_parks)
    made = _made(workload, configs[0], options) if workload else None
    _check(trace, made, seeds, options)
    if plot:
        from parkade.sim_plot import check_plot  # before anything takes time

        check_plot(plot)
    numbers = seeds_of(seeds or "1")
    known = _read(trace) if trace is not None else None
    if write:
        _write(write, known or made.trace(numbers[0], model, limits_of(configs[0], model)))

    todo = [
        Job(config, model, seed, tuple(known) if known else None, made, plot is not None and seed == numbers[0])
        for config, seed in product(configs, numbers)
    ]
    began = time.perf_counter()
    runs = list(_played(todo, jobs or os.cpu_count() or 1))
    took_s = time.perf_counter() - began

    console = Console(width=None if sys.stdout.isatty() else 200)
    what = f"{trace}" if trace else f"{workload}, seeds {seeds or 1}"
    console.print(_headline(what, configs[0], model, runs, took_s), markup=False)
    console.print(table_of(runs))
    if json_file:
        _save(json_file, what, configs[0], model, runs)
    if plot:
        from parkade.sim_plot import draw

        draw(plot, what, runs, limits_of(configs[0], model))
    return 0


# what is to be run ------------------------------------------------------------------------------------------------------
def configs_of(flags: dict[str, Any]) -> list[Config]:
    """One for each policy and resume order; the environment and files of a server do not count."""
    lists = [(flags[name] or str(getattr(Config(), name))).split(",") for name in LISTS]
    one = {name: value for name, value in flags.items() if name not in LISTS}
    return [settings.load(one | dict(zip(LISTS, choice)), environ={}) for choice in product(*lists)]


def limits_of(config: Config, costs: CostModel) -> Limits:
    """Limits as the worker of `parkade serve` has them. ConfigError if nothing could run."""
    if config.ctx < costs.block_size:
        raise ConfigError(f"--ctx {config.ctx} is less than a block of {costs.block_size} cells")
    if config.ctx // costs.block_size > MOST_BLOCKS:
        raise ConfigError(f"--ctx {config.ctx} is more than {MOST_BLOCKS} blocks of {costs.block_size} cells")
    reuse = {"reuse": False} if config.no_reuse else {}
    return engine.limits_of(costs, ctx=config.ctx, **settings.policy_settings(config), **reuse)


def park_ram_bytes(config: Config) -> int:
    """The budget of the host cache."""
    return AUTO_PARK_RAM if config.park_ram == "auto" else size_bytes(config.park_ram)


def seeds_of(text: str) -> list[int]:
    """`7` is one, `1..60` are sixty. ConfigError for anything else."""
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise ConfigError(f"--seeds {text!r} must be a number or a range such as 1..60")
    if seeds[-1] - seeds[0] >= MOST_SEEDS:
        raise ConfigError(f"--seeds {text!r} are more than {MOST_SEEDS}")
    return list(seeds)


def _costs(name: str, free_parks: bool) -> CostModel:
    try:
        costs = load_costs(name)
    except CostsError as error:
        raise ConfigError(f"--costs {error}") from None
    return costs.with_free_parks() if free_parks else costs


def _made(name: str, config: Config, options: dict[str, Any]) -> Made:
    if name not in workloads.NAMES:
        raise ConfigError(f"--workload {name!r} is not known; choose one of {', '.join(workloads.NAMES)}")
    most = max(2, config.ctx * 3 // 4)
    mean = options["mean_cells"] or max(2, min(int(OVERSUBSCRIBED * config.ctx / config.slots), config.ctx // 4))
    if mean > most:
        raise ConfigError(f"--mean-cells {mean} must be at most {most}, three quarters of --ctx")
    try:
        priorities = tuple(int(number) for number in (options["priorities"] or "0").split(","))
    except ValueError:
        priorities = (1000,)
    if not all(-100 <= number <= 100 for number in priorities):
        raise ConfigError(f"--priorities {options['priorities']!r} must be numbers from -100 to 100 with commas between them")
    return Made(name, options["requests"] or REQUESTS, mean, most, priorities, options["rate"], options["load"] or 1.0)


def _check(trace: str | None, made: Made | None, seeds: str | None, options: dict[str, Any]) -> None:
    if (trace is None) == (made is None):
        raise ConfigError("say what to simulate: either --trace FILE or --workload NAME")
    if options["rate"] is not None and options["load"] is not None:
        raise ConfigError("--rate and --load exclude each other")
    if trace is not None:
        given = [name for name in ("requests", "mean_cells", "rate", "load", "priorities") if options[name] is not None]
        if given or seeds:
            names = ", ".join(settings.flag_name(name) for name in (given or ["seeds"]))
            raise ConfigError(f"{names}: of a workload, but --trace is given")


def _read(path: str) -> list[Request]:
    try:
        return traces.read(path)
    except TraceError as error:
        raise ConfigError(f"--trace {error}") from None


def _write(path: str, trace: Iterable[Request]) -> None:
    try:
        traces.write(path, trace)
    except TraceError as error:
        raise ConfigError(f"--write {error}") from None


# running ------------------------------------------------------------------------------------------------------------------
def play(job: Job) -> Run:
    """One run, in whatever process."""
    config, costs = job.config, job.costs
    limits = limits_of(config, costs)
    trace = job.trace if job.trace is not None else job.made.trace(job.seed, costs, limits)
    timeline = Timeline() if job.timeline else None
    figures = engine.simulate(trace, limits, costs, park_ram_bytes(config), timeline=timeline)
    return Run(config.policy, config.resume_order, job.seed, figures, timeline.moments if timeline else [])


def _played(todo: list[Job], processes: int) -> Iterator[Run]:
    limits_of(todo[0].config, todo[0].costs)  # what is wrong with the settings is said here
    gc.disable()  # nothing in a run is a cycle that grows, and walking it would cost a third of the time
    try:
        if processes == 1 or len(todo) == 1:
            yield from map(play, todo)
            return
        with ProcessPoolExecutor(min(processes, len(todo)), initializer=gc.disable) as pool:
            yield from pool.map(play, todo)
    finally:
        gc.enable()


# what is said -------------------------------------------------------------------------------------------------------------
def _headline(what: str, config: Config, costs: CostModel, runs: list[Run], took_s: float) -> str:
    steps = sum(run.figures.steps for run in runs)
    return (
        f"{what}: {runs[0].figures.requests} requests, {config.slots} slots, pool of {config.ctx} cells, "
        f"{park_ram_bytes(config) / 2**30:.3g} GiB for parks\ncosts: {costs.name}, {costs.where}"
        + (f" ({costs.note})" if costs.note else "")
        + f"\n{steps:,} steps played in {took_s:.1f} s; times in virtual seconds"
        + (f", means of {len({run.seed for run in runs})} seeds" if len({run.seed for run in runs}) > 1 else "")
    )


def moved_mib(figures: Figures) -> float:
    """Copied to the host cache and back."""
    return (figures.bytes_saved + figures.bytes_loaded) / 2**20


LINES = (
    ("tokens a second", lambda f: f.tokens_per_s),
    ("makespan", lambda f: f.makespan_s),
    ("TTFT, p50", lambda f: f.ttft_p50_s),
    ("TTFT, p99", lambda f: f.ttft_p99_s),
    ("longest wait", lambda f: f.longest_wait_s),
    ("wait, p99", lambda f: f.p99_wait_s),
    ("gap between tokens, p99", lambda f: f.p99_gap_s),
    ("longest gap", lambda f: f.longest_gap_s),
    ("parks", lambda f: f.all_parks),
    ("requests parked", lambda f: f.requests_parked),
    ("MiB saved and loaded", moved_mib),
    ("tokens recomputed", lambda f: f.tokens_recomputed),
    ("denials", lambda f: f.denials),
    ("idle cells under pressure", lambda f: f.idle_cells),
    ("failed", lambda f: f.failed),
    ("cut short", lambda f: f.cut_short),
    ("steps", lambda f: f.steps),
)


def combinations(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """The runs of each policy and resume order."""
    by_name: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    return by_name


def table_of(runs: list[Run]) -> Table:
    """A column for each policy and order; means over the seeds. Where there are several classes, their waits too."""
    by_name = combinations(runs)
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("", no_wrap=True)
    for policy, order in by_name:
        table.add_column(f"{policy}\n{order}", justify="right", no_wrap=True)
    for name, of in LINES:
        table.add_row(name, *(number([of(run.figures) for run in some]) for some in by_name.values()))
    for reason in sorted({reason for run in runs for reason in run.figures.park_reasons}):
        counts = ([run.figures.park_reasons.get(reason, 0) for run in some] for some in by_name.values())
        table.add_row(f"parks: {reason}", *(number(some) for some in counts))
    classes = sorted({name for run in runs for name in run.figures.classes}, key=int)
    for name in classes if len(classes) > 1 else []:
        for title, of in (("longest wait", lambda one: one.longest_wait_s), ("TTFT, p99", lambda one: one.ttft_p99_s)):
            found = ([run.figures.classes[name] for run in some if name in run.figures.classes] for some in by_name.values())
            table.add_row(f"priority {name}: {title}", *(number([of(one) for one in some]) for some in found))
    return table


def number(values: list[float]) -> str:
    """Their mean, with three digits that count."""
    mean = sum(values) / len(values) if values else 0.0
    if mean == 0 or mean >= 100 or mean == int(mean):
        return f"{mean:.0f}"
    return f"{mean:.3g}"


def _save(path: str, what: str, config: Config, costs: CostModel, runs: list[Run]) -> None:
    shared = {name: getattr(config, name) for name in SETTINGS if name not in LISTS}
    found = {
        "what": what,
        "settings": shared,
        "costs": costs,
        "runs": [{"policy": r.policy, "resume_order": r.resume_order, "seed": r.seed, "figures": r.figures} for r in runs],
    }
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
