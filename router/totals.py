"""What the router counts: histograms, totals, and the workers' counters added up over their lives. PURE."""

import copy
from bisect import bisect_left
from collections import Counter
from itertools import zip_longest

from msgspec import Struct

from wire.messages import Counters

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PARKED_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts of observations in buckets; `bounds` are their upper ends, one more bucket has none."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper end, observations up to it), as Prometheus wants them."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class WorkerTotals(Struct):
    """Sums over workers and their lives, of what Counters has."""

    preempt: Counter[str]
    denied: Counter[str]
    parks: Counter[str]
    stalled: int = 0
    damaged: int = 0
    resumed: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    drafted: list[int] = []  # by position
    accepted: list[int] = []

    def add(self, counters: Counters) -> None:
        self.preempt.update(counters.preempt)
        self.denied.update(counters.denied)
        self.parks.update(counters.parks)
        self.stalled += counters.stalled
        self.damaged += counters.damaged
        self.resumed += counters.resumed
        self.recomputed_tokens += counters.recomputed_tokens
        self.steps += counters.steps
        self.prefill_tokens += counters.prefill_tokens
        self.drafted = _added(self.drafted, counters.drafted)
        self.accepted = _added(self.accepted, counters.accepted)


def _added(one: list[int], other: list[int]) -> list[int]:
    """Sums place by place; the shorter one has 0 behind its end."""
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


class Totals:
    """Everything that only grows, since the router's start."""

    def __init__(self) -> None:
        self.tokens_generated = 0
        self.prompt_tokens = 0
        self.accepted = 0
        self.replays = 0
        self.workers_lost = 0
        self.finished: Counter[str] = Counter()  # by reason
        self.rejected: Counter[str] = Counter()  # by code
        self.bad_messages: Counter[str] = Counter()  # by who sent them: client or worker
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.gap_s = Histogram(GAP_S)
        self.parked_s = Histogram(PARKED_S)
        self._former = WorkerTotals(Counter(), Counter(), Counter())  # of lives that have ended
        self._latest: dict[bytes, Counters] = {}  # by worker identity

    def tokens(self, new: int, gap_s: float, first: bool) -> None:
        """New tokens of a stream, so long after its arrival (`first`) or after those before."""
        self.tokens_generated += new
        (self.first_token_s if first else self.gap_s).observe(gap_s)

    def heard(self, worker: bytes, counters: Counters) -> None:
        """The newest counters of one life of a worker; they only grow while it lives."""
        self._latest[worker] = counters

    def ended(self, worker: bytes) -> None:
        """This life says nothing more; what it counted stays counted."""
        if (counters := self._latest.pop(worker, None)) is not None:
            self._former.add(counters)

    def workers(self) -> WorkerTotals:
        """The sums, former lives included."""
        total = copy.deepcopy(self._former)
        for counters in self._latest.values():
            total.add(counters)
        return total
