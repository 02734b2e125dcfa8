"""The plot of `parkade sim`: its figures side by side, and how full the pool was over time. matplotlib is loaded only here."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from parkade.simulate import Run, combinations, moved_mib, number
from sim.engine import Limits
from sim.timeline import lines_of
from wire.config import ConfigError

BARS = (
    ("tokens a second", lambda f: f.tokens_per_s),
    ("makespan, s", lambda f: f.makespan_s),
    ("longest wait, s", lambda f: f.longest_wait_s),
    ("99th percentile of waits, s", lambda f: f.p99_wait_s),
    ("99th percentile of TTFT, s", lambda f: f.ttft_p99_s),
    ("99th percentile of gaps, s", lambda f: f.p99_gap_s),
    ("parks", lambda f: f.all_parks),
    ("tokens recomputed", lambda f: f.tokens_recomputed),
    ("MiB saved and loaded", moved_mib),
    ("idle cells", lambda f: f.idle_cells),
)
ACROSS = 5
MOST_TIMELINES = 4
COLOURS = ("#4878a8", "#e08a3c", "#6a9f58", "#b65d60", "#8c77ad", "#8a8a8a", "#d4a6c8", "#5aa7a7")


def check_plot(path: str) -> None:
    """ConfigError if it could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError('--plot needs matplotlib: pip install "parkade[plot]"') from None
    if Path(path).suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--plot {path}: the name must end with .svg, .png or .pdf")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder")


def draw(path: str, what: str, runs: list[Run], limits: Limits) -> None:
    """Bars are means over seeds, with the spread from the least to the most. The timelines are of the first seed."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "parkade"  # the same figures are the same file
    from matplotlib import pyplot

    by_name = combinations(runs)
    shown = _timelines(by_name)
    bar_rows = -(-len(BARS) // ACROSS)
    figure = pyplot.figure(figsize=(16, 2.6 * bar_rows + 2.2 * len(shown) + 0.6), layout="constrained")
    grid = figure.add_gridspec(bar_rows + len(shown), ACROSS)
    for index, (title, of) in enumerate(BARS):
        axes = figure.add_subplot(grid[index // ACROSS, index % ACROSS])
        _bars(axes, title, of, by_name)
        if index % ACROSS:
            axes.set_yticklabels([])
    for index, run in enumerate(shown):
        _pool(figure.add_subplot(grid[bar_rows + index, :]), run, limits)
    figure.suptitle(f"{what}: {limits.slots} slots, pool of {limits.pool_cells} cells")
    try:
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from None
    pyplot.close(figure)


def _timelines(by_name: dict[tuple[str, str], list[Run]]) -> list[Run]:
    """One run of each policy."""
    first: dict[str, Run] = {}
    for (policy, _), some in by_name.items():
        if some[0].moments:
            first.setdefault(policy, some[0])
    return list(first.values())[:MOST_TIMELINES]


def _bars(axes: Any, title: str, of: Any, by_name: dict[tuple[str, str], list[Run]]) -> None:
    for index, ((policy, order), some) in enumerate(by_name.items()):
        values = [float(of(run.figures)) for run in some]
        mean = sum(values) / len(values)
        label = f"{policy}, {order}" if len({name[1] for name in by_name}) > 1 else policy
        axes.barh(label, mean, color=COLOURS[index % len(COLOURS)])
        if len(values) > 1:
            axes.plot([min(values), max(values)], [label, label], color="black", linewidth=0.8)
        axes.annotate(f" {number(values)}", (max(values), index), va="center", fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def _pool(axes: Any, run: Run, limits: Limits) -> None:
    times = [moment.at_s for moment in run.moments]
    used = [moment.used_cells for moment in run.moments]
    parked = [moment.used_cells + moment.parked_cells for moment in run.moments]
    axes.fill_between(times, used, parked, step="post", color="#e8c070", linewidth=0, label="parked")
    axes.fill_between(times, used, step="post", color="#4878a8", linewidth=0, label="used")
    axes.axhline(limits.pool_cells, color="black", linewidth=1, label="pool")
    parks_above, resumes_below = lines_of(replace(limits, policy=run.policy))
    if parks_above < limits.pool_cells:
        axes.axhline(parks_above, color="#b04040", linewidth=0.8, linestyle="--", label="parks above")
        axes.axhline(resumes_below, color="#408040", linewidth=0.8, linestyle="--", label="resumes below")
    axes.set_ylim(0, 1.05 * max(limits.pool_cells, *parked))
    axes.set_title(f"cells over time, s: {run.policy}, {run.resume_order}, seed {run.seed}", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, loc="upper right")
    axes.margins(x=0)
