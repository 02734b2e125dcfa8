"""A worker's view of the arena whose slabs are page-locked when they are first used, so that a card can copy to and from them.

Page-locking 64 MiB takes milliseconds, and so does undoing it: a thread of its own does both, in the order they were asked
for, while the loop goes on and asks again. What is used is counted: a slab is never let go of, and the arena never unmapped,
while a copy is under way there.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from gpu_worker.device.cuda import Card, CardError
from wire import arena

log = logging.getLogger("parkade")


@dataclass
class Pin:
    """A slab that is to be page-locked."""

    slab: int
    ok: bool | None = None  # None: not yet


@dataclass
class Drop:
    """A slab that is to be let go of."""

    slab: int


class ArenaPins:
    """Owns the mapping of one arena and what is registered of it. All but its thread's work belongs to the card's thread."""

    def __init__(self, card: Card, fd: int, nbytes: int, slab_bytes: int) -> None:
        """Maps `fd`, which the caller may then close; OSError if that cannot be. Nothing is page-locked yet."""
        self.slab_bytes = slab_bytes
        self._card = card
        self._mapping = arena.Mapping(fd, nbytes)
        self._base = self._mapping.bytes.ctypes.data
        self._pins: dict[int, Pin] = {}  # wanted, by slab; the thread's answer is in them
        self._users: Counter[int] = Counter()  # copies under way, by slab
        self._postponed: set[int] = set()  # slabs to let go of when their last copy is over
        self._dropped: deque[int] = deque()  # filled by the thread
        self._closing = False
        self._jobs: SimpleQueue[Pin | Drop | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="arena-pins", daemon=True)
        self._thread.start()

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of the arena from `offset` on."""
        return self._mapping.view(offset, nbytes)

    # slabs ------------------------------------------------------------------------------------------------------------
    def ready(self, slabs: Iterable[int]) -> bool | None:
        """Whether all of them are page-locked; None: not yet, ask again; False: one cannot be (the next time is a new try)."""
        if not self._thread.is_alive():
            raise CardError("the thread that page-locks the arena has ended")
        answers = [self._answer(slab) for slab in slabs]
        if None in answers:
            return None
        return all(answers)

    def hold(self, slabs: Iterable[int]) -> None:
        """A copy to or from slabs that are ready begins: they stay page-locked until `free`."""
        self._users.update(slabs)

    def free(self, slabs: Iterable[int]) -> None:
        """That copy is over."""
        self._users.subtract(slabs)
        self._users = +self._users
        for slab in self._postponed.difference(self._users):
            self._postponed.remove(slab)
            self._let_go(slab)
        self._end_if_unused()

    def drop(self, slab: int) -> None:
        """Let go of a slab, so that the owner can give its memory back; `dropped` says when that is done."""
        if self._users[slab]:
            self._postponed.add(slab)
        else:
            self._let_go(slab)

    def dropped(self) -> list[int]:
        """Slabs that were let go of since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def close(self) -> None:
        """Undo everything and unmap as soon as no copy is under way; `join` waits for it."""
        self._closing = True
        self._end_if_unused()

    def join(self) -> None:
        """Wait until a closed one, in which no copy is under way, has undone everything."""
        self._thread.join()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to `join`."""
        return not self._thread.is_alive()

    def _answer(self, slab: int) -> bool | None:
        if slab in self._postponed:
            return None
        pin = self._pins.get(slab)
        if pin is None:
            pin = self._pins[slab] = Pin(slab)
            self._jobs.put(pin)
        if pin.ok is False:
            del self._pins[slab]
        return pin.ok

    def _let_go(self, slab: int) -> None:
        self._pins.pop(slab, None)
        self._jobs.put(Drop(slab))

    def _end_if_unused(self) -> None:
        if self._closing and not self._users:
            self._jobs.put(None)

    # the thread -------------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        registered: set[int] = set()
        self._card.use_in_this_thread()
        while (job := self._jobs.get()) is not None:
            match job:
                case Pin(slab):
                    job.ok = slab in registered or self._register(slab)
                    if job.ok:
                        registered.add(slab)
                case Drop(slab):
                    if slab in registered:
                        registered.remove(slab)
                        self._card.unregister(self._base + slab * self.slab_bytes)
                    self._mapping.drop(*self._range(slab))
                    self._dropped.append(slab)
        for slab in registered:
            self._card.unregister(self._base + slab * self.slab_bytes)
        self._mapping.close()

    def _register(self, slab: int) -> bool:
        start, nbytes = self._range(slab)
        try:
            self._card.register(self._base + start, nbytes)  # which also enters the pages into the mapping
        except CardError as error:
            log.warning("%d MiB of the arena cannot be page-locked, so nothing can be saved there: %s", nbytes >> 20, error)
            return False
        return True

    def _range(self, slab: int) -> tuple[int, int]:
        start = slab * self.slab_bytes
        return start, min(self.slab_bytes, self._mapping.nbytes - start)
