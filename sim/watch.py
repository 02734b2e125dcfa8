"""Watch: looks over the scheduler's shoulder while it decides who is parked and who comes in, and counts for itself.

What it checks, for every plan and policy:

- Who is parked by pressure is needed: without any one of them the demand would not be met, once all copies under way have ended.
- The demand is met by them, or nobody else can be parked.
- A better class is parked only where all worse ones together would not do; the protected one and an exhausted one never are.
- Who is parked to let somebody in is of a worse class, as submitted and as promoted, that park counted; and then it does fit.
- Who comes in leaves the policy's gap, unless it is alone. A park happens only past the policy's line. So between the two lies
  as much growth as the gap is wide, or an end: equals do not take turns.
- Nobody comes in before one that has waited too long, a better class, or, where the order is strict, a longer parked one.
"""

from collections.abc import Callable, Iterable

from gpu_worker.policy import preemption
from gpu_worker.policy.policies import policy_of
from gpu_worker.policy.scheduler import Scheduler
from gpu_worker.policy.sequence import Sequence, State, chain


class Watch:
    """Of one scheduler, from now on. Each broken promise is an AssertionError at the latest when its plan is made."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.book = scheduler.book
        self.limits = scheduler.limits
        self.policy = policy_of(scheduler.limits)
        self.displaced = 0
        self.came_aged = 0
        self._candidate: Sequence | None = None  # for whom somebody is being parked
        self._demand: Demand | None = None
        self._victims: list[Sequence] = []
        self._wrap(self.book, "park", self._park)
        self._wrap(self.book, "resume", self._enter)
        self._wrap(self.book, "admit", self._enter)
        self._wrap(scheduler.entry, "let_in", self._let_in)
        self._wrap(scheduler.entry, "make_room", self._make_room)
        self._wrap(scheduler, "plan", self._plan)

    def _wrap(self, owner: object, name: str, around: Callable) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: around(original, *args))

    def class_of(self, seq: Sequence) -> int:
        return preemption.class_of(seq, self.book.top_class, self.scheduler.now)

    # what it looks over ---------------------------------------------------------------------------------------------------
    def _plan(self, original: Callable, now: float) -> object:
        used = self.book.pool.used
        plan = original(now)
        self._judge()
        # a lone one may have grown beyond the line while another's image was copied in: looking one step ahead, nobody is parked
        # before somebody grows again
        if self.policy.parks and (self.policy.park_ahead > 1 or self.book.pool.used > used):
            Demand(self, None).judge([])
        return plan

    def _let_in(self, original: Callable, *args: object) -> None:
        self._judge()
        original(*args)

    def _make_room(self, original: Callable, seq: Sequence, now: float) -> bool:
        self._judge()
        self._candidate = seq
        answer = original(seq, now)
        self._judge()
        self._candidate = None
        return answer

    def _park(self, original: Callable, seq: Sequence, kind: str, now: float) -> None:
        if kind == "pressure":
            if self._demand is None:
                self._demand = Demand(self, self._candidate)
            self._victims.append(seq)
        original(seq, kind, now)

    def _judge(self) -> None:
        """The parks by pressure since the last judgement are one decision."""
        if self._demand is not None:
            self._demand.judge(self._victims)
            self.displaced += len(self._victims) if self._candidate else 0
        self._demand, self._victims = None, []

    # coming in ------------------------------------------------------------------------------------------------------------
    def _enter(self, original: Callable, seq: Sequence, now: float) -> None:
        self._judge()
        self._check_order(seq, now)
        if self.book.on_device:
            demand = Demand(self, seq)
            here = [*self.book.running.values(), *self.book.resuming.values()]
            assert demand.fits([*here, *self.book.parking.values()], here), f"{seq.request_id} comes in and leaves no gap"
        original(seq, now)

    def _check_order(self, seq: Sequence, now: float) -> None:
        """Nobody who goes before it is left outside."""
        max_park_s, name = self.limits.max_park_s, seq.request_id
        aged = seq.state is State.PARKED and preemption.aged(seq, max_park_s, now)
        self.came_aged += aged
        if seq.state is State.WAITING:
            for other in self.book.parking.values():
                after = other.held or self.class_of(other) > self.class_of(seq)
                assert after, f"{name} is let in while {other.request_id} is being parked"
        for other in self.book.parked.values():
            if other is seq or other.held:
                continue
            if preemption.aged(other, max_park_s, now):
                assert aged and self._longer(seq, other), f"{name} passes {other.request_id}, which has waited too long"
            elif not aged and seq.state is State.WAITING:
                assert self.class_of(other) > self.class_of(seq), f"{name} is let in while {other.request_id} is parked"
            elif not aged:
                assert self.class_of(other) >= self.class_of(seq), f"{name} passes {other.request_id} of a better class"
                strict = self.limits.resume_order == "head" and self.class_of(other) == self.class_of(seq)
                assert not strict or self._longer(seq, other), f"{name} passes {other.request_id}, parked before it"
        first = self.book.waiting.first(self.class_of)
        if first is not None and first is not seq and not aged:
            assert self.class_of(first) >= self.class_of(seq), f"{name} passes {first.request_id} of a better class"

    @staticmethod
    def _longer(seq: Sequence, other: Sequence) -> bool:
        return (seq.wants_since, seq.arrival) <= (other.wants_since, other.arrival)


class Demand:
    """What has to fit when somebody is about to be parked, or to come in: noted before anything is done."""

    def __init__(self, watch: Watch, candidate: Sequence | None) -> None:
        book, policy = watch.book, watch.policy
        self.policy = policy
        self.limits = watch.limits
        self.candidate = candidate
        self.running = list(book.running.values())
        self.resuming = list(book.resuming.values())
        self.classes = {seq.request_id: watch.class_of(seq) for seq in (*self.running, *self.resuming)}
        self.pressure_parks = {seq.request_id: seq.pressure_parks for seq in self.running}
        self.held = {seq.request_id for seq in self.running if seq.held}
        self.blocks = {seq.request_id: set(seq.blocks) for seq in (*self.running, *self.resuming, *book.parking.values())}
        self.exhausted = {seq.request_id for seq in self.running if preemption.exhausted(seq)}
        steps, self.line, counted = policy.park_ahead, policy.park_line, self.running
        self.found: set[int] = set()
        self.fresh = 0
        if candidate is not None:
            self.candidate_class = watch.class_of(candidate)
            if not (candidate.state is State.PARKED and candidate.kind == "forced"):
                steps, self.line = policy.enter_ahead, policy.enter_line
            counted = [*self.running, *self.resuming]
            cells = min(len(candidate.tokens) + 1 + self.limits.draft_max, self.limits.sequence_cells)
            cells = max(cells, len(candidate.tokens) + min(steps, candidate.remaining) - 1)
            digests = chain(candidate, preemption.findable(candidate, self.limits), self.limits.block_size)
            self.found = set(book.pool.find(digests))
            self.fresh = self._blocks(cells) - len(self.found)
        self.growth = {seq.request_id: self._growth(seq, steps) for seq in counted}

    def _blocks(self, cells: int) -> int:
        return -(-cells // self.limits.block_size)

    def _growth(self, seq: Sequence, steps: int) -> int:
        last = len(seq.tokens) + max(seq.draft, min(steps, seq.end_len - len(seq.tokens)) - 1)
        return max(0, self._blocks(last) - len(seq.blocks))

    def fits(self, holding: Iterable[Sequence], growing: Iterable[Sequence]) -> bool:
        """Whether the line is kept when those hold blocks and these grow, and the candidate has come in."""
        blocks = set(self.found).union(*(self.blocks[seq.request_id] for seq in holding))
        growth = sum(self.growth.get(seq.request_id, 0) for seq in growing)
        return len(blocks) + self.fresh + growth <= self.line

    def met(self, victims: list[Sequence]) -> bool:
        """Whether it will be met without these, and without those that are leaving already."""
        stay = [seq for seq in (*self.running, *self.resuming) if seq not in victims]
        if self.candidate is not None:
            seats = min(self.limits.slots, self.limits.state_slots or self.limits.slots)
            if len(stay) >= seats:
                return False
            if not stay or preemption.exhausted(self.candidate):
                return not stay
        return self.fits(stay, stay)

    def judge(self, victims: list[Sequence]) -> None:
        assert self.policy.parks, "somebody is parked though parking is off"
        names = [seq.request_id for seq in victims]
        for seq in victims:
            assert seq.request_id not in self.exhausted, f"{seq.request_id} is exhausted and parked by pressure"
            rest = [other for other in victims if other is not seq]
            assert not self.met(rest), f"{names} are parked, and {seq.request_id} need not be"
        candidates = [seq for seq in self.running if seq.request_id not in self.exhausted]
        if self.candidate is None:
            everybody = (seq for seq in (*self.running, *self.resuming) if not seq.held)
            keep = min(everybody, key=lambda seq: (self.classes[seq.request_id], -len(seq.tokens), seq.arrival), default=None)
            assert keep not in victims, f"{keep.request_id} is protected and parked by pressure"
            candidates = [seq for seq in candidates if seq is not keep]
            for seq in candidates:
                needless = seq in victims or self.met(victims) or not self._wins(seq, victims)
                assert needless, f"{names} are parked, not enough, and {seq.request_id} is not"
        else:
            assert self.met(victims), f"{names} are parked for {self.candidate.request_id}, which does not fit then"
            candidates = [seq for seq in candidates if self._displaceable(seq)]
            for seq in victims:
                assert seq in candidates, f"{seq.request_id} is parked for {self.candidate.request_id}, and is no worse"
        for seq in victims:
            if seq.request_id not in self.held:
                number = self.classes[seq.request_id]
                worse = [other for other in candidates if self.classes[other.request_id] > number]
                assert not worse or not self.met(worse), f"{seq.request_id} is parked, and worse ones would do"

    def _wins(self, seq: Sequence, victims: list[Sequence]) -> bool:
        """Whether parking it, too, would win a block."""
        stay = [other for other in (*self.running, *self.resuming) if other not in victims and other is not seq]
        others = set().union(*(self.blocks[other.request_id] for other in stay))
        return bool(self.blocks[seq.request_id] - others) or self.growth[seq.request_id] > 0

    def _displaceable(self, seq: Sequence) -> bool:
        promoted = (self.pressure_parks[seq.request_id] + 1) % 3 == 0  # by the park
        return seq.priority > self.candidate.priority and self.classes[seq.request_id] - promoted > self.candidate_class
