"""Which policy, which order of coming back: the same traces in the simulator (wide) and on a real server (narrow).

    python -m benchmarks.policy [--seeds 60] [--part simulated|real]

The simulated part writes `policy.md` (tables), `policy.svg` (plot) and `policy.json` (every mean) into the folder `--out`, the
real one `policy-real.md`. The choice of the default follows the rule in `chosen`; docs/decisions/ says what was made of it.
"""

import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable
from math import exp, log
from pathlib import Path

import click
from msgspec import Struct, structs
from rich.console import Console

from benchmarks.policy_plot import plot
from benchmarks.policy_real import paragraph, real_page
from sim import workloads
from sim.costs import load_costs
from sim.engine import limits_of, simulate
from sim.figures import Figures

REQUESTS = 300
LOAD = 1.2  # of what the machine can do with a full pool: a queue grows, the pool is always under pressure
NEAR = 1.005  # a makespan that is longer by less than this factor is as good
GENEROUS = 1 << 40  # bytes: every park is saved


class Choice(Struct, frozen=True):
    """One way to run the server."""

    policy: str
    order: str
    high: int = 94
    low: int = 80

    @property
    def name(self) -> str:
        lines = "" if (self.high, self.low) == (94, 80) else f" {self.high}/{self.low}"
        return f"{self.policy}{lines}, {self.order}"


CHOICES = [Choice(policy, order) for policy in ("watermark", "lookahead", "ondemand") for order in ("most-parked", "head")]
CHOICES += [Choice("watermark", order, 99, 95) for order in ("most-parked", "head")]


class Scene(Struct, frozen=True):
    """A machine and what is asked of it. `over`: what `slots` requests need in the end, in pools; 2 is twice too much."""

    workload: str
    costs: str = "cpu"
    ctx: int = 2048
    slots: int = 8
    over: float = 2.0
    park_ram: int = GENEROUS
    requests: int = REQUESTS

    def run(self, choice: Choice, seed: int) -> Figures:
        costs = load_costs(self.costs)
        settings = {"policy": choice.policy, "resume_order": choice.order, "high": choice.high, "low": choice.low}
        settings["park_mode"] = "save" if self.park_ram else "recompute"
        return simulate(self.trace(seed), limits_of(costs, ctx=self.ctx, slots=self.slots, **settings), costs, self.park_ram)

    def trace(self, seed: int) -> list[workloads.Request]:
        costs = load_costs(self.costs)
        mean = int(self.over * self.ctx / self.slots)
        trace = workloads.make(self.workload, requests=self.requests, seed=seed, mean_cells=mean, most_cells=self.ctx, rate=1.0)
        limits = limits_of(costs, ctx=self.ctx, slots=self.slots)
        return workloads.at_rate(trace, workloads.rate_of_load(LOAD, trace, costs, limits))


class Means(Struct, frozen=True):
    """Over the seeds of a scene, for one choice. `makespan`: ratio to the best choice of the same seed, geometric mean."""

    makespan: float
    makespan_s: float
    longest_wait_s: float
    longest_wait_p90_s: float  # of the seeds
    p99_wait_s: float
    ttft_p99_s: float
    p99_gap_s: float
    parks: float
    recomputed: float
    idle_share: float  # of the pool, while somebody waits


def wide_scenes() -> list[tuple[str, list[Scene]]]:
    """Titles and scenes of the tables after the main one, few seeds each."""
    shapes = workloads.NAMES
    return [
        ("no budget: every park is recomputed", [Scene(shape, park_ram=0) for shape in shapes]),
        ("1.5 times oversubscribed", [Scene(shape, over=1.5) for shape in shapes]),
        ("4 times oversubscribed", [Scene(shape, over=4.0) for shape in shapes]),
        ("16k cells, 16 slots", [Scene(shape, ctx=1 << 14, slots=16) for shape in shapes]),
        ("a card, 16k cells, 8 slots", [Scene(shape, "card", 1 << 14, 8) for shape in shapes]),
        ("a card, 16k cells, no budget", [Scene(shape, "card", 1 << 14, 8, park_ram=0) for shape in shapes]),
        ("a card, 128k cells, 32 slots", [Scene(shape, "card", 1 << 17, 32) for shape in shapes]),
        ("a card, 2M cells, 128 slots", [Scene(shape, "card", 1 << 21, 128) for shape in ("measured", "agents")]),
    ]


def _job(job: tuple[Scene, Choice, int]) -> tuple[Scene, Choice, int, Figures]:
    scene, choice, seed = job
    return *job, scene.run(choice, seed)


def play_all(
    scenes: Iterable[Scene], seeds: range, pool: "multiprocessing.pool.Pool"
) -> dict[Scene, dict[Choice, list[Figures]]]:
    """Every scene with every choice and seed."""
    jobs = [(scene, choice, seed) for scene in scenes for seed in seeds for choice in CHOICES]
    found: dict[Scene, dict[Choice, list[Figures]]] = {scene: {choice: [] for choice in CHOICES} for scene, _, _ in jobs}
    for scene, choice, _, figures in pool.imap(_job, jobs, chunksize=len(CHOICES)):
        assert not figures.failed and not figures.stalled, f"{scene} {choice.name}: {figures.errors}"
        found[scene][choice].append(figures)
    return found


def means(of: dict[Choice, list[Figures]], ctx: int) -> dict[Choice, Means]:
    """The seeds of one scene, taken together."""
    best = [min(figures.makespan_s for figures in seed) for seed in zip(*of.values())]

    def mean(runs: list[Figures], name: str) -> float:
        return statistics.mean(getattr(figures, name) for figures in runs)

    return {
        choice: Means(
            makespan=_geometric(figures.makespan_s / least for figures, least in zip(runs, best)),
            makespan_s=mean(runs, "makespan_s"),
            longest_wait_s=mean(runs, "longest_wait_s"),
            longest_wait_p90_s=sorted(figures.longest_wait_s for figures in runs)[int(0.9 * (len(runs) - 1))],
            p99_wait_s=mean(runs, "p99_wait_s"),
            ttft_p99_s=mean(runs, "ttft_p99_s"),
            p99_gap_s=mean(runs, "p99_gap_s"),
            parks=mean(runs, "all_parks"),
            recomputed=mean(runs, "tokens_recomputed"),
            idle_share=mean(runs, "idle_cells") / ctx,
        )
        for choice, runs in of.items()
    }


def chosen(scenes: Iterable[dict[Choice, Means]]) -> tuple[Choice, dict[Choice, tuple[float, float]]]:
    """The rule: of the choices whose makespan is within half a percent of the best, the one with the shortest longest wait.
    Also both for each choice: the makespan as ratio to the best of each seed, the wait in seconds, means over the workloads."""
    scenes = list(scenes)
    both = {
        choice: (
            _geometric(scene[choice].makespan for scene in scenes),
            statistics.mean(scene[choice].longest_wait_s for scene in scenes),
        )
        for choice in CHOICES
    }
    best = min(makespan for makespan, _ in both.values())
    near = [choice for choice, (makespan, _) in both.items() if makespan <= best * NEAR]
    return min(near, key=lambda choice: both[choice][1]), both


def _rounded(means: Means) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in structs.asdict(means).items()}


def _geometric(values: Iterable[float]) -> float:
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))


# the page -------------------------------------------------------------------------------------------------------------
def main_tables(found: dict[Scene, dict[Choice, Means]]) -> list[str]:
    """A table for each workload, with absolute figures."""
    lines = []
    for scene, by_choice in found.items():
        names = ("makespan s", "ratio", "longest wait s", "p90", "p99 wait s", "p99 TTFT s", "p99 gap ms", "parks", "idle")
        lines += [f"### {scene.workload}", "", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for choice, m in by_choice.items():
            cells = (
                f"{m.makespan_s:.1f}", f"{m.makespan:.3f}", f"{m.longest_wait_s:.2f}", f"{m.longest_wait_p90_s:.2f}",
                f"{m.p99_wait_s:.2f}", f"{m.ttft_p99_s:.1f}", f"{1000 * m.p99_gap_s:.0f}", f"{m.parks:.0f}",
                f"{m.idle_share:.0%}",
            )  # fmt: skip
            lines.append(f"| {choice.name} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def summary_table(titles: list[str], both: list[dict[Choice, tuple[float, float]]], picks: list[Choice]) -> list[str]:
    """One line a choice, one column a table."""
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for choice in CHOICES:
        cells = []
        for of, pick in zip(both, picks):
            makespan, wait_s = of[choice]
            text = f"{makespan:.3f}, {wait_s:.2f} s"
            cells.append(f"**{text}**" if pick == choice else text)
        lines.append(f"| {choice.name} | {' | '.join(cells)} |")
    return [*lines, ""]


@click.command()
@click.option("--seeds", default=60, show_default=True, help="of the main tables")
@click.option("--wide-seeds", default=6, show_default=True, help="of each of the others")
@click.option("--part", type=click.Choice(["simulated", "real", "both"]), default="both", show_default=True)
@click.option("--costs", default="cpu", show_default=True, help="of the machine, for the real part: best fitted just before")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("docs"), show_default=True)
def main(seeds: int, wide_seeds: int, part: str, costs: str, out: Path) -> None:
    console = Console()
    if part != "simulated":
        (out / "policy-real.md").write_text("\n".join(real_page(console, load_costs(costs))))
    if part != "real":
        simulated(console, seeds, wide_seeds, out)


def simulated(console: Console, seeds: int, wide_seeds: int, out: Path) -> None:
    """Every scene, the page, the data and the plot."""
    began = time.monotonic()
    main_scenes = [Scene(shape) for shape in workloads.NAMES]
    titles, both, picks, data = ["2k cells, 8 slots, 2 times"], [], [], {}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), initializer=gc.disable) as pool:
        runs = play_all(main_scenes, range(1, seeds + 1), pool)
        found = {scene: means(of, scene.ctx) for scene, of in runs.items()}
        tables = [found]
        for title, scenes in wide_scenes():
            wide = play_all(scenes, range(1, wide_seeds + 1), pool)
            tables.append({scene: means(of, scene.ctx) for scene, of in wide.items()})
            titles.append(title)
            console.print(f"{time.monotonic() - began:6.0f} s  {title}")
    for title, table in zip(titles, tables):
        pick, ratios = chosen(table.values())
        picks.append(pick)
        both.append(ratios)
        data[title] = {scene.workload: {choice.name: _rounded(m) for choice, m in by.items()} for scene, by in table.items()}
    sim_s = time.monotonic() - began
    page = [
        "# Policies compared",
        "",
        *paragraph(f"""
            Written by `python -m benchmarks.policy --seeds {seeds} --wide-seeds {wide_seeds}`; {REQUESTS} requests a run,
            arriving at {LOAD} times the rate that the machine can do. The simulator's part took {sim_s:.0f} s. What follows
            from it: `docs/decisions/`."""),
        "## All tables in one",
        "",
        *paragraph(f"""
            Makespan as ratio to the best choice of the same seed (geometric mean over seeds and workloads), and the longest
            single wait of a parked request (mean over seeds and workloads). {seeds} seeds in the first column, {wide_seeds}
            in the others. Bold is what the rule chooses: of those whose makespan is within {NEAR - 1:.1%} of the best, the
            one with the shortest longest wait."""),
        *summary_table(titles, both, picks),
        "![makespan and longest wait](policy.svg)",
        "",
        "## Pool of 2,048 cells, 8 slots, 2 times oversubscribed, costs of the CPU",
        "",
        *paragraph("""
            `ratio`: of the makespan, to the best choice of each seed. `p90`: of the seeds' longest waits. `idle`: of the
            pool's cells, while somebody waits."""),
        *main_tables(found),
    ]
    (out / "policy.md").write_text("\n".join(page))
    (out / "policy.json").write_text(json.dumps(data, indent=1) + "\n")
    plot(titles, both, [choice.name for choice in CHOICES], out / "policy.svg")
    console.print("\n".join(summary_table(titles, both, picks)))
    console.print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
