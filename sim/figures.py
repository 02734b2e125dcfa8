"""Figures: what one simulated run comes to. Virtual seconds; percentiles are nearest-rank."""

from collections.abc import Iterable
from math import ceil, exp, log

from msgspec import Struct

RESOLUTION = 0.01  # of the histogram of gaps
_SCALE = 1 / log(1 + RESOLUTION)
_LEAST_S = 1e-9


class ClassFigures(Struct, frozen=True):
    """Of the requests that were submitted with one priority."""

    requests: int
    requests_parked: int
    ttft_p50_s: float
    ttft_p99_s: float
    longest_wait_s: float


class Figures(Struct, frozen=True):
    """`wait`: one pause, from the park until it runs again. `gap`: between two tokens of a stream. `idle_cells`: cells that
    nobody used, the average over the `pressed_s` in which somebody waited or was parked; `busy_cells`: used ones, over it all."""

    makespan_s: float  # first arrival to last end
    requests: int
    failed: int  # ended with an error
    cut_short: int  # ended with fewer tokens than wanted: pool or context was full
    output_tokens: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    longest_wait_s: float
    p99_wait_s: float
    mean_wait_s: float
    p99_gap_s: float
    longest_gap_s: float
    parks: dict[str, int]  # by kind
    park_reasons: dict[str, int]  # by mode and reason, where the scheduler says it
    requests_parked: int
    bytes_saved: int
    bytes_loaded: int
    cache_most_bytes: int
    tokens_recomputed: int
    tokens_found: int  # of prompts, by hash
    denials: int
    stalled: int
    idle_cells: float
    pressed_s: float
    busy_cells: float
    steps: int
    plans: int  # of the scheduler: fewer than steps where steps were played as one
    errors: dict[str, int]  # by code
    classes: dict[str, ClassFigures]  # by priority

    @property
    def all_parks(self) -> int:
        return sum(self.parks.values())


class Histogram:
    """Counts of seconds in bins of 1 %; bounded memory for any number of values."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.most = 0.0
        self._last = (-1.0, 0)

    def add(self, value: float, count: int = 1) -> None:
        if value != self._last[0]:
            self._last = (value, int(log(max(value, _LEAST_S)) * _SCALE // 1))
            if value > self.most:
                self.most = value
        number = self._last[1]
        self._bins[number] = self._bins.get(number, 0) + count

    def add_run(self, first: float, last: float, steps: int, count: int) -> None:
        """`count` values each of `steps` numbers that grow evenly from `first` to `last`."""
        if not count:
            return
        spread = abs(log(max(last, _LEAST_S) / max(first, _LEAST_S))) * _SCALE
        parts = min(steps, ceil(2 * spread) + 1)
        each, rest = divmod(steps, parts)
        width = (last - first) / parts
        for part in range(parts):
            self.add(first + width * (part + 0.5), (each + (part < rest)) * count)
        self.most = max(self.most, first, last)

    def percentile(self, percent: float) -> float:
        """The middle of the bin; 0 of nothing."""
        total = sum(self._bins.values())
        rank = ceil(total * percent / 100)
        for number in sorted(self._bins):
            rank -= self._bins[number]
            if rank <= 0:
                return min(self.most, exp((number + 0.5) / _SCALE))
        return 0.0


def percentile(values: Iterable[float], percent: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0
