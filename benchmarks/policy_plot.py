"""The plot of `benchmarks.policy`: makespan and longest wait of every choice, one group of bars a scene."""

import textwrap
from pathlib import Path
from typing import Any


def plot(titles: list[str], both: list[dict[Any, tuple[float, float]]], names: list[str], path: Path) -> None:
    """`both[i]`: of the scene `titles[i]`, by choice in the order of `names`: (makespan as ratio to the best, longest wait s)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "parkade"  # the same figures, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 8), sharex=True, constrained_layout=True)
    width = 0.8 / len(names)
    for axis, at, label in ((axes[0], 0, "makespan, percent over the best"), (axes[1], 1, "longest single wait, s")):
        for number, name in enumerate(names):
            values = [list(of.values())[number][at] for of in both]
            heights = [100 * (value - 1) for value in values] if at == 0 else values
            places = [scene + width * (number - (len(names) - 1) / 2) for scene in range(len(titles))]
            hatch = "//" if name.endswith("head") else None
            color = f"C{number // 2}"
            axis.bar(places, heights, width, label=name, color=color, hatch=hatch, edgecolor="white", linewidth=0.3)
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_formatter("{x:g}")
    axes[1].set_xticks(range(len(titles)), [textwrap.fill(title, 16) for title in titles], fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
