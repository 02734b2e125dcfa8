"""Waiting: the sequences that were never admitted, by class and arrival; finding the first costs the same for any number."""

from bisect import bisect_left, insort
from collections.abc import Callable

from gpu_worker.policy.sequence import Sequence

_Entry = tuple[int, str, Sequence]  # arrival, id, itself; the id breaks ties before sequences would be compared


class Waiting:
    """Those that may be admitted, a sorted list for each class, and those set aside: held, or waiting for a sibling's prompt."""

    def __init__(self) -> None:
        self._ready: dict[int, list[_Entry]] = {}
        self._aside: dict[str, Sequence] = {}
        self._followers: dict[str, list[str]] = {}  # leader's id -> ids of those set aside for it
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self._aside)

    def add(self, seq: Sequence) -> None:
        insort(self._ready.setdefault(seq.priority, []), (seq.arrival, seq.request_id, seq))
        self._count += 1

    def set_aside(self, seq: Sequence) -> None:
        self._aside[seq.request_id] = seq

    def set_aside_for(self, seq: Sequence, leader_id: str) -> None:
        """Until `followers(leader_id)` asks for it."""
        self._aside[seq.request_id] = seq
        self._followers.setdefault(leader_id, []).append(seq.request_id)

    def followers(self, leader_id: str) -> list[Sequence]:
        """Those still set aside for this leader; asked for once, when it has computed its prompt, is held or gone."""
        if not self._followers:
            return []
        return [self._aside[request_id] for request_id in self._followers.pop(leader_id, ()) if request_id in self._aside]

    def remove(self, seq: Sequence) -> None:
        """From wherever it waits."""
        if self._aside.pop(seq.request_id, None) is not None:
            return
        entries = self._ready[seq.priority]
        del entries[bisect_left(entries, (seq.arrival, seq.request_id))]
        self._count -= 1
        if not entries:
            del self._ready[seq.priority]

    def first(self, class_of: Callable[[Sequence], int]) -> Sequence | None:
        """The one to be admitted next: best class (a class is promoted as its oldest member is), then original arrival."""
        heads = [entries[0][2] for entries in self._ready.values()]
        if len(heads) == 1:
            return heads[0]
        return min(heads, key=lambda seq: (class_of(seq), seq.arrival), default=None)
