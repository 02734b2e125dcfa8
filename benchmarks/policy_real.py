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
from sim import workloads
from sim.costs import CostModel, load_costs
from sim.engine import limits_of, simulate
from sim.figures import Figures

SLOTS = 8
CTX = 2048
OVER = 2.0  # what eight requests need in the end, in pools
ROOMY = 8192  # cells: nobody is ever parked
POLICIES = ("watermark", "lookahead", "ondemand")
BUDGETS = (("saved", "8GiB", 1 << 33), ("recomputed", "0", 0))
Trace = list[workloads.Request]


class Pair(Struct, frozen=True):
    """One configuration, played and simulated."""

    name: str
    real: Played
    sim: Figures


def real_tables(console: Console, costs: CostModel | None = None, rounds: int = 3) -> list[str]:
    """Two tables as lines of Markdown: how far off the simulator is, and what parks cost."""
    costs = costs or load_costs("cpu")
    with tempfile.TemporaryDirectory(prefix="parkade-policy-") as folder:
        return [*truth(console, costs, Path(folder)), *throughput(console, costs, Path(folder), rounds)]


def truth(console: Console, costs: CostModel, folder: Path) -> list[str]:
    """The same trace on a server and in the simulator, under each policy."""
    limits = limits_of(costs, ctx=CTX, slots=SLOTS)
    trace = workloads.make("measured", requests=60, seed=1, mean_cells=int(OVER * CTX / SLOTS), most_cells=CTX)
    trace = workloads.at_rate(
        workloads.make("measured", requests=60, seed=1, mean_cells=int(OVER * CTX / SLOTS), most_cells=CTX, rate=1.0),
        workloads.rate_of_load(1.2, trace, costs, limits),
    )
    pairs = []
    for policy in POLICIES:
        for name, park_ram, nbytes in BUDGETS:
            pairs.append(pair(f"{policy}, {name}", [trace], costs, folder, policy, park_ram, nbytes, CTX)[0])
            console.print(
                f"{pairs[-1].name}: {pairs[-1].real.tokens_per_s:.0f} tok/s, simulated {pairs[-1].sim.tokens_per_s:.0f}"
            )
    errors = [abs(p.sim.tokens_per_s / p.real.tokens_per_s - 1) for p in pairs]
    lines = [
        "## Does the simulator tell the truth?",
        "",
        *paragraph(f"""
            60 requests of the shape `measured` on a real server (SmolLM2, {CTX} cells, {SLOTS} slots), and in the simulator
            with the costs `{costs.name}` ({costs.where}). Throughput is off by {_mean(errors):.1%} on average, by
            {max(errors):.1%} at most."""),
        "| real / simulated | tok/s | error | parks | recomputed | longest wait s | p99 TTFT s | p99 gap ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in pairs:
        real, sim = p.real, p.sim
        lines.append(
            f"| {p.name} | {real.tokens_per_s:.0f} / {sim.tokens_per_s:.0f} | {sim.tokens_per_s / real.tokens_per_s - 1:+.1%} | "
            f"{real.parks} / {sim.all_parks} | {real.tokens_recomputed:,} / {sim.tokens_recomputed:,} | "
            f"{real.longest_wait_s:.2f} / {sim.longest_wait_s:.2f} | {real.ttft_p99_s:.1f} / {sim.ttft_p99_s:.1f} | "
            f"{1000 * real.p99_gap_s:.0f} / {1000 * sim.p99_gap_s:.0f} |"
        )
    return [*lines, ""]


def throughput(console: Console, costs: CostModel, folder: Path, rounds: int) -> list[str]:
    """What is left of the throughput when parks cost what they cost."""
    traces = [
        workloads.make("uniform", requests=32, seed=seed, mean_cells=int(OVER * CTX / SLOTS), most_cells=CTX // 2)
        for seed in range(1, rounds + 1)
    ]
    free = {policy: [simulated(trace, costs.with_free_parks(), policy, 1 << 33, CTX) for trace in traces] for policy in POLICIES}
    roomy = pair("a pool that holds everything", traces, costs, folder, "watermark", "8GiB", 1 << 33, ROOMY)
    assert all(p.real.parks == 0 for p in roomy), "the roomy pool is not roomy"
    bound = [max(of[i].tokens_per_s for of in free.values()) / p.sim.tokens_per_s for i, p in enumerate(roomy)]
    lines = [
        "## What parks cost",
        "",
        *paragraph(f"""
            32 requests of the shape `uniform`, all at once, {SLOTS} slots, {CTX} cells: {OVER:g} times oversubscribed;
            {rounds} rounds, each another trace. *Of free parks*: of what the simulator gives for the same pool and policy
            when copies take no time and all are saved. *Of a roomy pool*: of a real run with {ROOMY} cells. A smaller pool
            runs fewer rows at once, which alone bounds that ratio to {_spread(bound)}: free parks here over the roomy pool,
            both simulated."""),
        "| | tok/s | of free parks | of a roomy pool | parks | recomputed |",
        "|---|---|---|---|---|---|",
        f"| roomy pool | {_spread([p.real.tokens_per_s for p in roomy], 0)} | | 1 | 0 | 0 |",
    ]
    for policy in POLICIES:
        for name, park_ram, nbytes in BUDGETS:
            pairs = pair(f"{policy}, {name}", traces, costs, folder, policy, park_ram, nbytes, CTX)
            speeds = [p.real.tokens_per_s for p in pairs]
            of_free = [speed / figures.tokens_per_s for speed, figures in zip(speeds, free[policy])]
            of_roomy = [speed / p.real.tokens_per_s for speed, p in zip(speeds, roomy)]
            lines.append(
                f"| {policy}, {name} | {_spread(speeds, 0)} | {_spread(of_free)} | {_spread(of_roomy)} | "
                f"{_mean(p.real.parks for p in pairs):.0f} | {_mean(p.real.tokens_recomputed for p in pairs):,.0f} |"
            )
            console.print(lines[-1])
    return [*lines, ""]


def pair(
    name: str, traces: Iterable[Trace], costs: CostModel, folder: Path, policy: str, park_ram: str, nbytes: int, ctx: int
) -> list[Pair]:
    """Each trace on one server, and simulated. `park_ram` is the server's flag, `nbytes` the same for the simulator."""
    port, run_dir = free_port(), folder / f"{policy}-{park_ram}-{ctx}"
    settings = {
        "ctx": ctx,
        "slots": SLOTS,
        "policy": policy,
        "park_ram": park_ram,
        "max_park_s": 0,
        "draft": 0,
        "resume_order": "head",
    }
    found = []
    with server(parkade_command(port, run_dir, **settings), port, folder / "server.log"):
        for trace in traces:
            real = play(f"ipc://{run_dir}/client.sock", trace)
            assert not real.errors, f"{name}: {real.errors}"
            found.append(Pair(name, real, simulated(trace, costs, policy, nbytes, ctx)))
    return found


def simulated(trace: Trace, costs: CostModel, policy: str, park_ram: int, ctx: int) -> Figures:
    mode = "save" if park_ram else "recompute"
    limits = limits_of(costs, ctx=ctx, slots=SLOTS, policy=policy, resume_order="head", park_mode=mode)
    return simulate(trace, limits, costs, park_ram)


def paragraph(text: str) -> list[str]:
    """A paragraph of Markdown, and the empty line after it."""
    return [*textwrap.wrap(" ".join(text.split()), 140, break_long_words=False), ""]


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _spread(values: list[float], digits: int = 2) -> str:
    """Mean, least and most."""
    return f"{_mean(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"
