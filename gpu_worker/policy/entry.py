"""Entry: who comes in now, parked or waiting, and who is parked to make room for it."""

from collections.abc import Callable
from itertools import chain

from gpu_worker.policy import preemption
from gpu_worker.policy.book import Book
from gpu_worker.policy.policies import Policy
from gpu_worker.policy.preemption import ClassOf
from gpu_worker.policy.sequence import Sequence


class Entry:
    """Called when something has changed that may let somebody in."""

    def __init__(self, book: Book, policy: Policy) -> None:
        self.book = book
        self.policy = policy
        self.limits = book.limits
        self._class_of: ClassOf = lambda seq: seq.priority
        self._ahead: dict[int, int] = {}  # steps -> blocks that they take of all on the device; of this call

    def let_in(self, class_of: ClassOf, now: float) -> None:
        """Best class first, in a class parked before waiting. Parked ones of a class may pass each other, unless the order is
        strict or one has waited too long; nobody else passes anybody."""
        book, limits = self.book, self.limits
        if self._exhausted_on_device():
            return
        self._class_of = class_of
        self._ahead.clear()
        passed: list[int] = []  # classes of those that could not come in and may be passed
        for seq in preemption.resume_order(book.parked.values(), self._class_of, limits.resume_order, limits.max_park_s, now):
            aged = preemption.aged(seq, limits.max_park_s, now)
            strict = aged or limits.resume_order == "head"
            number = self._class_of(seq)
            if passed and number > passed[-1] or len(passed) == preemption.PASSED_AT_ONCE:
                return
            if not aged and not self._admit(number, now):
                return
            if preemption.stalled(seq):
                book.end_stalled(seq, now)
            elif self._fits(seq):
                if aged:  # from now on it counts as the best, or the next of a better class would park it again at once
                    seq.promoted = max(seq.promoted, seq.priority - book.top_class)
                self._enter(seq, book.resume, now)
                if preemption.exhausted(seq):
                    return
            elif self.make_room(seq, now) or strict or preemption.exhausted(seq) or book.free_slots <= 0:
                return
            else:
                passed.append(number)
        if not passed:
            self._admit(None, now)

    def _admit(self, below: int | None, now: float) -> bool:
        """Let waiting ones of a class below `below` in, or of any, in order, while they fit. Parked ones that come before them
        are back already; those that are still being parked would be the next. False if one of them has to wait."""
        book = self.book
        while (seq := book.waiting.first(self._class_of)) is not None:
            number = self._class_of(seq)
            if below is not None and number >= below:
                return True
            if any(preemption.closes_admission(other, number, self._class_of) for other in book.parking.values()):
                return False
            if not self._fits(seq):
                self.make_room(seq, now)
                return False
            self._enter(seq, book.admit, now)
        return True

    def _fits(self, seq: Sequence) -> bool:
        """Whether it may come in now; with nobody on the device in any case."""
        book = self.book
        if book.free_slots <= 0:
            return False
        if not book.on_device:
            return True
        return not preemption.exhausted(seq) and self._excess(seq) <= 0

    def _excess(self, seq: Sequence) -> int:
        """Blocks by which the line would be passed if it came in."""
        book = self.book
        steps, line = preemption.entry_terms(seq, self.policy)
        if steps not in self._ahead:
            here = chain(book.running.values(), book.resuming.values())
            self._ahead[steps] = preemption.growth(here, book.pool, steps)
        return book.pool.used + self._ahead[steps] + book.cost(seq, steps) - line

    def _enter(self, seq: Sequence, enter: Callable[[Sequence, float], None], now: float) -> None:
        enter(seq, now)
        for steps in self._ahead:
            self._ahead[steps] += preemption.missing(seq, self.book.pool, steps)

    def make_room(self, seq: Sequence, now: float) -> bool:
        """Park those of a worse class for it, if that is enough. True if it can come in when they have left."""
        book = self.book
        worse = preemption.displaced_by(seq, book.running.values(), self._class_of)
        if not self.policy.parks or not (worse or book.parking):
            return False
        steps, _ = preemption.entry_terms(seq, self.policy)
        leaving = book.leaving(kept=book.found(seq))
        over, seats = self._excess(seq) - leaving.freed, 1 - book.slots_to_come
        order = preemption.victims(worse, self._class_of, self.policy, self.limits.protect_after)
        chosen, missing = preemption.enough(order, over, leaving, steps, seats)
        if missing > 0 and len(order) == len(book.running) and not book.resuming:
            chosen = order  # it comes in alone
        elif missing > 0 or len(chosen) < seats:
            return False
        for other in chosen:
            book.park(other, "pressure", now)
        return True

    def _exhausted_on_device(self) -> bool:
        """Nobody joins one that pressure may not park again. It came in alone, so it still is."""
        here = [*self.book.running.values(), *self.book.resuming.values()]
        return len(here) == 1 and preemption.exhausted(here[0])
