"""The narrow half of `benchmarks.policy`: traces on a real server with SmolLM2, beside the simulator's word for the same."""

import statistics
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from benchmarks.played import Played, play
from benchmarks.server import free_port, parkade_command, server
from parkade.fit import Fitted, fit, where
from sim import workloads
from sim.costs import CostModel
from sim.engine import limits_of, simulate
from sim.figures import Figures
from sim.samples import Samples, samples

SLOTS = 8
CTX = 2048
OVER = 2.0  # what eight requests need in the end, in pools
ROOMY = 8192  # cells: nobody is ever parked
POLICIES = ("watermark", "lookahead", "ondemand")
BUDGETS = (("8GiB", 1 << 33), ("0", 0))
Trace = list[workloads.Request]


class Run(Struct, frozen=True):
    """One configuration of the server, and how each trace went on it. `nbytes` is `park_ram` for the simulator."""

    policy: str
    park_ram: str
    nbytes: int
    ctx: int
    traces: list[Trace]
    played: list[Played]
    measured: Samples

    @property
    def name(self) -> str:
        return f"{self.policy}, {'saved' if self.nbytes else 'recomputed'}"

    def simulated(self, costs: CostModel) -> list[Figures]:
        """The same traces in the simulator."""
        mode = "save" if self.nbytes else "recompute"
        limits = limits_of(costs, ctx=self.ctx, slots=SLOTS, policy=self.policy, resume_order="head", park_mode=mode)
        return [simulate(trace, limits, costs, self.nbytes) for trace in self.traces]


def run(console: Console, folder: Path, policy: str, park_ram: str, nbytes: int, ctx: int, traces: list[Trace]) -> Run:
    """Play the traces, one after another, on a server of its own that keeps a journal."""
    port, run_dir, journal = free_port(), folder / f"{policy}-{park_ram}-{ctx}", folder / f"{policy}-{park_ram}-{ctx}.journal"
    settings = {
        "ctx": ctx,
        "slots": SLOTS,
        "policy": policy,
        "park_ram": park_ram,
        "resume_order": "head",
        "max_park_s": 0,
        "draft": 0,
    }
    with server(parkade_command(port, run_dir, **settings, journal=journal), port, folder / "server.log"):
        played = [play(f"ipc://{run_dir}/client.sock", trace) for trace in traces]
    for one in played:
        assert not one.errors, f"{policy} {park_ram}: {one.errors}"
    found = Run(policy, park_ram, nbytes, ctx, traces, played, samples(journal))
    console.print(f"{found.name}: {_spread([one.tokens_per_s for one in played], 0)} tok/s")
    journal.unlink()
    return found


def costs_of(runs: list[Run]) -> Fitted:
    """Costs fitted to the steps and copies of these runs together, so that the machine's mood is in both halves alike."""
    everything = runs[0].measured
    for other in runs[1:]:
        everything.steps += other.measured.steps
        everything.saves += other.measured.saves
        everything.loads += other.measured.loads
    return fit(everything, "of these runs", where(everything))


def real_page(console: Console, costs: CostModel, rounds: int = 3) -> list[str]:
    """Two tables as lines of Markdown: how far off the simulator is, what parks cost. `costs` only set the rate of arrivals."""
    head = ["# Policies on a real server", "", "Written by `python -m benchmarks.policy --part real`.", ""]
    with tempfile.TemporaryDirectory(prefix="parkade-policy-") as folder:
        return [*head, *truth(console, costs, Path(folder)), *throughput(console, Path(folder), rounds)]


def truth(console: Console, costs: CostModel, folder: Path) -> list[str]:
    """The same trace on a server and in the simulator, under each policy."""
    trace = workloads.make("measured", requests=40, seed=1, mean_cells=int(OVER * CTX / SLOTS), most_cells=CTX, rate=1.0)
    trace = workloads.at_rate(trace, workloads.rate_of_load(1.2, trace, costs, limits_of(costs, ctx=CTX, slots=SLOTS)))
    runs = [run(console, folder, policy, *budget, CTX, [trace]) for policy in POLICIES for budget in BUDGETS]
    fitted = costs_of(runs)
    pairs = [(one.name, one.played[0], one.simulated(fitted.costs)[0]) for one in runs]
    errors = [abs(sim.tokens_per_s / real.tokens_per_s - 1) for _, real, sim in pairs]
    lines = [
        "## Does the simulator tell the truth?",
        "",
        *paragraph(f"""
            40 requests of the shape `measured` on a real server (SmolLM2, {CTX} cells, {SLOTS} slots), and in the simulator
            with costs fitted to the steps and copies of these six runs ({fitted.costs.where}; {fitted.costs.error}).
            Throughput is off by {_mean(errors):.1%} on average, by {max(errors):.1%} at most."""),
        "| real / simulated | tok/s | error | parks | recomputed | longest wait s | p99 TTFT s | p99 gap ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, real, sim in pairs:
        lines.append(
            f"| {name} | {real.tokens_per_s:.0f} / {sim.tokens_per_s:.0f} | {sim.tokens_per_s / real.tokens_per_s - 1:+.1%} | "
            f"{real.parks} / {sim.all_parks} | {real.tokens_recomputed:,} / {sim.tokens_recomputed:,} | "
            f"{real.longest_wait_s:.2f} / {sim.longest_wait_s:.2f} | {real.ttft_p99_s:.1f} / {sim.ttft_p99_s:.1f} | "
            f"{1000 * real.p99_gap_s:.0f} / {1000 * sim.p99_gap_s:.0f} |"
        )
        console.print(lines[-1])
    return [*lines, ""]


def throughput(console: Console, folder: Path, rounds: int) -> list[str]:
    """What is left of the throughput when parks cost what they cost."""
    mean = int(OVER * CTX / SLOTS)
    traces = [
        workloads.make("uniform", requests=24, seed=seed, mean_cells=mean, most_cells=CTX // 2) for seed in range(1, rounds + 1)
    ]
    roomy = run(console, folder, "watermark", "8GiB", 1 << 33, ROOMY, traces)
    assert not any(played.parks for played in roomy.played), "the roomy pool is not roomy"
    runs = [run(console, folder, policy, *budget, CTX, traces) for policy in ("watermark", "ondemand") for budget in BUDGETS]
    fitted = costs_of([roomy, *runs])
    free = {one.policy: one.simulated(fitted.costs.with_free_parks()) for one in runs if one.nbytes}
    roomy_free = roomy.simulated(fitted.costs)
    bound = [max(of[i].tokens_per_s for of in free.values()) / roomy_free[i].tokens_per_s for i in range(rounds)]
    lines = [
        "## What parks cost",
        "",
        *paragraph(f"""
            24 requests of the shape `uniform`, all at once, {SLOTS} slots, {CTX} cells: {OVER:g} times oversubscribed;
            {rounds} rounds, each another trace. *Of free parks*: of what the simulator gives for the same pool and policy
            when copies take no time and all are saved, with costs fitted to these runs ({fitted.costs.error}). *Of a roomy
            pool*: of a real run with {ROOMY} cells. A smaller pool runs fewer rows at once, which alone bounds that ratio
            to {_spread(bound)}: free parks here over the roomy pool, both simulated."""),
        "| | tok/s | of free parks | of a roomy pool | parks | recomputed |",
        "|---|---|---|---|---|---|",
    ]
    for one in (roomy, *runs):
        speeds = [played.tokens_per_s for played in one.played]
        of_roomy = [speed / played.tokens_per_s for speed, played in zip(speeds, roomy.played)]
        ideal = roomy_free if one is roomy else free[one.policy]
        of_free = [speed / figures.tokens_per_s for speed, figures in zip(speeds, ideal)]
        name = "roomy pool" if one is roomy else one.name
        parks, recomputed = _mean(p.parks for p in one.played), _mean(p.tokens_recomputed for p in one.played)
        ratios = f"{_spread(of_free)} | {_spread(of_roomy)}"
        lines.append(f"| {name} | {_spread(speeds, 0)} | {ratios} | {parks:.0f} | {recomputed:,.0f} |")
        console.print(lines[-1])
    return [*lines, ""]


def paragraph(text: str) -> list[str]:
    """A paragraph of Markdown, and the empty line after it."""
    return [*textwrap.wrap(" ".join(text.split()), 140, break_long_words=False), ""]


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _spread(values: list[float], digits: int = 2) -> str:
    """Mean, least and most."""
    return f"{_mean(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"
