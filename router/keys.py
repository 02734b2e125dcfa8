"""Limits of each API key: its requests, the prompt tokens of them that wait, and its share of the cells. PURE.

A key is known by its name (`Generate.key`). Requests without one, as an operator's over ZeroMQ, have no limits.
"""

from collections import defaultdict

from msgspec import Struct

from router.actions import Action, ToWorker
from router.fleet import Fleet
from router.request import Request
from wire.messages import Generate, Park, Rejected, Resume


class KeyLimits(Struct, frozen=True):
    """What one key may have at once; 0: no limit. `cells` is in percent of the pool."""

    requests: int = 0
    queued_tokens: int = 0
    cells: int = 0


NO_LIMITS = KeyLimits()


class Keys:
    """Looks into `requests` and `fleet`, the ledger's own, and appends to `out`, its list of actions."""

    def __init__(self, limits: KeyLimits, requests: dict[str, Request], fleet: Fleet, out: list[Action]) -> None:
        self._limits = limits
        self._requests = requests
        self._fleet = fleet
        self._out = out

    def refusal(self, generate: Generate, may_start: bool) -> Rejected | None:
        """Why its key may not have this request too, with the numbers, or None. `may_start`: it would not have to wait."""
        limits = self._limits
        if not generate.key or not (limits.requests or limits.queued_tokens):
            return None
        own = [request for request in self._requests.values() if request.generate.key == generate.key]
        first = generate.sibling_of  # of several choices of one answer
        siblings = [request for request in own if first and first in (request.request_id, request.generate.sibling_of)]
        if limits.requests and len(siblings) >= limits.requests:  # to come again would not help
            why = f"this asks for more streams at once than the {limits.requests} of --key-requests"
            return Rejected(generate.request_id, "bad_request", why, {"key_requests": limits.requests})
        if limits.requests and len(own) >= limits.requests:
            why = f"this API key has {len(own)} requests at work already, --key-requests is {limits.requests}"
            return Rejected(generate.request_id, "key_limit", why, {"requests": len(own), "key_requests": limits.requests})
        waiting = sum(request.prompt_tokens for request in own if not request.started)
        if limits.queued_tokens and not may_start and waiting + len(generate.prompt_token_ids) > limits.queued_tokens:
            why = f"{waiting} prompt tokens of this API key are waiting already, --key-queued-tokens is {limits.queued_tokens}"
            numbers = {"queued_tokens": waiting, "key_queued_tokens": limits.queued_tokens}
            return Rejected(generate.request_id, "key_limit", why, numbers)
        return None

    def has_room(self, generate: Generate) -> bool:
        """Whether the share of its key leaves room for this request beside those that are there."""
        if not self._limits.cells or not generate.key or not (pool := self._fleet.pool_cells()):
            return True
        cells = [r.cells for r in self._requests.values() if r.generate.key == generate.key and _wants_cells(r)]
        return not cells or sum(cells) + len(generate.prompt_token_ids) + 1 <= pool * self._limits.cells // 100

    def share(self) -> None:
        """Set aside what goes beyond its key's share of the cells, and let come back what no longer does. Those of its best class
        that came first have the share, and nobody passes them; the very first always goes, however long it is."""
        if not self._limits.cells or not (pool := self._fleet.pool_cells()):
            return
        of_key: dict[str, list[Request]] = defaultdict(list)
        for request in self._requests.values():
            if request.generate.key and _wants_cells(request):
                of_key[request.generate.key].append(request)
        for own in of_key.values():
            self._share_out(own, pool * self._limits.cells // 100)

    def _share_out(self, own: list[Request], share_cells: int) -> None:
        cells = 0
        for request in sorted(own, key=lambda request: (request.generate.priority, request.arrival)):
            goes = not cells or cells + request.cells <= share_cells
            cells += request.cells
            if request.share_held == goes:
                request.share_held = not goes
                if request.worker is not None:
                    self._out.append(ToWorker(request.worker, (Resume if goes else Park)(request.request_id, "share")))


def _wants_cells(request: Request) -> bool:
    """It runs, or would; who is set aside for another reason, or only waits for its client to read, does not."""
    return not (request.held or request.credit_held or request.cancelled or request.finished is not None)
