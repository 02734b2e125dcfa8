"""Explicit parks: who is set aside until when, and who waits to hear that a request has left the batch. PURE.

A hold is the router's: it outlives the worker that has the request. Each Park and Resume of a client gets one HoldAnswer.
"""

from router.actions import Action, ToClient, ToWorker
from router.fleet import Fleet
from router.request import Request
from wire.codec import pack
from wire.messages import HoldAnswer, Park, Resume


def unknown(message: Park | Resume) -> HoldAnswer:
    """The answer where nobody has that id, or not this client."""
    return HoldAnswer(message.request_id, "unknown_request", "no living request has this id", ask=message.ask)


class Holds:
    """Appends to `out`, the ledger's list of actions. `requests` and `fleet` are the ledger's own, to be looked into."""

    def __init__(self, requests: dict[str, Request], fleet: Fleet, out: list[Action]) -> None:
        self._requests = requests
        self._fleet = fleet
        self._out = out
        self._until: dict[str, float] = {}  # id of each held request -> when it comes back by itself
        self._asked: dict[str, tuple[bytes, int]] = {}  # id -> (client, ask) of its Park that is not answered yet
        self._closed = False

    def heard(self, client: bytes, message: Park | Resume, now: float) -> None:
        """What a client says. Whatever `reason` it gives: only we park for want of credit."""
        request = self._requests.get(message.request_id)
        if request is None:
            self._answer(client, unknown(message))
        elif isinstance(message, Park):
            self._park(request, client, message, now)
        else:
            self._resume(request, client, message.ask)

    def release(self, request: Request) -> None:
        """It may come back. Who still waits for its park is told that there was none."""
        request.held = False
        del self._until[request.request_id]
        self._to_worker(request, Resume(request.request_id))
        self._refuse_asker(request, "the request was resumed before it had left the batch")

    def left_batch(self, request: Request) -> None:
        """It is parked, or in no worker: if a Park waits for that, answer it."""
        if (asker := self._asked.pop(request.request_id, None)) is not None:
            client, ask = asker
            self._answer(client, HoldAnswer(request.request_id, slot=self._fleet.slot_of(request), ask=ask))

    def ended(self, request: Request) -> None:
        """Its last word is known."""
        self._until.pop(request.request_id, None)
        self._refuse_asker(request, "the request ended before it could be parked")

    def overdue(self, now: float) -> list[Request]:
        """Those that were set aside for long enough."""
        return [self._requests[request_id] for request_id, until in self._until.items() if now >= until]

    def close(self) -> None:
        """The server is stopping: all come back, so that they can end, and nobody is set aside any more."""
        self._closed = True
        for request_id in list(self._until):
            self.release(self._requests[request_id])

    def _park(self, request: Request, client: bytes, park: Park, now: float) -> None:
        """Set it aside. The answer is said when it has left the batch; at once if it is not in it, or may not be set aside."""
        if why := self._no_park(request):
            self._conflict(client, request, park.ask, why)
            return
        request.held = True
        self._until[request.request_id] = now + park.deadline_s
        self._asked[request.request_id] = (client, park.ask)
        self._to_worker(request, Park(request.request_id))
        if not self._fleet.in_batch(request):
            self.left_batch(request)

    def _no_park(self, request: Request) -> str:
        """Why it may not be set aside, or nothing."""
        if why := self._ending(request):
            return why
        if request.held:
            return "the request is set aside already"
        return "the server is stopping" if self._closed else ""

    def _ending(self, request: Request) -> str:
        """Why nothing can be done with it: it only waits for its last word, or for its client to read that. Or nothing."""
        return "the request is ending" if request.cancelled or request.finished is not None else ""

    def _resume(self, request: Request, client: bytes, ask: int) -> None:
        """Let it come back, and say so at once."""
        if why := self._ending(request):
            self._conflict(client, request, ask, why)
        elif request.held:
            self.release(request)
            self._answer(client, HoldAnswer(request.request_id, slot=self._fleet.slot_of(request), ask=ask))
        else:
            how = "" if request.parked_at is None else "; it is parked and comes back by itself as soon as it fits"
            self._conflict(client, request, ask, f"the request is not set aside{how}")

    def _refuse_asker(self, request: Request, why: str) -> None:
        if (asker := self._asked.pop(request.request_id, None)) is not None:
            client, ask = asker
            self._conflict(client, request, ask, why)

    def _conflict(self, client: bytes, request: Request, ask: int, why: str) -> None:
        self._answer(client, HoldAnswer(request.request_id, "conflict", why, self._fleet.slot_of(request), ask))

    def _answer(self, client: bytes, answer: HoldAnswer) -> None:
        self._out.append(ToClient(client, answer, pack(answer)))

    def _to_worker(self, request: Request, message: Park | Resume) -> None:
        if request.worker is not None:
            self._out.append(ToWorker(request.worker, message))
