"""The queue: requests that wait for a seat; replayed ones first, then by class and arrival. PURE."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from router.request import Request

PROMOTED_EACH_S = 30.0  # of waiting; as in the worker, or a worse class could wait here for ever and never get there
AGED_EACH_S = 1.0


class Queue:
    """`fresh` counts those that no worker has had yet, `fresh_tokens` the tokens of their prompts: only these are bounded."""

    def __init__(self) -> None:
        self.fresh = 0
        self.fresh_tokens = 0
        self._requests: list[Request] = []  # sorted by _order
        self._aged_at: float | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order; the queue may change meanwhile."""
        return iter(self._requests[:])

    def has_before(self, priority: int) -> bool:
        """Whether anybody in it comes before a new request of this class. Who is set aside lets everybody pass."""
        first = next((request for request in self._requests if not request.is_paused), None)
        return first is not None and _order(first)[:2] <= (True, priority)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)
        self._count(request, 1)

    def discard(self, request: Request) -> None:
        """Take it out, if it is in."""
        index = bisect_left(self._requests, _order(request), key=_order)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]
            self._count(request, -1)

    def age(self, now: float, living: Collection[Request]) -> None:
        """Promote those that have waited long by a class each 30 s, but never above the best that any of `living` was asked with.
        Who is set aside gains nothing. Does nothing more often than each second."""
        passed_s = 0.0 if self._aged_at is None else now - self._aged_at
        if self._aged_at is not None and passed_s < AGED_EACH_S:
            return
        self._aged_at = now
        best = min((request.generate.priority for request in living), default=0)
        for request in self._requests:
            if not request.is_paused:
                request.waited_s += passed_s
                rank = max(best, request.generate.priority - int(request.waited_s // PROMOTED_EACH_S))
                request.rank = min(request.rank, rank)
        self._requests.sort(key=_order)

    def _count(self, request: Request, by: int) -> None:
        if not request.started:
            self.fresh += by
            self.fresh_tokens += by * request.prompt_tokens


def _order(request: Request) -> tuple[bool, int, int]:
    return (not request.started, request.rank, request.arrival)
