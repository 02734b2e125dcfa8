"""The fake recurrent state of one slot: a hash chain kept as the device keeps it, a state at a multiple of FOLD and a log since.

The rule is that of gpu_worker/device/state_cache.py. Nothing here checks whose state it is: a state of another sequence, of
another position or half of a copy gives other numbers, and the text shows it.
"""

import random
from collections.abc import Sequence

FOLD = 4  # tokens between two states; few, so that schedules see many folds
NO_STATE = 0  # before position 0, and of models without one


def entry_of(before: int, token: int) -> int:
    """What the log keeps of `token` behind this state."""
    return hash((1, before, token))


def state_after(before: int, entry: int) -> int:
    """The state that takes in one entry of the log."""
    return hash((2, before, entry))


class FakeState:
    """`folded` tokens are in `base`; the entry of position p lies in `log[p % len(log)]`. Poisoned, as device memory is."""

    def __init__(self, draft_max: int, rng: random.Random) -> None:
        self.base = rng.getrandbits(60)
        self.folded = FOLD * rng.randrange(8)
        self.log = [rng.getrandbits(60) for _ in range(FOLD + draft_max)]

    def before(self, position: int) -> int:
        """The state that the token at `position` sees."""
        state = NO_STATE if position == 0 else self.base
        for at in range(0 if position == 0 else self.folded, position):
            state = state_after(state, self.log[at % len(self.log)])
        return state

    def run(self, start: int, fed: Sequence[int], known: int) -> list[int]:
        """Feed these tokens from position `start` on; those at `known` and behind are drafts. The state before each."""
        if start == 0:
            self.base, self.folded = NO_STATE, 0
        while self.folded < FOLD * (start // FOLD):
            self.base, self.folded = self._fold(self.base, self.folded)
        base, folded = self.base, self.folded  # what this step reads
        before = []
        for position, token in enumerate(fed, start):
            if position % FOLD == 0 and position > start:
                base, folded = self._fold(base, folded)
                if position <= known:
                    self.base, self.folded = base, folded
            state = base
            for at in range(folded, position):
                state = state_after(state, self.log[at % len(self.log)])
            before.append(state)
            self.log[position % len(self.log)] = entry_of(state, token)
        return before

    def _fold(self, base: int, folded: int) -> tuple[int, int]:
        for at in range(folded, folded + FOLD):
            base = state_after(base, self.log[at % len(self.log)])
        return base, folded + FOLD

    def copy_half(self, source: "FakeState", first: bool) -> None:
        """Take over the first or the second half of another's bytes."""
        if first:
            self.base = source.base
            self.log[: len(self.log) // 2] = source.log[: len(self.log) // 2]
        else:
            self.folded = source.folded
            self.log[len(self.log) // 2 :] = source.log[len(self.log) // 2 :]
