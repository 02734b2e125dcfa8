"""What goes to clients: whose stream it is, how much each may be sent, and whether they are still there. PURE."""

from router.actions import Action, ToClient
from router.request import Request
from wire.codec import pack
from wire.messages import Message, Rejected

PROBE_S = 1.0  # a client of whose streams nothing was sent for so long is looked after


class Delivery:
    """Appends to `out`, the ledger's list of actions."""

    def __init__(self, out: list[Action]) -> None:
        self.out = out
        self.blocked: dict[str, Request] = {}  # streams in which something waits for credit
        self._by_client: dict[bytes, dict[str, Request]] = {}  # no client without requests
        self._sent_at: dict[bytes, float] = {}
        self._probed_at = float("-inf")

    def add(self, request: Request) -> None:
        self._by_client.setdefault(request.client, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        self.blocked.pop(request.request_id, None)
        of_client = self._by_client[request.client]
        del of_client[request.request_id]
        if not of_client:
            del self._by_client[request.client]
            self._sent_at.pop(request.client, None)

    def of_client(self, client: bytes) -> list[Request]:
        return list(self._by_client.get(client, {}).values())

    def reject(self, client: bytes, rejected: Rejected) -> None:
        self.out.append(ToClient(client, rejected, pack(rejected)))

    def send(self, request: Request, message: Message, now: float) -> None:
        """A message of a stream, charged to its window."""
        self.out.append(ToClient(request.client, message, request.encode(message)))
        self._sent_at[request.client] = now

    def flush(self, request: Request, now: float) -> bool:
        """Send what waits, as far as credit goes; whether nothing waits any more."""
        while (waits := request.waits) and request.has_credit:
            self.send(request, request.next_chunk(), now)
        # a stream that we had parked stays under watch until credit lets it go on, even if nothing waits just now
        if waits or (request.credit_held and not request.has_credit):
            if request.blocked_at is None:
                request.blocked_at = now
                self.blocked[request.request_id] = request
        elif request.blocked_at is not None:
            request.blocked_at = None
            del self.blocked[request.request_id]
        return not waits

    def credit(self, request: Request, consumed_bytes: int, now: float) -> bool:
        """The client has taken in so much of the stream since its start; whether that is news."""
        consumed_bytes = min(consumed_bytes, request.sent_bytes)
        if consumed_bytes <= request.consumed_bytes:
            return False
        request.consumed_bytes = consumed_bytes
        if request.blocked_at is not None:
            request.blocked_at = now  # it reads, if only slowly
        return True

    def forgive(self, stall_s: float) -> None:
        """We stood still for so long; nobody could send us credit."""
        for request in self.blocked.values():
            if request.blocked_at is not None:
                request.blocked_at += stall_s

    def probe_quiet(self, now: float) -> None:
        """Say something to clients that wait for a queued or parked stream: sends to a vanished one fail."""
        if now - self._probed_at >= PROBE_S:
            self._probed_at = now
            self.probe([client for client, sent_at in self._sent_at.items() if now - sent_at >= PROBE_S], now)

    def probe_all(self, now: float) -> None:
        self.probe(list(self._by_client), now)

    def probe(self, clients: list[bytes], now: float) -> None:
        for client in clients:
            message = next(iter(self._by_client[client].values())).probe()
            self.out.append(ToClient(client, message, pack(message), probe=True))
            self._sent_at[client] = now
