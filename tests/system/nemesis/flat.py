"""Says from samples of a soak whether memory stayed flat. Pure: samples in, verdicts out.

A life of a process that lasted is judged by itself: its samples after the warm-up are a line, and the line may not rise by more
than GROWTH. Lives that were ended again and again are too short for that; they are compared with one another at equal age, as
points of a line over the soak, so that it is seen if later lives are larger than earlier ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

GROWTH = 0.02  # of resident bytes, from the begin to the end of what is judged
GROWTH_FDS = 4  # connections come and go
LEAST = 8  # points that make a line
MOST = 200  # of a line; from more, so many are taken


@dataclass(frozen=True)
class Sample:
    """Of one process: `t` seconds after the soak began, `age_s` after the process did. `rss` is all resident memory in bytes,
    `shmem` the part of it that is the arena's."""

    t: float
    process: str
    pid: int
    age_s: float
    rss: int
    shmem: int
    fds: int


@dataclass(frozen=True)
class Trend:
    """Of a line of points: medians of its first and last quarter, its slope per second, and the greater of what both say about
    the growth over its whole span, as a share of the begin. A step is seen by the quarters, a slow rise by the slope."""

    points: int
    first: float
    last: float
    slope: float
    growth: float


@dataclass(frozen=True)
class Verdict:
    """On `what` of a process: `life` (memory of one life), `lives` (memory of its lives at equal age), `fds`. Without a `why`
    it is flat."""

    process: str
    what: str
    trend: Trend
    why: str


def trend(line: Iterable[tuple[float, float]]) -> Trend:
    """Of (second, value), at least LEAST of them, in order of time. The slope is the median of the slopes between all pairs
    (Theil and Sen), which single peaks do not move."""
    times, values = (np.array(column, dtype=np.float64) for column in zip(*line, strict=True))
    points = len(times)
    assert points >= LEAST, f"{points} points are no line"
    some = np.unique(np.linspace(0, points - 1, MOST).round().astype(int))
    times, values = times[some], values[some]
    later, earlier = np.triu_indices(len(times), k=1)[::-1]
    slope = float(np.median((values[later] - values[earlier]) / (times[later] - times[earlier])))
    quarter = len(times) // 4
    first, last = float(np.median(values[:quarter])), float(np.median(values[-quarter:]))
    grown = max(last - first, slope * float(times[-1] - times[0]))
    return Trend(points, first, last, slope, grown / first)


def judge(samples: Iterable[Sample], warm_s: float, restart_s: float) -> list[Verdict]:
    """Of all processes. `warm_s`: age from which a life is judged by itself, if it then goes on for three times as long.
    `restart_s`: how long a life lasts that is ended again and again; it counts by its samples of the last third of that age."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.process, sample.pid), []).append(sample)
    found: list[Verdict] = []
    at_age: dict[str, list[tuple[float, float]]] = {}
    for (process, _), life in lives.items():
        warm = [sample for sample in life if sample.age_s >= warm_s]
        if len(warm) >= LEAST and warm[-1].age_s >= 4 * warm_s:
            found.append(_memory(process, "life", [(sample.t, sample.rss) for sample in warm]))
            found.append(_descriptors(process, [(sample.t, sample.fds) for sample in warm]))
        if same := [sample for sample in life if 2 * restart_s / 3 <= sample.age_s <= restart_s]:
            at_age.setdefault(process, []).append((same[0].t, median(sample.rss for sample in same)))
    found += [_memory(process, "lives", points) for process, points in at_age.items() if len(points) >= LEAST]
    return sorted(found, key=lambda verdict: (verdict.process, verdict.what))


def unjudged(verdicts: list[Verdict], wanted: Iterable[tuple[str, str]]) -> list[str]:
    """What of `wanted` (process, what) no verdict is about: the soak was too short for it."""
    known = {(verdict.process, verdict.what) for verdict in verdicts}
    return [f"too little is known of {process}: {what}" for process, what in wanted if (process, what) not in known]


def _memory(process: str, what: str, points: list[tuple[float, float]]) -> Verdict:
    line = trend(points)
    return Verdict(process, what, line, f"grew by {line.growth:.1%}" if line.growth > GROWTH else "")


def _descriptors(process: str, points: list[tuple[float, float]]) -> Verdict:
    line = trend(points)
    more = line.growth * line.first
    return Verdict(process, "fds", line, f"{more:.0f} descriptors more" if more > GROWTH_FDS else "")


def table(verdicts: list[Verdict]) -> list[str]:
    """A line for each."""
    lines = [f"{'process':<14}{'what':<7}{'points':>7}{'first':>10}{'last':>10}{'slope an hour':>15}{'growth':>9}  verdict"]
    for verdict in verdicts:
        line = verdict.trend
        unit, digits, scale = ("", 0, 1) if verdict.what == "fds" else (" MiB", 1, 1 << 20)
        first, last = (f"{value / scale:.{digits}f}{unit}" for value in (line.first, line.last))
        slope = f"{line.slope * 3600 / scale:+.2f}{unit}"
        lines.append(
            f"{verdict.process:<14}{verdict.what:<7}{line.points:>7}{first:>10}{last:>10}{slope:>15}{line.growth:>+9.2%}"
            f"  {verdict.why or 'flat'}"
        )
    return lines
