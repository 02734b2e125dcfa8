"""The router's queue in virtual time: who is sent to the worker, and when. The rules are those of router/queue.py and fleet.py.

One is sent while fewer than `slots` of its class or a better one are at the worker and not parked. Best class first, then the
order of arrival; every 30 s of waiting count as a better class, up to the best that is there.
"""

from collections import Counter, deque
from math import inf

from msgspec import Struct

from gpu_worker.policy.preemption import PROMOTED_EACH_S
from sim.trace import Request

LEAST_S = 1e-6  # so that rounding cannot make it wait for nothing again and again

Text = tuple[tuple[int, int], ...]  # (marker, length): a marker that no other text has, then zeros


class Live(Struct):
    """A request from its arrival to its end."""

    request: Request
    number: int
    arrival_s: float
    text: Text
    rank: int = 0  # the class that it was sent with
    tokens: int = 0
    last_token_s: float = 0.0
    parked_since: float | None = None
    set_aside: bool = False  # parked, as far as the router has heard


class Dispatch:
    """`best`: the best class of the whole trace."""

    def __init__(self, slots: int, best: int) -> None:
        self._slots = slots
        self._best = best
        self._queue: dict[int, deque[Live]] = {}  # by class, those that wait here
        self._priorities: Counter[int] = Counter()  # of all that live
        self._seated: Counter[int] = Counter()  # at the worker and not parked, by rank

    @property
    def waiting(self) -> int:
        """Requests that were not sent so far."""
        return sum(map(len, self._queue.values()))

    @property
    def full(self) -> bool:
        """Nobody would be sent, whoever arrived."""
        return not self._has_seat(self._best)

    def add(self, live: Live) -> None:
        """It arrives."""
        self._priorities[live.request.priority] += 1
        self._queue.setdefault(live.request.priority, deque()).append(live)

    def next(self, now: float) -> Live | None:
        """The one to be sent now, if there is one; it has its seat with that."""
        first = min(
            (queue[0] for queue in self._queue.values()), key=lambda live: (self._rank(live, now), live.number), default=None
        )
        if first is None or not self._has_seat(rank := self._rank(first, now)):
            return None
        first.rank = rank
        self._seated[rank] += 1
        queue = self._queue[first.request.priority]
        queue.popleft()
        if not queue:
            del self._queue[first.request.priority]
        return first

    def wait_s(self, now: float) -> float:
        """Seconds until somebody who waits counts as a better class; inf: no such time."""
        if not self._queue or len(self._priorities) == 1:
            return inf
        waits = (PROMOTED_EACH_S - (now - queue[0].arrival_s) % PROMOTED_EACH_S for queue in self._queue.values())
        return max(LEAST_S, min(waits))

    def parked(self, live: Live) -> None:
        live.set_aside = True
        self._seated[live.rank] -= 1

    def runs_again(self, live: Live) -> None:
        """If it was parked."""
        if live.set_aside:
            live.set_aside = False
            self._seated[live.rank] += 1

    def ended(self, live: Live) -> None:
        self.runs_again(live)
        self._seated[live.rank] -= 1
        self._priorities[live.request.priority] -= 1
        if not self._priorities[live.request.priority]:
            del self._priorities[live.request.priority]

    def _rank(self, live: Live, now: float) -> int:
        priority = live.request.priority
        return max(min(self._priorities), priority - int((now - live.arrival_s) // PROMOTED_EACH_S))

    def _has_seat(self, rank: int) -> bool:
        return sum(count for other, count in self._seated.items() if other <= rank) < self._slots
