"""The book of the host cache: its rules as short stories, and random schedules against a model of bytes."""

import errno
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostcache.budget import CLAIM_S, MAX_EXTENTS, PAGE_BYTES, WARM_S, Budget, Close, Punch, Send
from wire.arena import MAX_DATAGRAM_BYTES
from wire.codec import pack
from wire.messages import Attach, Attached, Commit, Denied, Granted, HeldLease, Reclaim, Reclaimed, Release, Reserve

P = PAGE_BYTES


def small_budget(pages: int = 20, slab_pages: int = 8, **kw) -> Budget:
    return Budget(pages * P, 7, kw.pop("take", lambda slab: None), slab_bytes=slab_pages * P, **kw)


def attach(budget: Budget, peer: int = 1, unit_pages: int = 1, **kw) -> Attached:
    (action,) = budget.handle(peer, Attach(worker=f"w{peer}", unit_bytes=unit_pages * P, **kw), 0.0)
    return action.message


def reserve(budget: Budget, pages: int, peer: int = 1, ask: int = 1):
    (*_, action) = budget.handle(peer, Reserve(ask=ask, request_id="r", nbytes=pages * P), 0.0)
    return action.message


def test_whole_budget_is_usable_and_the_next_page_is_denied():
    budget = small_budget(pages=20, slab_pages=8)
    attach(budget)
    granted = reserve(budget, 20)
    assert sum(nbytes for _, nbytes in granted.extents) == 20 * P
    assert (budget.used_bytes, budget.held_bytes) == (20 * P, 20 * P)
    assert granted.used_bytes == 20 * P  # with it
    assert reserve(budget, 1, ask=2) == Denied(ask=2, reason="full", used_bytes=20 * P)


def test_memory_is_taken_slab_by_slab_and_warm_slabs_come_first():
    taken = []
    budget = small_budget(take=taken.append)
    attach(budget)
    first = reserve(budget, 6)
    second = reserve(budget, 3)  # two pages are left in the first slab: scattered over both
    assert taken == [0, 1]
    assert first.extents == [(0, 6 * P)] and second.extents == [(6 * P, 2 * P), (8 * P, P)]
    budget.handle(1, Release(lease=first.lease), 0.0)
    assert reserve(budget, 5).extents == [(0, 5 * P)]  # the smallest hole in which it fits whole
    assert taken == [0, 1]


def test_no_block_straddles_two_extents():
    budget = small_budget(pages=20, slab_pages=8)
    attach(budget, unit_pages=3)
    granted = reserve(budget, 15)
    assert all(nbytes % (3 * P) == 0 for _, nbytes in granted.extents)
    assert reserve(budget, 3) == Denied(
        ask=1, reason="fragmented", used_bytes=15 * P
    )  # five pages are free, nowhere three together


def test_memory_that_is_not_there_is_a_denial_that_changes_nothing():
    def take(slab: int) -> None:
        if slab == 1:
            raise OSError(errno.ENOSPC, "none left")

    budget = small_budget(take=take)
    attach(budget)
    actions = budget.handle(1, Reserve(ask=3, request_id="r", nbytes=16 * P), 0.0)
    assert actions == [Punch(0), Send(1, Denied(ask=3, reason="memory"))]
    assert (budget.used_bytes, budget.held_bytes) == (0, 0)
    assert isinstance(reserve(budget, 8), Granted)


def test_reserve_before_attach_and_a_second_attach():
    budget = small_budget()
    assert reserve(budget, 1) == Denied(ask=1, reason="not_attached")
    attach(budget)
    reserve(budget, 4)
    (action,) = budget.handle(1, Attach(worker="w1", unit_bytes=P), 0.0)
    assert isinstance(action, Close) and budget.used_bytes == 0


def test_a_worker_cannot_touch_the_lease_of_another():
    budget = small_budget()
    attach(budget, 1)
    attach(budget, 2)
    lease = reserve(budget, 2, peer=1).lease
    budget.handle(2, Release(lease=lease), 0.0)
    budget.handle(2, Release(lease=-1), 0.0)
    assert budget.used_bytes == 2 * P


def test_a_slab_goes_back_when_every_worker_has_let_go():
    budget = small_budget()
    attach(budget, 1)
    attach(budget, 2)
    lease = reserve(budget, 2).lease
    budget.handle(1, Release(lease=lease), 10.0)
    assert budget.wait_s(10.0) == WARM_S
    assert budget.tick(10.0 + WARM_S - 0.1) == []
    assert budget.tick(10.0 + WARM_S) == [Send(1, Reclaim(slab=0)), Send(2, Reclaim(slab=0))]
    assert budget.wait_s(20.0) is None
    assert budget.handle(1, Reclaimed(slab=0), 12.1) == []
    assert budget.held_bytes == 8 * P
    assert budget.gone(2, 12.2) == [Punch(0)]
    assert budget.held_bytes == 0


def test_a_grant_calls_a_reclaim_off():
    budget = small_budget(pages=8)
    attach(budget)
    budget.handle(1, Release(lease=reserve(budget, 2).lease), 0.0)
    assert budget.tick(WARM_S) == [Send(1, Reclaim(slab=0))]
    granted = reserve(budget, 8)  # the only slab there is
    assert isinstance(granted, Granted)
    assert budget.handle(1, Reclaimed(slab=0), 3.0) == []
    budget.handle(1, Release(lease=granted.lease), 4.0)
    assert budget.tick(4.0 + WARM_S) == [Send(1, Reclaim(slab=0))]
    assert budget.handle(1, Reclaimed(slab=0), 7.0) == [Punch(0)]


def test_without_workers_memory_goes_back_after_the_warm_time():
    budget = small_budget()
    attach(budget)
    reserve(budget, 20)
    assert budget.gone(1, 5.0) == []
    assert budget.tick(5.0 + WARM_S) == [Punch(0), Punch(1), Punch(2)]
    assert (budget.used_bytes, budget.held_bytes) == (0, 0)


def test_a_lease_list_is_bounded_to_one_datagram():
    budget = Budget(2 * (MAX_EXTENTS + 2) * P, 1, lambda slab: None)
    attach(budget)
    leases = [reserve(budget, 1).lease for _ in range(2 * MAX_EXTENTS + 4)]
    for lease in leases[::2]:
        budget.handle(1, Release(lease=lease), 0.0)
    assert reserve(budget, MAX_EXTENTS + 1).reason == "fragmented"
    granted = reserve(budget, MAX_EXTENTS)
    assert len(granted.extents) == MAX_EXTENTS
    wide = Granted(ask=2**53, lease=2**53, extents=[(2**45, 2**45)] * MAX_EXTENTS, used_bytes=2**53)
    assert len(pack(wide)) <= MAX_DATAGRAM_BYTES


def test_a_kept_arena_waits_for_its_owners():
    budget = small_budget(resident=[0, 1], stored=True)
    assert budget.held_bytes == 16 * P
    attach(budget, 2)
    assert reserve(budget, 5, peer=2) == Denied(ask=1, reason="full")  # only the third slab's four pages are nobody's
    held = [
        HeldLease(lease=4, extents=[(2 * P, 2 * P), (8 * P, P)]),
        HeldLease(lease=5, extents=[(3 * P, P)]),  # overlaps the first
        HeldLease(lease=6, extents=[(16 * P, P)]),  # memory that did not survive
        HeldLease(lease=7, extents=[(6 * P, 4 * P)]),  # straddles two slabs
        HeldLease(lease=8, extents=[(-P, P)]),
        HeldLease(lease=9, extents=[(0, P), (0, P)]),
    ]
    attached = attach(budget, 1, generation=7, held=held)
    assert attached.stored and attached.kept == [4]
    assert budget.used_bytes == 3 * P
    assert budget.tick(CLAIM_S) == []  # both slabs hold a part of lease 4
    assert reserve(budget, 17).lease == 5  # all the rest: the claims that failed took nothing
    assert budget.handle(1, Commit(lease=5, checksum=1, position=1), 0.0) == []


def test_leases_of_another_arena_are_not_taken_back():
    budget = small_budget(resident=[0])
    assert attach(budget, 1, generation=8, held=[HeldLease(lease=1, extents=[(0, P)])]).kept == []
    assert budget.tick(CLAIM_S) == [Send(1, Reclaim(slab=0))]


def test_a_budget_of_nothing_denies():
    budget = Budget(0, 1, lambda slab: None)
    attach(budget)
    assert reserve(budget, 1) == Denied(ask=1, reason="full")
    assert budget.figures().budget_bytes == 0 and budget.wait_s(0.0) is None


# random schedules -----------------------------------------------------------------------------------------------------
@dataclass
class FakeWorker:
    """A worker as the book sees it: hears its messages in order and remembers which slabs it has mapped."""

    unit: int
    inbox: deque = field(default_factory=deque)
    leases: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # leases whose Granted it has read
    mapped: set[int] = field(default_factory=set)
    lost_at: float = 0.0


class BudgetMachine(RuleBasedStateMachine):
    """Workers come, reserve, release, die and are slow; the host cache restarts; memory runs out."""

    SLAB, PAGES = 6 * P, 27

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.resident: set[int] = set()
        self.fail_after = -1
        self.workers: dict[int, FakeWorker] = {}
        self.away: list[FakeWorker] = []  # of the former life of the host cache
        self.quarantine: set[int] = set()
        self.claims_end = 0.0
        self.next_peer = 1
        self.start()
        self.join(FakeWorker(P))
        self.join(FakeWorker(2 * P))

    def start(self) -> None:
        self.quarantine = set(self.resident)
        self.claims_end = self.now + CLAIM_S
        self.budget = Budget(
            self.PAGES * P, 3, self.take, slab_bytes=self.SLAB, stored=True, resident=sorted(self.resident), now=self.now
        )

    def take(self, slab: int) -> None:
        if self.fail_after == 0:
            raise OSError(errno.ENOMEM, "no memory")
        self.fail_after -= 1
        assert slab not in self.resident
        self.resident.add(slab)

    def perform(self, actions) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self.workers[peer].inbox.append(message)
                case Punch(slab=slab):
                    self.resident.remove(slab)
                    holders = [w for w in self.workers.values() if slab in w.mapped]
                    assert not holders, "memory was given back under a worker that had it mapped"
                case Close():
                    raise AssertionError(action)

    def holes_by_slab(self) -> list[list[int]]:
        """Lengths in bytes of the free runs of each slab, from the leases alone."""
        free = [True] * self.PAGES
        for worker in self.workers.values():
            for extents in worker.leases.values():
                for offset, nbytes in extents:
                    for page in range(offset // P, (offset + nbytes) // P):
                        assert free[page], "two leases overlap"
                        free[page] = False
        slabs = []
        for start in range(0, self.PAGES, self.SLAB // P):
            runs, run = [], 0
            for page in [*free[start : start + self.SLAB // P], False]:
                if page:
                    run += P
                elif run:
                    runs.append(run)
                    run = 0
            slabs.append(runs)
        return slabs

    @rule(unit=st.integers(1, 4))
    def attach(self, unit: int) -> None:
        if len(self.workers) < 4:
            self.join(FakeWorker(unit * P))

    def join(self, worker: FakeWorker) -> None:
        peer, self.next_peer = self.next_peer, self.next_peer + 1
        held = [HeldLease(lease, extents) for lease, extents in worker.leases.items()]
        worker.inbox.clear()
        self.workers[peer] = worker
        (action,) = self.budget.handle(peer, Attach(worker="w", unit_bytes=worker.unit, generation=3, held=held), self.now)
        kept = action.message.kept
        assert sorted(kept) == sorted(worker.leases)
        worker.seen = set(kept)
        worker.mapped = {at // self.SLAB for extents in worker.leases.values() for at, _ in extents}

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), pages=st.integers(7, 20), fail_after=st.sampled_from([-1, -1, 0, 1, 2]))
    def reserve_over_slabs(self, data, pages: int, fail_after: int) -> None:
        self.reserve(data, pages * P, fail_after)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), nbytes=st.integers(1, 12 * P), fail_after=st.sampled_from([-1, -1, -1, 0]))
    def reserve_some(self, data, nbytes: int, fail_after: int) -> None:
        self.reserve(data, nbytes, fail_after)

    def reserve(self, data, nbytes: int, fail_after: int) -> None:
        peer = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers[peer]
        units = -(-nbytes // worker.unit)
        if self.claims_end <= self.now:
            self.quarantine.clear()
            self.perform(self.budget.tick(self.now))
        usable = [runs for slab, runs in enumerate(self.holes_by_slab()) if slab not in self.quarantine]
        room = sum(run // worker.unit for runs in usable for run in runs)
        self.fail_after = fail_after
        *others, answer = self.budget.handle(peer, Reserve(ask=1, request_id="r", nbytes=nbytes), self.now)
        self.perform(others)
        match answer.message:
            case Granted(lease=lease, extents=extents):
                assert room >= units
                assert sum(n for _, n in extents) == units * worker.unit
                for offset, n in extents:
                    assert n % worker.unit == 0 and offset % P == 0 and n > 0
                    assert offset // self.SLAB == (offset + n - 1) // self.SLAB
                    assert offset // self.SLAB in self.resident
                assert lease not in worker.leases
                worker.leases[lease] = extents
                worker.inbox.append(answer.message)
            case Denied(reason="memory"):
                assert fail_after >= 0
            case Denied(reason=reason):
                assert room < units
                free = sum(run for runs in usable for run in runs)
                assert reason == ("fragmented" if free >= units * worker.unit else "full")

    @precondition(lambda self: any(w.seen for w in self.workers.values()))
    @rule(data=st.data())
    def release(self, data) -> None:
        self.release_one(*data.draw(st.sampled_from([(p, n) for p, w in sorted(self.workers.items()) for n in sorted(w.seen)])))

    @precondition(lambda self: any(w.seen for w in self.workers.values()))
    @rule()
    def release_all(self) -> None:
        for peer, worker in self.workers.items():
            for lease in sorted(worker.seen):
                self.release_one(peer, lease)

    def release_one(self, peer: int, lease: int) -> None:
        worker = self.workers[peer]
        worker.seen.remove(lease)
        del worker.leases[lease]
        self.perform(self.budget.handle(peer, Release(lease=lease), self.now))

    @precondition(lambda self: any(w.inbox for w in self.workers.values()))
    @rule(data=st.data(), count=st.integers(1, 4))
    def worker_reads(self, data, count: int) -> None:
        peer = data.draw(st.sampled_from([p for p, w in sorted(self.workers.items()) if w.inbox]))
        for _ in range(min(count, len(self.workers[peer].inbox))):
            self.read_one(peer, self.workers[peer])

    def read_one(self, peer: int, worker: FakeWorker) -> None:
        match worker.inbox.popleft():
            case Granted(lease=lease, extents=extents):
                worker.seen.add(lease)
                worker.mapped |= {offset // self.SLAB for offset, _ in extents}
            case Reclaim(slab=slab):
                worker.mapped.discard(slab)
                self.perform(self.budget.handle(peer, Reclaimed(slab=slab), self.now))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data) -> None:
        peer = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[peer]
        self.perform(self.budget.gone(peer, self.now))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), slab=st.integers(-1, 9), lease=st.integers(-1, 9))
    def nonsense(self, data, slab: int, lease: int) -> None:
        peer = data.draw(st.sampled_from(sorted(self.workers)))
        if lease not in self.workers[peer].leases:
            self.perform(self.budget.handle(peer, Release(lease=lease), self.now))
        if not any(Reclaim(slab=slab) == m for m in self.workers[peer].inbox):
            self.perform(self.budget.handle(peer, Reclaimed(slab=slab), self.now))

    @rule(seconds=st.sampled_from([1.0, 2.0, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.claims_end <= self.now:
            self.quarantine.clear()
        self.perform(self.budget.tick(self.now))

    @rule()
    def host_cache_restarts(self) -> None:
        for worker in self.workers.values():
            worker.lost_at = self.now
            worker.leases = {lease: worker.leases[lease] for lease in worker.seen & worker.leases.keys()}
        self.away += self.workers.values()
        self.workers = {}
        self.start()

    @precondition(lambda self: self.away and len(self.workers) < 4)
    @rule()
    def worker_returns(self) -> None:
        worker = self.away.pop(0)
        if worker.lost_at + CLAIM_S <= self.now:
            worker.leases = {}  # it has given up waiting
        self.join(worker)

    @invariant()
    def the_book_is_true(self) -> None:
        holes = self.holes_by_slab()
        leased = sum(n for w in self.workers.values() for extents in w.leases.values() for _, n in extents)
        assert self.budget.used_bytes == leased
        assert self.PAGES * P - sum(map(sum, holes)) == leased
        assert [[n for _, n in slab.holes] for slab in self.budget.slabs] == holes
        held = sum(self.budget.slabs[slab].nbytes for slab in self.resident)
        assert self.budget.held_bytes == held
        assert leased <= held <= self.budget.budget_bytes

    def teardown(self) -> None:
        for peer in list(self.workers):
            del self.workers[peer]
            self.perform(self.budget.gone(peer, self.now))
        while (wait_s := self.budget.wait_s(self.now)) is not None:
            self.now += wait_s
            self.perform(self.budget.tick(self.now))
        assert not self.resident and self.budget.held_bytes == self.budget.used_bytes == 0


BudgetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestBudgetMachine = BudgetMachine.TestCase


@pytest.mark.long
@pytest.mark.timeout(1800)  # it needs two minutes of a processor that it may have to share
class TestBudgetMachineLong(BudgetMachine.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80, deadline=None)
