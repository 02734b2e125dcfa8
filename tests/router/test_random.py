"""Random schedules: workers that die and return, slow and vanishing clients, cancels, lost connections. Safety only.

A fake worker draws token i of a stream as a hash of (seed, i), so every stream's full output is known: a token that is
missing, doubled or changed is a plain inequality. A failing seed prints how to repeat it.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

import router.request
from router.actions import ToClient
from router.keys import KeyLimits
from router.ledger import Ledger
from wire.codec import pack
from wire.messages import (
    Accepted,
    Cancel,
    Counters,
    Credit,
    Drain,
    Finished,
    Generate,
    Goodbye,
    Hello,
    HoldAnswer,
    Load,
    Message,
    Notice,
    Park,
    Ping,
    PoolCells,
    Rejected,
    Resume,
    Sampling,
    Slot,
    Submit,
    Tokens,
    Usage,
)

SLOTS, CONTEXT = 3, 400
WINDOW_BYTES = 2 << 10  # small, so that slow readers are blocked often
MAX_STREAM_MESSAGE_BYTES = 8 << 10


def token(seed: int, index: int) -> int:
    return hash((seed, index)) % 50_000


@dataclass
class Sequence:
    submit: Submit
    made: int
    held: set[str] = field(default_factory=set)
    parked: bool = False


class FakeWorker:
    """One life: what it was told waits in `inbox`, what it says waits in `outbox`, both in order and both lost with it."""

    def __init__(self, identity: bytes, rng: random.Random) -> None:
        self.identity, self.rng = identity, rng
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()
        self.sequences: dict[str, Sequence] = {}
        self.step = 0
        self.frozen = False
        name = identity.split(b"-")[0].decode()
        self.hello = Hello(name, 1, "m", "cpu", "f32", 2048, 16, SLOTS, CONTEXT, True)
        self.outbox.append(self.hello)

    def turn(self) -> None:
        """Take in the inbox, make some tokens, tell."""
        while self.inbox:
            self._take(self.inbox.popleft())
        batch = [seq for seq in self.sequences.values() if not seq.parked][:SLOTS]
        self.step += bool(batch)
        self._tell_load()
        for seq in batch:
            self._advance(seq)

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                request_id = message.generate.request_id
                assert request_id not in self.sequences, "submitted while the former try was alive"
                assert message.delivered == [token(message.generate.sampling.seed, i) for i in range(len(message.delivered))]
                self.sequences[request_id] = Sequence(message, len(message.delivered))
            case Cancel(request_id):
                if request_id in self.sequences:
                    self._finish(request_id, "cancelled")
            case Park(request_id, reason):
                if (seq := self.sequences.get(request_id)) is not None:
                    seq.held.add(reason)
                    self._park(seq)
            case Resume(request_id, reason):
                if (seq := self.sequences.get(request_id)) is not None:
                    seq.held.discard(reason)
                    if seq.parked and not seq.held:
                        seq.parked = False
                        self.outbox.append(Notice(request_id, "resumed", "explicit", usage=self._usage(seq)))
            case Ping() | Drain():
                self._tell_load()

    def _park(self, seq: Sequence) -> None:
        if not seq.parked:
            seq.parked = True
            self.outbox.append(Notice(seq.submit.generate.request_id, "parked", "explicit", usage=self._usage(seq)))

    def _advance(self, seq: Sequence) -> None:
        generate = seq.submit.generate
        count = min(self.rng.choice((0, 1, 1, 1, 3)), generate.max_tokens - seq.made)
        if self.rng.random() < 0.03:
            self._park(seq)
            if not seq.held:
                self.inbox.append(Resume(generate.request_id))
            return
        if count:
            new = [token(generate.sampling.seed, seq.made + i) for i in range(count)]
            self.outbox.append(Tokens(generate.request_id, seq.made, new))
            seq.made += count
        if seq.made >= generate.max_tokens:
            self._finish(generate.request_id, "length")

    def _finish(self, request_id: str, reason: str) -> None:
        seq = self.sequences.pop(request_id)
        self._tell_load()
        self.outbox.append(Finished(request_id, reason, self._usage(seq)))

    def _usage(self, seq: Sequence) -> Usage:
        return Usage(len(seq.submit.generate.prompt_token_ids), seq.made)

    def _tell_load(self) -> None:
        slots = [Slot(i, name, "parked" if seq.parked else "running") for i, (name, seq) in enumerate(self.sequences.items())]
        parked = sum(seq.parked for seq in self.sequences.values())
        cells = PoolCells(free=self.rng.randrange(2048))
        self.outbox.append(Load(self.step, cells, 0, len(slots) - parked, parked, slots, Counters(), True))


@dataclass
class FakeClient:
    """Knows the whole output of each of its streams beforehand, and reads as fast as it likes."""

    name: bytes
    pace: float  # chance to read, each turn
    inbox: deque[tuple[Message, int]] = field(default_factory=deque)
    got: dict[str, list[int]] = field(default_factory=dict)
    asked: dict[str, Generate] = field(default_factory=dict)
    last: dict[str, Finished | Rejected] = field(default_factory=dict)
    consumed: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    holds: dict[int, HoldAnswer | None] = field(default_factory=dict)  # answers to its parks and resumes
    gone: bool = False

    def read(self) -> list[Message]:
        """Take in everything; the credits to send."""
        touched = set()
        while self.inbox:
            message, nbytes = self.inbox.popleft()
            if isinstance(message, HoldAnswer):
                assert self.holds[message.ask] is None, f"{message} after {self.holds[message.ask]}"
                self.holds[message.ask] = message
                continue
            request_id = message.request_id
            assert request_id not in self.last, f"{message} after the last word"
            self.consumed[request_id] += nbytes
            touched.add(request_id)
            match message:
                case Tokens(offset=offset, tokens=tokens):
                    got = self.got[request_id]
                    assert offset == len(got), f"{request_id}: offset {offset} after {len(got)} tokens"
                    seed = self.asked[request_id].sampling.seed
                    assert tokens == [token(seed, offset + i) for i in range(len(tokens))]
                    got += tokens
                case Finished() | Rejected():
                    self.last[request_id] = message
                case Accepted() | Notice():
                    pass
        return [Credit(request_id, self.consumed[request_id]) for request_id in touched if request_id not in self.last]


class World:
    """Everything around one ledger, and the dice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.keys = random.Random(f"keys {seed}")  # dice of their own
        self.limits = KeyLimits(self.keys.choice((0, 5)), self.keys.choice((0, 200)), self.keys.choice((0, 10, 50)))
        self.ledger = Ledger(self.rng.choice((5, 50)), lambda: self.rng.getrandbits(63), self.limits)
        self.clients: list[FakeClient] = []
        self.workers: dict[str, FakeWorker | None] = {f"cpu{i}": None for i in range(self.rng.choice((1, 2, 3)))}
        self.lives = self.requests = self.asks = 0
        self.lost_workers: set[bytes] = set()

    # doing ----------------------------------------------------------------------------------------------------------------
    def act(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, ToClient):
                client = next(client for client in self.clients if client.name == action.client)
                if client.gone:
                    self.act(self.ledger.client_lost(client.name, self.now))
                elif not action.probe:
                    client.inbox.append((action.message, len(action.payload)))
            else:
                worker = self.living(action.worker)
                if worker is None:
                    self.act(self.ledger.worker_lost(action.worker, self.now))
                elif not action.probe:
                    worker.inbox.append(action.message)

    def living(self, identity: bytes) -> FakeWorker | None:
        return next((w for w in self.workers.values() if w is not None and w.identity == identity), None)

    def ask(self) -> None:
        client = self.rng.choice([client for client in self.clients if not client.gone])
        self.requests += 1
        request_id = f"r{self.requests}"
        length = self.rng.choice((1, 5, 30, 300))
        sampling = Sampling(seed=self.rng.choice((None, self.requests)) or self.requests)
        generate = Generate(
            request_id, list(range(self.rng.randrange(1, 50))), max_tokens=length, sampling=sampling,
            priority=self.rng.choice((0, 0, 0, -1, 5)), key=self.keys.choice(("", "a", "b")),
        )  # fmt: skip
        client.asked[request_id] = generate
        client.got[request_id] = []
        client.consumed[request_id] = 0
        self.act(self.ledger.from_client(client.name, generate, self.now))

    def meddle(self) -> None:
        """Cancel, park or resume something, by anybody."""
        client = self.rng.choice(self.clients)
        alive = [request_id for request_id in client.asked if request_id not in client.last]
        if not alive or client.gone:
            return
        request_id = self.rng.choice(alive)
        meddler = self.rng.choice([client for client in self.clients if not client.gone])
        self.asks += 1
        message = self.rng.choice(
            (
                Cancel(request_id),
                Park(request_id, deadline_s=self.rng.choice((0.1, 5, 300)), ask=self.asks),
                Resume(request_id, ask=self.asks),
                Resume(request_id, ask=self.asks),
            )
        )
        if isinstance(message, Cancel):
            client.cancelled.add(request_id)
        else:
            meddler.holds[message.ask] = None
        self.act(self.ledger.from_client(meddler.name, message, self.now))

    def fate(self) -> None:
        """Something happens to a worker or a client."""
        name = self.rng.choice(list(self.workers))
        worker = self.workers[name]
        match self.rng.randrange(6):
            case 0 if worker is not None:
                self.workers[name] = None  # killed: what was under way is gone; the ledger finds out by itself
            case 1 if worker is not None:
                worker.frozen = not worker.frozen
            case 2 if worker is not None:
                worker.outbox.clear()  # the connection broke: messages of both directions are gone
                worker.outbox.append(worker.hello)  # said again when it hears nothing
                if self.rng.random() < 0.5:
                    worker.inbox.clear()
                    self.act(self.ledger.worker_lost(worker.identity, self.now))
            case 3 if worker is not None and not worker.frozen:
                self.act(self.ledger.from_worker(worker.identity, Goodbye(), self.now))
                self.workers[name] = None
            case 4:
                self.restart(name)
            case 5 if len([client for client in self.clients if not client.gone]) > 1:
                self.rng.choice(self.clients).gone = True

    def restart(self, name: str) -> None:
        self.lives += 1
        self.workers[name] = FakeWorker(f"{name}-{self.lives}-x".encode(), self.rng)

    def turn(self) -> None:
        """Time passes, workers work, some messages arrive, clients read."""
        self.now += 0.1
        for worker in [w for w in self.workers.values() if w is not None and not w.frozen]:
            worker.turn()
            for _ in range(min(len(worker.outbox), self.rng.choice((0, 2, 1000)))):
                self.act(self.ledger.from_worker(worker.identity, worker.outbox.popleft(), self.now))
        for client in self.clients:
            if not client.gone and self.rng.random() < client.pace:
                for credit in client.read():
                    self.act(self.ledger.from_client(client.name, credit, self.now))
        self.act(self.ledger.tick(self.now))
        self.check_memory()
        self.check_keys()

    # checking -------------------------------------------------------------------------------------------------------------
    def check_memory(self) -> None:
        """What a client has not taken in is bounded, and so is the queue."""
        for request in self.ledger.requests.values():
            assert request.sent_bytes - request.consumed_bytes < WINDOW_BYTES + MAX_STREAM_MESSAGE_BYTES
            assert request.sent_bytes >= request.consumed_bytes
            assert len(request.tokens) <= request.generate.max_tokens
        assert self.ledger._queue.fresh <= self.ledger.max_queued
        for client in self.clients:
            waiting = sum(nbytes for message, nbytes in client.inbox if not isinstance(message, HoldAnswer))
            assert waiting <= len(client.asked) * (WINDOW_BYTES + MAX_STREAM_MESSAGE_BYTES)

    def check_keys(self) -> None:
        """No key has more than its limits."""
        pool = sum(worker.hello.pool_cells for worker in self.ledger.fleet.workers.values() if not worker.lost)
        for key in "ab":
            own = [request for request in self.ledger.requests.values() if request.generate.key == key]
            assert not self.limits.requests or len(own) <= self.limits.requests
            live = [r for r in own if not r.is_paused and not r.cancelled and r.finished is None]
            if self.limits.cells and pool and len(live) > 1:
                assert sum(request.cells for request in live) <= pool * self.limits.cells // 100

    def check_end(self) -> None:
        for client in (client for client in self.clients if not client.gone):
            assert all(client.holds.values()), f"unanswered: {client.holds}"
            for request_id, generate in client.asked.items():
                last = client.last.get(request_id)
                assert last is not None, f"{request_id} never ended"
                match last:
                    case Rejected(code=code):
                        assert code in ("queue_full", "key_limit")[: 1 + bool(generate.key)] and not client.got[request_id]
                    case Finished(reason="length"):
                        assert len(client.got[request_id]) == generate.max_tokens
                    case Finished(reason="cancelled"):
                        assert request_id in client.cancelled
                    case Finished(reason="error", code=code):
                        assert code in ("slow_client", "worker_lost")
                    case _:
                        raise AssertionError(last)
        ledger = self.ledger
        assert not ledger.requests and not len(ledger._queue) and not ledger._delivery.blocked
        assert (ledger._queue.fresh, ledger._queue.fresh_tokens) == (0, 0)
        assert not ledger._delivery._by_client and not ledger._delivery._sent_at
        assert (ledger.queued, ledger.fleet.running, ledger.parked) == (0, 0, 0)
        assert all(not worker.assigned and not worker.stale for worker in ledger.fleet.workers.values())
        assert not ledger._holds._until and not ledger._holds._asked


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(router.request, "WINDOW_BYTES", WINDOW_BYTES)


def run_schedule(seed: int, turns: int = 250) -> World:
    """One schedule: trouble for `turns`, then peace until everything has ended."""
    world = World(seed)
    rng = world.rng
    for number in range(rng.choice((1, 3, 6))):
        world.clients.append(FakeClient(f"c{number}".encode(), rng.choice((1.0, 0.3, 0.03, 0.0005))))
    trouble = rng.choice((0.02, 0.1, 0.3))
    for _ in range(turns):
        if rng.random() < 0.3:
            world.ask()
        if rng.random() < 0.1:
            world.meddle()
        if rng.random() < trouble:
            world.fate()
        world.turn()
    for _ in range(rng.choice((0, 0, 700))):  # long enough for a client that reads nothing to be given up
        world.turn()
    for client in world.clients:
        client.pace = 1.0
    for name, worker in world.workers.items():
        if worker is None or worker.frozen:
            world.restart(name)
    for turn in range(6000):
        if not world.ledger.requests and turn > 160:  # until stale ids are forgotten, too
            break
        world.turn()
    for client in world.clients:
        if not client.gone:
            client.read()
    world.check_end()
    return world


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_random_schedules_lose_nothing_and_double_nothing(first):
    for seed in range(first, first + 25):
        try:
            run_schedule(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\nrepeat: python -m tests.router.test_random {seed}") from error


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_more_random_schedules(first):
    for seed in range(first, first + 100):
        try:
            run_schedule(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\nrepeat: python -m tests.router.test_random {seed}") from error


def test_the_schedules_reach_the_interesting_places():
    """Otherwise they would prove nothing."""
    replays = parks = lost = slow = held = refused = 0
    for seed in range(100, 125):
        world = run_schedule(seed)
        totals = world.ledger.totals
        replays += totals.replays
        lost += totals.workers_lost
        parks += sum(totals.parked_s.counts)
        slow += sum(isinstance(m, Finished) and m.code == "slow_client" for c in world.clients for m in c.last.values())
        answers = [answer for client in world.clients for answer in client.holds.values() if answer is not None]
        held += sum(not answer.code for answer in answers)
        refused += sum(bool(answer.code) for answer in answers)
    assert replays > 100 and lost > 50 and parks > 100 and slow > 0 and held > 50 and refused > 50
    assert len(pack(Tokens("r" * 64, 2**31, [2**31] * 1024))) < MAX_STREAM_MESSAGE_BYTES


if __name__ == "__main__":
    import sys

    router.request.WINDOW_BYTES = WINDOW_BYTES
    run_schedule(int(sys.argv[1]))
