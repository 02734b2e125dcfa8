"""What the router knows about its workers: who lives, who makes progress, who has room. PURE."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from router.request import Request
from wire.messages import Hello, Load, PoolCells, Slot

SUSPECT_S = 2.0  # without progress while it has work: it gets no new work
LOST_S = 10.0  # without progress: its requests go elsewhere
LOST_GAPS = 20  # the same, in its own longest usual gaps
LOST_MAX_S = 300.0
GAP_DECAY = 0.995  # a Load: one slow step is forgotten after some hundred heartbeats
GAP_MAX_S = 60.0  # more than that was no step, but a stopped process
UNSEEN_S = 5.0  # a request that its worker does not list for so long is not there
STALE_S = 10.0  # an id that we took away and that the worker no longer lists
MAX_GONE = 1000


@dataclass(slots=True, eq=False)
class Worker:
    """One life of a worker. `stale` holds ids that we took away from it and whose Finished it has not said yet: they take
    seats, whatever it says about them is dropped, and they may not come back to it before."""

    identity: bytes
    hello: Hello
    progress_at: float
    load: Load | None = None
    longest_gap_s: float = 0.0
    lost: bool = False
    assigned: dict[str, Request] = field(default_factory=dict)
    stale: dict[str, float] = field(default_factory=dict)  # id -> when it was taken away
    starting: dict[str, int] = field(default_factory=dict)  # id -> cells; assigned, and not yet seen in a Load
    unseen: dict[str, float] = field(default_factory=dict)  # id -> since when it is assigned and neither listed nor waiting

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def cells(self) -> PoolCells:
        return self.load.cells if self.load is not None else PoolCells(free=self.hello.pool_cells)

    @property
    def free_cells(self) -> int:
        """What the next request could get: free and reusable ones, less what is on its way."""
        return self.cells.free + self.cells.reusable - sum(self.starting.values())

    @property
    def busy(self) -> int:
        """Seats of the batch that are taken, or will be."""
        return sum(map(self._wants_seat, self.assigned.values())) + len(self.stale)

    def has_seat(self, rank: int) -> bool:
        """Whether one more of this class may be given to it. It parks a worse class for it, so that counts for nothing."""
        before = [request for request in self.assigned.values() if request.rank <= rank]
        return sum(map(self._wants_seat, before)) + len(self.stale) < self.hello.slots

    def _wants_seat(self, request: Request) -> bool:
        """Neither parked nor set aside before it ever ran."""
        return request.parked_at is None and not (request.is_paused and not self.has_begun(request))

    def has_begun(self, request: Request) -> bool:
        """Whether one of its requests has a seat, as far as is known."""
        return request.begun or request.request_id not in self.starting

    def slot_of(self, request: Request) -> Slot | None:
        """Its line of the newest list, if it is there."""
        slots = self.load.slots if self.load is not None else []
        return next((slot for slot in slots if slot.request_id == request.request_id), None)

    @property
    def waiting(self) -> int:
        """Of its requests, those that wait in it for their first step."""
        return min(self.load.waiting, len(self.starting)) if self.load is not None else 0

    @property
    def running(self) -> int:
        return sum(request.parked_at is None for request in self.assigned.values()) - self.waiting

    @property
    def lost_s(self) -> float:
        """How long it may make no progress."""
        return min(LOST_MAX_S, max(LOST_S, LOST_GAPS * self.longest_gap_s))

    def has_work(self) -> bool:
        return bool(self.assigned or self.stale)

    def is_alive(self, now: float) -> bool:
        """It answers, and if it has something to run, its steps go on."""
        return not self.lost and now - self.progress_at < self.lost_s

    def takes_work(self, now: float) -> bool:
        """Whether it may be given anything now. Who has a seat there is another question."""
        if self.lost:
            return False
        if self.has_work() and now - self.progress_at >= SUSPECT_S:
            return False
        return not any(request.is_suspect and request.parked_at is None for request in self.assigned.values())

    def may_take(self, request: Request) -> bool:
        """Whether it has the size for it, is through with a former try of it, and alone if that is wise."""
        if request.prompt_tokens + 1 > self.hello.max_context or request.request_id in self.stale:
            return False
        return not request.is_suspect or self.busy == 0

    def heard(self, load: Load, now: float) -> list[str]:
        """Take in a heartbeat; ids that it runs and should not, and so must be cancelled there."""
        moved = self.load is None or load.step != self.load.step or load.running == 0
        self.load = load
        if moved:
            self.longest_gap_s = max(min(now - self.progress_at, GAP_MAX_S), self.longest_gap_s * GAP_DECAY)
            self.progress_at = now
        listed = {slot.request_id for slot in load.slots if slot.request_id}
        for request_id in self.starting.keys() & listed:
            del self.starting[request_id]
        self._note_unseen(listed, now)
        for request_id in [i for i, at in self.stale.items() if i not in listed and now - at > STALE_S]:
            del self.stale[request_id]  # it never had it, or its Finished was lost
        return [i for i in listed if i not in self.assigned and i not in self.stale]

    def _note_unseen(self, listed: set[str], now: float) -> None:
        waiting = self.starting.keys() if self.load is not None and self.load.waiting else set()
        missing = self.assigned.keys() - listed - waiting
        if missing or self.unseen:
            self.unseen = {request_id: self.unseen.get(request_id, now) for request_id in missing}

    def vanished(self, now: float) -> list[Request]:
        """Requests that it had and no longer lists, without a last word."""
        return [self.assigned[i] for i, since in self.unseen.items() if now - since > UNSEEN_S and i in self.assigned]

    def take(self, request: Request) -> None:
        self.assigned[request.request_id] = request
        self.starting[request.request_id] = request.cells
        request.worker = self.identity
        request.begun = False

    def drop(self, request: Request) -> None:
        """The request is no longer its."""
        del self.assigned[request.request_id]
        self.starting.pop(request.request_id, None)
        self.unseen.pop(request.request_id, None)
        request.worker = None


class Fleet:
    """All workers, by identity; of each name only the newest life counts."""

    def __init__(self) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.max_context: dict[str, int] = {}  # by name, also of workers that are away: they come back
        self.vocab = 0  # 0: not known
        self._gone: dict[bytes, None] = {}  # lives that ended, newest last; a late word of theirs means nothing

    @property
    def waiting(self) -> int:
        """Requests that wait in some worker for their first step."""
        return sum(worker.waiting for worker in self.workers.values())

    @property
    def running(self) -> int:
        """Requests that have a seat in some worker and are not parked."""
        return sum(worker.running for worker in self.workers.values())

    def hello(self, identity: bytes, hello: Hello, now: float) -> Worker | None:
        """The life that now owns the name, or None if this one was replaced already."""
        if identity in self._gone:
            return None
        self.max_context[hello.name] = hello.max_context
        self.vocab = hello.vocab
        worker = self.workers.get(identity)
        if worker is None:
            worker = self.workers[identity] = Worker(identity, hello, now)
        worker.hello = hello
        return worker

    def former_life(self, worker: Worker) -> Worker | None:
        """Another life of the same name."""
        return next((other for other in self.workers.values() if other.name == worker.name and other is not worker), None)

    def forget(self, worker: Worker) -> None:
        """This life is over for good."""
        del self.workers[worker.identity]
        self._gone[worker.identity] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def choose(self, request: Request, takers: list[Worker]) -> Worker | None:
        """A sibling's worker first, because it will have computed the prompt; then one where nobody loses his seat for it; then
        the one with most free cells. That there are too few is no bar: what it may displace is for the worker to decide."""
        able = [worker for worker in takers if worker.may_take(request)]
        sibling = request.generate.sibling_of

        def liking(worker: Worker) -> tuple[bool, bool, int]:
            return sibling in worker.assigned, worker.busy < worker.hello.slots, worker.free_cells

        return max(able, key=liking, default=None)

    def takers(self, rank: int, now: float) -> list[Worker]:
        """Those that may be given a request of this class."""
        return [worker for worker in self.workers.values() if worker.takes_work(now) and worker.has_seat(rank)]

    def forgive(self, stall_s: float) -> None:
        """We stood still for so long; what the workers said meanwhile has not been read yet."""
        for worker in self.workers.values():
            worker.progress_at += stall_s
            worker.unseen = {request_id: since + stall_s for request_id, since in worker.unseen.items()}

    def context_limit(self) -> int:
        """The longest context of any worker; 0 while none is known."""
        return max(self.max_context.values(), default=0)

    def pool_cells(self) -> int:
        """Of all workers that are not lost."""
        return sum(worker.hello.pool_cells for worker in self.workers.values() if not worker.lost)

    def worker_of(self, request: Request) -> Worker | None:
        """The worker that has it."""
        return self.workers[request.worker] if request.worker is not None else None

    def in_batch(self, request: Request) -> bool:
        """Whether it runs on a worker, or is on its way there: once told to park it, the worker will say when it has left."""
        worker = self.worker_of(request)
        if worker is None or not worker.has_begun(request):
            return False
        slot = worker.slot_of(request)  # heard just before the notice of the same change
        return request.parked_at is None or (slot is not None and slot.state in ("resuming", "running"))

    def slot_of(self, request: Request) -> Slot | None:
        """Its line of `slots`, if it has a seat."""
        worker = self.worker_of(request)
        slot = worker.slot_of(request) if worker is not None else None
        return self._shown(worker, slot) if slot is not None else None

    def slots(self) -> list[Slot]:
        """The seats of all living workers, each with a number of its own: seat * workers + the worker's rank by name."""
        return [
            self._shown(worker, slot)
            for worker in sorted(self.workers.values(), key=lambda worker: worker.name)
            if worker.load is not None and not worker.lost
            for slot in worker.load.slots
        ]

    def _shown(self, worker: Worker, slot: Slot) -> Slot:
        """As clients see it: its number among all, and whether it is set aside, which the worker hears later than we."""
        names = sorted(self.max_context)
        request = worker.assigned.get(slot.request_id)
        number = slot.id if len(names) == 1 else slot.id * len(names) + names.index(worker.name)
        held = request.held if request is not None else False
        return slot if (number, held) == (slot.id, slot.held) else replace(slot, id=number, held=held)
