"""A stage for stories about the ledger: virtual time, and everything it has said, by listener."""

from collections import defaultdict

from router.actions import Action, ToClient
from router.keys import NO_LIMITS, KeyLimits
from router.ledger import Ledger
from wire.messages import (
    Counters,
    Finished,
    Generate,
    Hello,
    Load,
    Message,
    PoolCells,
    Sampling,
    Slot,
    Status,
    Submit,
    Tokens,
    Usage,
)

SEED = 42


class Scene:
    """Drives one ledger. `said[listener]` holds what it told a client or a worker; pings and probes are left out."""

    def __init__(self, max_queued: int = 100, limits: KeyLimits = NO_LIMITS) -> None:
        self.ledger = Ledger(max_queued, lambda: SEED, limits)
        self.now = 1000.0
        self.said: dict[bytes, list[Message]] = defaultdict(list)
        self.probes: dict[bytes, int] = defaultdict(int)
        self.steps: dict[bytes, int] = defaultdict(int)

    # what happens ---------------------------------------------------------------------------------------------------------
    def client(self, name: bytes, message: Message) -> list[Message]:
        return self._note(self.ledger.from_client(name, message, self.now))

    def worker(self, identity: bytes, message: Message) -> list[Message]:
        return self._note(self.ledger.from_worker(identity, message, self.now))

    def hello(self, identity: bytes = b"cpu0-1-a", *, slots: int = 8, cells: int = 2048, **fields: object) -> None:
        """A worker comes and tells its first load."""
        name = identity.split(b"-")[0].decode()
        fields = {"max_context": cells} | fields
        self.worker(identity, Hello(name, 1, "m", "cpu", "f32", cells, 16, slots, exact=True, **fields))
        self.load(identity, cells=PoolCells(free=cells), running=0)

    def load(
        self,
        identity: bytes = b"cpu0-1-a",
        *,
        cells: PoolCells | None = None,
        waiting: int = 0,
        running: int | None = None,
        lists: list[str] | None = None,
        slots: list[Slot] | None = None,
        stuck: bool = False,
        counters: Counters | None = None,
    ) -> None:
        """A heartbeat. By default it lists all that the ledger has given to this worker, and its step has moved."""
        worker = self.ledger.fleet.workers.get(identity)
        if lists is None:
            lists = [*worker.assigned, *worker.stale] if worker is not None else []
        slots = slots or [Slot(number, request_id, "running") for number, request_id in enumerate(lists)]
        self.steps[identity] += not stuck
        running = len(lists) if running is None else running
        cells = cells or PoolCells(free=2048)
        self.worker(identity, Load(self.steps[identity], cells, waiting, running, 0, slots, counters or Counters(), True))

    def tokens(self, request_id: str, offset: int, tokens: list[int], identity: bytes = b"cpu0-1-a") -> None:
        self.worker(identity, Tokens(request_id, offset, tokens))

    def finished(self, request_id: str, reason: str = "length", identity: bytes = b"cpu0-1-a", completion: int = 0) -> None:
        self.worker(identity, Finished(request_id, reason, Usage(3, completion)))

    def ask(self, request_id: str, client: bytes = b"ann", prompt: int = 3, **fields: object) -> list[Message]:
        return self.client(client, Generate(request_id, list(range(prompt)), sampling=Sampling(seed=SEED), **fields))

    def lose_client(self, name: bytes) -> None:
        self._note(self.ledger.client_lost(name, self.now))

    def lose_worker(self, identity: bytes = b"cpu0-1-a") -> None:
        self._note(self.ledger.worker_lost(identity, self.now))

    def drain(self, drain_s: float) -> None:
        self._note(self.ledger.drain(self.now, drain_s))

    def abort(self) -> None:
        self._note(self.ledger.abort(self.now))

    def wait(self, seconds: float, *, alive: tuple[bytes, ...] = (b"cpu0-1-a",)) -> None:
        """Time passes in ticks; the workers named in `alive` tell their load all the while."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for identity in alive:
                if identity in self.ledger.fleet.workers:
                    self.load(identity)
            self._note(self.ledger.tick(self.now))

    def stall(self, seconds: float) -> None:
        """The router itself stands still, then ticks once."""
        self.now += seconds
        self._note(self.ledger.tick(self.now))

    # what was said --------------------------------------------------------------------------------------------------------
    def heard(self, listener: bytes, *kinds: type) -> list[Message]:
        """What a listener was told since the last look, of these kinds (default: all)."""
        messages, self.said[listener] = self.said[listener], []
        return [message for message in messages if not kinds or isinstance(message, kinds)]

    def delivered(self, listener: bytes, request_id: str) -> list[int]:
        """All tokens of a stream since the last look; their offsets must follow one another."""
        tokens: list[int] = []
        start = None
        for message in self.heard(listener, Tokens):
            if message.request_id == request_id:
                start = message.offset if start is None else start
                assert message.offset == start + len(tokens), f"offset {message.offset} after {start + len(tokens)} tokens"
                tokens += message.tokens
        return tokens

    def submits(self, identity: bytes = b"cpu0-1-a") -> list[Submit]:
        return self.heard(identity, Submit)

    def submitted_ids(self, identity: bytes = b"cpu0-1-a") -> list[str]:
        return [submit.generate.request_id for submit in self.submits(identity)]

    def assert_empty(self) -> None:
        """Nothing is left in any book of the ledger."""
        ledger = self.ledger
        assert not ledger.requests
        assert (ledger.queued, ledger.fleet.running, ledger.parked) == (0, 0, 0)
        assert (ledger._queue.fresh, ledger._queue.fresh_tokens, len(ledger._queue)) == (0, 0, 0)
        assert not ledger._delivery.blocked
        assert not ledger._delivery._by_client
        assert not ledger._delivery._sent_at
        assert not ledger._holds._until
        assert not ledger._holds._asked
        for worker in ledger.fleet.workers.values():
            assert not worker.assigned
            assert not worker.starting
            assert not worker.unseen

    def _note(self, actions: list[Action]) -> list[Message]:
        for action in actions:
            listener = action.client if isinstance(action, ToClient) else action.worker
            if action.probe:
                self.probes[listener] += 1
            else:
                assert not isinstance(action.message, Status)
                self.said[listener].append(action.message)
        return [action.message for action in actions if not action.probe]
