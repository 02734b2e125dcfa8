"""Scheduler: events in, plans out. Every decision of the worker is made here, between two steps, and nowhere else."""

from collections.abc import Iterable
from functools import partial
from itertools import chain

from gpu_worker.policy import drafting, preemption
from gpu_worker.policy.book import Book
from gpu_worker.policy.entry import Entry
from gpu_worker.policy.events import (
    CancelRequested,
    Emit,
    Event,
    Finish,
    HostCacheLost,
    LeaseDenied,
    LeaseGranted,
    Loaded,
    ParkRequested,
    Plan,
    ResumeRequested,
    Row,
    RowResult,
    Saved,
    StepDone,
    Submitted,
)
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.plan import growing, rows_of
from gpu_worker.policy.policies import policy_of
from gpu_worker.policy.report import SchedulerLoad, Totals, load_of
from gpu_worker.policy.sequence import Sequence, State, sequence_of, usage_of
from wire.messages import ParkKind, Submit

__all__ = ["Limits", "Scheduler", "SchedulerLoad"]


class Scheduler:
    """Drive it with `handle(event, now)` for whatever has happened and `plan(now)` before each step; `now` in seconds, never
    going back. A plan whose StepDone never comes is forgotten by the next one, and its rows are fed again: a step
    that has been run may be lost only where there is neither a recurrent state nor a head, or the device would be ahead."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.policy = policy_of(limits)
        self.book = Book(limits)
        self.entry = Entry(self.book, self.policy)
        self.totals = Totals(drafted=[0] * limits.draft_max, accepted=[0] * limits.draft_max)
        self._in_step: dict[str, Row] = {}
        self._epoch = 0
        self._to_park: dict[str, ParkKind] = {}  # id -> kind: to be parked at the next step boundary, needed or not
        self.now = 0.0  # of the last event or plan

    @property
    def sequences(self) -> dict[str, Sequence]:
        return self.book.sequences

    @property
    def idle(self) -> bool:
        """No sequence at all, in whatever state."""
        return not self.book.sequences

    def wait_s(self, now: float) -> float | None:
        """0 if another plan could let somebody in now, else None: what changes a plan comes as an event. Time alone only
        promotes, which counts from the next event on: while nobody is on the device, one comes in without it."""
        return 0.0 if self.book.changed else None

    def load(self) -> SchedulerLoad:
        """Occupancy, seats and totals after the last event."""
        return load_of(self.book, self.totals, self.now)

    # events in ------------------------------------------------------------------------------------------------------------
    def handle(self, event: Event, now: float) -> None:
        """Take in what has happened. Answers come with the next plan."""
        self.now = now
        match event:
            case StepDone(rows, epoch, seconds):
                self._step_done(rows, epoch, seconds, now)
            case Submitted(submit):
                self._submitted(submit, now)
            case CancelRequested(request_id):
                if seq := self.sequences.get(request_id):
                    seq.cancelled = True
                    self._reap(seq, now)
            case ParkRequested(request_id, reason):
                if seq := self.sequences.get(request_id):
                    self._hold(seq, reason)
            case ResumeRequested(request_id, reason):
                if seq := self.sequences.get(request_id):
                    self._let_go(seq, reason)
            case LeaseGranted(ask, lease, fill, budget_bytes):
                self.book.granted(ask, lease, self.book.park_cost.answered(ask, fill, budget_bytes))
            case LeaseDenied(ask, reason, fill, budget_bytes):
                self.book.park_cost.answered(ask, fill, budget_bytes)
                self.book.refused(ask, reason, now)
            case Saved(request_id, ok, nbytes, seconds):
                self.book.park_cost.saved(nbytes, seconds)
                self._copied(request_id, State.PARKING, ok, now)
            case Loaded(request_id, ok, nbytes, seconds):
                self.book.park_cost.loaded(nbytes, seconds)
                self._copied(request_id, State.RESUMING, ok, now)
            case HostCacheLost():
                self.book.leases_lost(now)

    def _submitted(self, submit: Submit, now: float) -> None:
        seq = sequence_of(submit, self.limits, now)
        if (old := self.sequences.get(seq.request_id)) is not None:
            old.cancelled = True  # a router never sends an id twice; should it, one Finish ends both
            self._reap(old, now)
        elif seq.prompt_len == 0:
            self._refuse(seq, now, "bad_request", "the prompt has no tokens")
        elif seq.prompt_len + 1 > self.limits.sequence_cells:
            self._refuse(seq, now, "context_length_exceeded", self._too_long(seq))
        elif seq.generated and seq.tokens[-1] in seq.end_tokens and len(seq.tokens) > seq.min_len:
            self.book.actions.append(Finish(seq.request_id, "stop", usage_of(seq, now)))
        elif seq.remaining <= 0:
            self.book.actions.append(Finish(seq.request_id, "length", usage_of(seq, now)))
        else:
            self.book.add(seq)

    def _refuse(self, seq: Sequence, now: float, code: str, error: str) -> None:
        self.book.actions.append(Finish(seq.request_id, "error", usage_of(seq, now), error, code))

    def _too_long(self, seq: Sequence) -> str:
        limits = self.limits
        return (
            f"the prompt has {seq.prompt_len} tokens and needs one more cell for its first output token; "
            f"a sequence may use {limits.sequence_cells} cells (pool {limits.pool_cells}, context {limits.max_context})"
        )

    def _hold(self, seq: Sequence, reason: str) -> None:
        """It may not run until every reason is gone. One that waits is set aside; its siblings need not wait for it."""
        seq.held.add(reason)
        self.book.changed = True
        if seq.state is State.WAITING:
            self.book.requeue(seq)
        else:
            self._to_park[seq.request_id] = "explicit"
        self.book.release_followers(seq.request_id)

    def _let_go(self, seq: Sequence, reason: str) -> None:
        was_held = bool(seq.held)
        seq.held.discard(reason)
        self.book.changed = True
        if was_held and not seq.held:
            seq.wants_since = self.now
            if self._to_park.get(seq.request_id) == "explicit":
                del self._to_park[seq.request_id]
            if seq.state is State.WAITING:
                self.book.requeue(seq)

    def _copied(self, request_id: str, state: State, ok: bool, now: float) -> None:
        """A copy has ended; only now may its blocks change hands."""
        seq = self.sequences.get(request_id)
        if seq is None or seq.state is not state or not seq.copying:
            return
        if seq.cancelled:
            seq.copying = False
            self.book.finish(seq, "cancelled", now)
        elif state is State.PARKING:
            self.book.saved(seq, ok, now)
        else:
            self.book.loaded(seq, ok, now)

    def _reap(self, seq: Sequence, now: float) -> None:
        """End a cancelled sequence as soon as no step and no copy touches its blocks."""
        if seq.cancelled and not seq.copying and seq.request_id not in self._in_step:
            self.book.finish(seq, "cancelled", now)

    # results of a step ----------------------------------------------------------------------------------------------------
    def _step_done(self, results: list[RowResult], epoch: int, seconds: float, now: float) -> None:
        """Apply each result once; those of a forgotten plan not at all."""
        if epoch != self._epoch or not self._in_step:
            return
        self.book.park_cost.stepped(self._in_step.values(), seconds)
        step, self._in_step = self._in_step, {}
        self.totals.steps += 1
        for result in results:
            row = step.pop(result.request_id, None)
            if row is None:
                continue
            seq = self.sequences[result.request_id]
            if seq.cancelled:
                self._reap(seq, now)
            elif result.error:
                self.book.finish(seq, "error", now, result.error, "compute_error")
            else:
                self._advance(seq, row, result, now)
        for request_id in step:  # left out of the results: fed again
            seq = self.sequences[request_id]
            seq.restarts += 1
            self._reap(seq, now)
            if not seq.cancelled and preemption.stalled(seq):
                self.book.end_stalled(seq, now)

    def _advance(self, seq: Sequence, row: Row, result: RowResult, now: float) -> None:
        """`computed` catches up with `tokens`; drawn tokens are cut, delivered and may end the sequence."""
        self._count_fed(seq, row)
        offset = seq.generated
        new = self._cut(seq, result.tokens) if row.samples else []
        if self.limits.draft_max and row.count == 1 and new:
            self._count_drafts(seq, row.draft, min(row.draft, len(result.tokens) - 1, len(new)))
        seq.draft = 0
        scored_from = seq.scored
        scored = self._new_prompt_logprobs(seq, row, result)
        seq.tokens += new
        seq.computed = min(row.start + row.count + max(0, len(new) - 1), len(seq.tokens) - 1)
        seq.high_computed = max(seq.high_computed, seq.computed, row.start + row.count)
        self.book.publish(seq)
        if new or scored:
            logprobs = result.logprobs[: len(new)]
            self.book.actions.append(Emit(seq.request_id, offset, new, logprobs, scored_from + 1 if scored else 0, scored))
        if not seq.prompt_done and row.start + row.count >= seq.prompt_len:
            seq.prompt_done = True
            self.book.release_followers(seq.request_id)
        if new:
            self._after_tokens(seq, now)

    def _after_tokens(self, seq: Sequence, now: float) -> None:
        seq.replaying = False
        seq.restarts = 0
        known = len(seq.tokens)
        if seq.tokens[-1] in seq.end_tokens and known > seq.min_len:
            self.book.finish(seq, "stop", now)  # wins over a park
        elif seq.remaining <= 0:
            self.book.finish(seq, "length", now)
        elif 0 < seq.next_forced_len <= known:
            every = self.limits.park_every
            seq.next_forced_len = seq.prompt_len + (seq.generated // every + 1) * every
            self._to_park.setdefault(seq.request_id, "forced")

    def _count_drafts(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A draft that agrees behind an end token is not delivered, and so not accepted."""
        totals = self.totals
        for position in range(drafted):
            totals.drafted[position] += 1
            totals.accepted[position] += position < accepted
        seq.drafted += drafted
        seq.accepted += accepted
        drafting.learn(seq, drafted, accepted)

    def _count_fed(self, seq: Sequence, row: Row) -> None:
        recomputed = max(0, min(row.start + row.count, seq.high_computed) - row.start)
        seq.recomputed += recomputed
        self.totals.recomputed_tokens += recomputed
        self.totals.prefill_tokens += row.count - row.samples

    def _cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """What may be delivered of an accepted run: up to its first end token, that one included, and no more than it may get."""
        new = tokens[: seq.remaining]
        if len(new) == 1:
            return new
        for index, token in enumerate(new):
            if token in seq.end_tokens and len(seq.tokens) + index >= seq.min_len:
                return new[: index + 1]
        return new

    def _new_prompt_logprobs(self, seq: Sequence, row: Row, result: RowResult) -> list:
        """Each prompt position is delivered once, also when it is computed again after a park."""
        if row.prompt_logprobs is None:
            return []
        new = result.prompt_logprobs[seq.scored - row.start :]
        seq.scored += len(new)
        return new

    # plans out ------------------------------------------------------------------------------------------------------------
    def plan(self, now: float) -> Plan:
        """Everything that must be done now, and the rows of the next step; blocks for all of them are reserved."""
        self.now = now
        self._in_step = {}
        book = self.book
        if self._to_park:
            self._park_requested(now)
        if self.limits.draft_max:
            drafting.assign(book.running.values(), self.limits)
        short = growing(book.running.values(), self.limits.block_size) if book.running else []
        # one step ahead nobody else needs a block
        may_grow = short if self.policy.park_ahead == 1 else book.running.values()
        if may_grow and self._shortfall(may_grow) > 0:
            short = self._relieve(short, now)
        if book.changed:
            book.changed = False
            self.entry.let_in(partial(preemption.class_of, top=book.top_class, now=now), now)
            short = [seq for seq in short if seq.state is State.RUNNING]  # one may have been parked for a better class
            if self.limits.draft_max:
                drafting.share_rows(book.running.values(), self.limits)
        without_room = self._grow(short, now) if short else []
        rows = rows_of(book.running.values(), without_room, self.limits.step_budget, self._rank) if book.running else []
        if rows:
            self._epoch += 1
            self._in_step = {row.request_id: row for row in rows}
        actions, book.actions = book.actions, []
        return Plan(actions, rows, self._epoch)

    def _class_of(self, seq: Sequence) -> int:
        return preemption.class_of(seq, self.book.top_class, self.now)

    def _rank(self, seq: Sequence) -> tuple[int, int]:
        return self._class_of(seq), seq.arrival

    def _shortfall(self, running: Iterable[Sequence]) -> int:
        """Blocks to win back so that what `running`, all that may grow, takes in the next steps stays within the line; 0 or less:
        none. What the parks under way will free is counted, so that no more are parked than needed. Sources: watermark; bug
        reports of neighbours."""
        over = self.book.pool.used + preemption.growth(running, self.book.pool, self.policy.park_ahead) - self.policy.park_line
        return over - self.book.leaving().freed if over > 0 else 0

    def _park_requested(self, now: float) -> None:
        """Explicit and forced parks take anybody, the largest and the only one too, and count toward no bound."""
        wanted, self._to_park = self._to_park, {}
        for request_id, kind in wanted.items():
            seq = self.sequences.get(request_id)
            if seq is None:
                continue
            if seq.state is State.RUNNING:
                self.book.park(seq, kind, now)
            elif seq.state is State.RESUMING:
                self._to_park[request_id] = kind

    def _relieve(self, short: list[Sequence], now: float) -> list[Sequence]:
        """Keep what the next steps take within the line: give up drafts, then park. Returns those that still need blocks."""
        book, policy, limits = self.book, self.policy, self.limits
        for seq in short:
            drafting.cut_to(seq, book.pool.blocks_for(len(seq.tokens)), limits.block_size)
        over = self._shortfall(book.running.values())
        if over > 0 and policy.parks:
            keep = preemption.protected(chain(book.running.values(), book.resuming.values()), self._class_of)
            others = (seq for seq in book.running.values() if seq is not keep)
            order = preemption.victims(others, self._class_of, policy, limits.protect_after)
            for seq in preemption.enough(order, over, book.leaving(), policy.park_ahead)[0]:
                book.park(seq, "pressure", now)
        return growing((seq for seq in short if seq.state is State.RUNNING), limits.block_size)

    def _grow(self, short: list[Sequence], now: float) -> list[Sequence]:
        """Give blocks to those that need them. If there are not enough, the protected one comes first and the rest sit out: a
        park or a load under way will make room. Without parking (`off`) they fail. Returns those without room."""
        book = self.book
        if preemption.growth(short, book.pool) <= book.pool.available:
            for seq in short:
                book.grow(seq)
            return []
        without_room = []
        for seq in sorted(short, key=lambda seq: (self._class_of(seq), -len(seq.tokens), seq.arrival)):
            if preemption.missing(seq, book.pool) > book.pool.available:
                drafting.cut_to(seq, book.pool.blocks_for(len(seq.tokens)), self.limits.block_size)
            if preemption.missing(seq, book.pool) <= book.pool.available:
                book.grow(seq)
            elif not self.policy.parks:
                book.finish(seq, "error", now, self._full(seq), "kv_cache_full")
            else:
                seq.draft = 0
                without_room.append(seq)
        return without_room

    def _full(self, seq: Sequence) -> str:
        pool = self.book.pool
        return (
            f"the key-value cache is full: {pool.used * pool.block_size} of {self.limits.pool_cells} cells are in use, and this "
            f"sequence has {len(seq.tokens)} tokens and needs a block of {pool.block_size} more; parking is off (--policy off)"
        )
