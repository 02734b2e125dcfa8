"""The book of the host cache: slabs of the arena, leases in them, and who may have how much. Pure: events in, actions out.

What it does not cover: sockets and memory. Memory is taken through the callable `take` before anything is granted from it.
A slab without leases stays warm for `WARM_S`; then every attached worker is told to let go of it, and once all have answered
or gone it is given back. Until that moment it may still be granted from, which calls the reclaim off, so a worker that hangs
never withholds the memory from others. Both sides agree, because a worker handles its messages in order: it answers a Reclaim
before it sees a later Granted, and it releases only what it has seen. So an answer to a reclaim that was called off may stand
for the next one: the worker has not touched the slab in between.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from wire.messages import (
    Attach,
    Attached,
    Commit,
    Denied,
    FromHostCache,
    Granted,
    HeldLease,
    Reclaim,
    Reclaimed,
    Release,
    Reserve,
    ToHostCache,
)
from wire.messages import Budget as Figures

SLAB_BYTES = 64 << 20
PAGE_BYTES = 4096
WARM_S = 2.0  # how long a slab without leases waits for the next one
CLAIM_S = 5.0  # after a restart that kept the arena: how long its old contents wait for the workers that own them
MAX_EXTENTS = 4096  # of one lease: its Granted fits a datagram
MAX_LEASES = 16384  # of one worker

Extent = tuple[int, int]  # (offset, bytes) in the arena


class Send(Struct, frozen=True):
    """Send `message` to the peer; Attached goes with the arena's descriptor."""

    peer: int
    message: FromHostCache


class Punch(Struct, frozen=True):
    """Give the slab's memory back to the system."""

    slab: int


class Close(Struct, frozen=True):
    """The peer broke the protocol: close its connection (it is gone from the book already)."""

    peer: int
    reason: str


Action = Send | Punch | Close


@dataclass
class Slab:
    """One unit of resident memory: `holes` are its free extents, sorted by offset, never adjacent."""

    start: int
    nbytes: int
    resident: bool = False
    claimable: bool = False  # kept through a restart: its holes may be somebody's images
    empty_since: float | None = None
    asked: bool = False  # its workers were told to let go of it
    holes: list[Extent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holes = [(self.start, self.nbytes)]

    @property
    def empty(self) -> bool:
        return self.holes == [(self.start, self.nbytes)]

    def carve(self, extent: Extent) -> bool:
        """Take `extent` out of the holes; False, and nothing changes, if it is not entirely free."""
        offset, nbytes = extent
        i = bisect_right(self.holes, (offset, self.nbytes)) - 1
        if i < 0 or offset + nbytes > sum(self.holes[i]):
            return False
        start, end = self.holes[i][0], sum(self.holes[i])
        self.holes[i : i + 1] = [(a, b - a) for a, b in ((start, offset), (offset + nbytes, end)) if b > a]
        return True

    def fill(self, extent: Extent) -> None:
        """Return `extent` to the holes, joined with its neighbours."""
        insort(self.holes, extent)
        i = self.holes.index(extent)
        if i + 1 < len(self.holes) and sum(self.holes[i]) == self.holes[i + 1][0]:
            self.holes[i : i + 2] = [(self.holes[i][0], self.holes[i][1] + self.holes[i + 1][1])]
        if i and sum(self.holes[i - 1]) == self.holes[i][0]:
            self.holes[i - 1 : i + 1] = [(self.holes[i - 1][0], self.holes[i - 1][1] + self.holes[i][1])]


@dataclass
class Lease:
    """The right to `extents`. `committed` says that the image in them is whole."""

    extents: list[Extent]
    committed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.extents)


@dataclass
class Worker:
    """An attached peer. Its lease numbers are its own."""

    name: str
    unit_bytes: int
    leases: dict[int, Lease] = field(default_factory=dict)
    next_lease: int = 1
    owes: set[int] = field(default_factory=set)  # slabs whose Reclaimed is still to come


class Budget:
    """The book. `take(slab)` makes a slab resident or raises OSError; every method leaves used <= held <= budget."""

    def __init__(
        self,
        budget_bytes: int,
        generation: int,
        take: Callable[[int], None],
        *,
        slab_bytes: int = SLAB_BYTES,
        stored: bool = False,
        resident: Iterable[int] = (),
        now: float = 0.0,
    ) -> None:
        """`resident`: slabs of a kept arena that are in memory; they can be claimed by `Attach` until `now` + CLAIM_S."""
        self.budget_bytes = budget_bytes // PAGE_BYTES * PAGE_BYTES
        self.slab_bytes = max(PAGE_BYTES, min(slab_bytes, self.budget_bytes))
        self.generation = generation
        self.stored = stored
        self.workers: dict[int, Worker] = {}
        self.slabs = [
            Slab(start, min(self.slab_bytes, self.budget_bytes - start)) for start in range(0, self.budget_bytes, self.slab_bytes)
        ]
        self._take = take
        self.used_bytes = 0
        self._claims_end = now + CLAIM_S
        for number in resident:
            self.slabs[number].resident = self.slabs[number].claimable = True
            self.slabs[number].empty_since = now

    # events -----------------------------------------------------------------------------------------------------------
    def handle(self, peer: int, message: ToHostCache, now: float) -> list[Action]:
        """What a worker said. GetBudget is the shell's: it is answered with `figures()`."""
        match message:
            case Attach():
                return self._attach(peer, message, now)
            case Reserve(ask=ask, nbytes=nbytes):
                return self._reserve(peer, ask, nbytes)
            case Commit(lease=number):
                if lease := self._lease(peer, number):
                    lease.committed = True
            case Release(lease=number):
                if self._lease(peer, number):
                    self._free(self.workers[peer].leases.pop(number), now)
            case Reclaimed(slab=slab):
                return self._reclaimed(peer, slab)
        return []

    def gone(self, peer: int, now: float) -> list[Action]:
        """The peer's connection ended: all its leases are free, and nothing waits for it any more."""
        worker = self.workers.pop(peer, None)
        if worker is None:
            return []
        for lease in worker.leases.values():
            self._free(lease, now)
        return [punch for slab in worker.owes for punch in self._punch_if_let_go(slab)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed: ask for slabs that have been empty long enough."""
        actions: list[Action] = []
        if self._claims_end <= now:
            for slab in self.slabs:
                slab.claimable = False
        for number, slab in enumerate(self.slabs):
            if self._cold_at(slab) <= now:
                slab.asked = True
                for peer, worker in self.workers.items():
                    worker.owes.add(number)
                    actions.append(Send(peer, Reclaim(slab=number)))
                actions += self._punch_if_let_go(number)
        return actions

    def wait_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before another event."""
        nearest = min((self._cold_at(slab) for slab in self.slabs), default=float("inf"))
        if any(slab.claimable for slab in self.slabs):
            nearest = min(nearest, self._claims_end)
        return None if nearest == float("inf") else max(0.0, nearest - now)

    def figures(self) -> Figures:
        """The answer to GetBudget."""
        return Figures(
            budget_bytes=self.budget_bytes,
            used_bytes=self.used_bytes,
            held_bytes=self.held_bytes,
            leases=sum(len(worker.leases) for worker in self.workers.values()),
            generation=self.generation,
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of resident slabs."""
        return sum(slab.nbytes for slab in self.slabs if slab.resident)

    # attach -----------------------------------------------------------------------------------------------------------
    def _attach(self, peer: int, attach: Attach, now: float) -> list[Action]:
        if peer in self.workers or attach.unit_bytes % PAGE_BYTES:
            wrong = f"a unit of {attach.unit_bytes} bytes is no multiple of {PAGE_BYTES}"
            reason = "attached twice" if peer in self.workers else wrong
            return [*self.gone(peer, now), Close(peer, reason)]
        worker = self.workers[peer] = Worker(attach.worker, attach.unit_bytes)
        if attach.generation == self.generation:
            for held in attach.held[:MAX_LEASES]:
                self._claim(worker, held)
        kept = list(worker.leases)
        worker.next_lease = max(kept, default=0) + 1
        return [
            Send(
                peer,
                Attached(
                    generation=self.generation,
                    arena_bytes=self.budget_bytes,
                    slab_bytes=self.slab_bytes,
                    stored=self.stored,
                    kept=kept,
                ),
            )
        ]

    def _claim(self, worker: Worker, held: HeldLease) -> None:
        """Take a lease of the former life back, whole or not at all."""
        if held.lease in worker.leases or not 0 < held.lease < 2**53 or not 0 < len(held.extents) <= MAX_EXTENTS:
            return
        taken: list[Extent] = []
        for offset, nbytes in held.extents:
            number = offset // self.slab_bytes
            fits = nbytes > 0 and not nbytes % worker.unit_bytes and not offset % PAGE_BYTES and 0 <= number < len(self.slabs)
            if not fits or not self.slabs[number].resident or not self.slabs[number].carve((offset, nbytes)):
                for extent in taken:
                    self._slab_of(extent).fill(extent)
                return
            taken.append((offset, nbytes))
        worker.leases[held.lease] = Lease(taken, committed=True)
        self._occupy(taken)

    # reserve and release ----------------------------------------------------------------------------------------------
    def _reserve(self, peer: int, ask: int, nbytes: int) -> list[Action]:
        worker = self.workers.get(peer)
        if worker is None:
            return [self._denied(peer, ask, "not_attached")]
        if len(worker.leases) >= MAX_LEASES:
            return [self._denied(peer, ask, "too_many")]
        chosen = self._choose(-(-nbytes // worker.unit_bytes), worker.unit_bytes)
        if isinstance(chosen, str):
            return [self._denied(peer, ask, chosen)]
        new: list[int] = []
        for number in sorted({offset // self.slab_bytes for offset, _ in chosen}):
            if self.slabs[number].resident:
                continue
            try:
                self._take(number)
            except OSError:
                return [*self._untake(new), self._denied(peer, ask, "memory")]
            self.slabs[number].resident = True
            new.append(number)
        for extent in chosen:
            self._slab_of(extent).carve(extent)
        self._occupy(chosen)
        lease, worker.next_lease = worker.next_lease, worker.next_lease + 1
        worker.leases[lease] = Lease(chosen)
        return [Send(peer, Granted(ask=ask, lease=lease, extents=chosen, used_bytes=self.used_bytes))]

    def _denied(self, peer: int, ask: int, reason: str) -> Send:
        return Send(peer, Denied(ask=ask, reason=reason, used_bytes=self.used_bytes))

    def _choose(self, units: int, unit: int) -> list[Extent] | str:
        """Extents for `units` units, or why there are none. Resident memory first, in as few pieces as possible."""
        warm: list[Extent] = []
        cold: list[Extent] = []
        free_bytes = 0
        for slab in self.slabs:
            if slab.claimable:
                continue
            for offset, nbytes in slab.holes:
                free_bytes += nbytes
                if nbytes >= unit:
                    (warm if slab.resident else cold).append((offset, nbytes))
        if sum(nbytes // unit for _, nbytes in warm + cold) < units:
            return "fragmented" if free_bytes >= units * unit else "full"
        whole = min((hole for hole in warm if hole[1] >= units * unit), key=lambda hole: (hole[1], hole[0]), default=None)
        if whole:
            return [(whole[0], units * unit)]
        chosen = _gather(sorted(warm, key=_larger_first) + cold, units, unit)
        if len(chosen) > MAX_EXTENTS:  # too many small holes: prefer large ones wherever they are
            chosen = _gather(sorted(warm + cold, key=_larger_first), units, unit)
        return chosen if len(chosen) <= MAX_EXTENTS else "fragmented"

    def _untake(self, numbers: list[int]) -> list[Action]:
        """A grant failed half-way: no worker has heard of these slabs yet, so they go back at once."""
        for number in numbers:
            self.slabs[number].resident = False
        return [Punch(number) for number in numbers]

    def _occupy(self, extents: list[Extent]) -> None:
        for extent in extents:
            slab = self._slab_of(extent)
            slab.empty_since, slab.asked = None, False
            self.used_bytes += extent[1]

    def _free(self, lease: Lease, now: float) -> None:
        for extent in lease.extents:
            slab = self._slab_of(extent)
            slab.fill(extent)
            self.used_bytes -= extent[1]
            if slab.empty:
                slab.empty_since = now

    # giving memory back -----------------------------------------------------------------------------------------------
    def _cold_at(self, slab: Slab) -> float:
        """When the slab's workers are to be told to let go of it; infinity: not as things are."""
        if not slab.resident or slab.asked or slab.claimable or slab.empty_since is None:
            return float("inf")
        return slab.empty_since + WARM_S

    def _reclaimed(self, peer: int, slab: int) -> list[Action]:
        worker = self.workers.get(peer)
        if worker is None or slab not in worker.owes:
            return []  # an answer nobody waits for
        worker.owes.remove(slab)
        return self._punch_if_let_go(slab)

    def _punch_if_let_go(self, number: int) -> list[Action]:
        slab = self.slabs[number]
        if not slab.asked or any(number in worker.owes for worker in self.workers.values()):
            return []
        slab.resident, slab.asked, slab.empty_since = False, False, None
        return [Punch(number)]

    # small ------------------------------------------------------------------------------------------------------------
    def _lease(self, peer: int, number: int) -> Lease | None:
        worker = self.workers.get(peer)
        return worker.leases.get(number) if worker else None

    def _slab_of(self, extent: Extent) -> Slab:
        return self.slabs[extent[0] // self.slab_bytes]


def _larger_first(hole: Extent) -> tuple[int, int]:
    return -hole[1], hole[0]


def _gather(holes: list[Extent], units: int, unit: int) -> list[Extent]:
    """`units` units from the holes in their order; they must have room."""
    chosen: list[Extent] = []
    for offset, nbytes in holes:
        count = min(units, nbytes // unit)
        chosen.append((offset, count * unit))
        units -= count
        if not units:
            break
    return chosen
