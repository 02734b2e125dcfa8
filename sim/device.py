"""The fake device: shadow cells instead of keys and values, and a fake model that computes from the cells it reads.

Each cell holds a hash of every cell before it and of its own token, read through the block table as attention reads. So a cell
that is stale, torn, missing or somebody else's changes every later token, and the text is compared with the reference. A model
with a recurrent state mixes that into each cell (see state.py), so a wrong state changes the text as well.
"""

import random
from collections.abc import Iterable, Sequence

from gpu_worker.policy.events import Row, RowResult
from sim.state import NO_STATE, FakeState, entry_of, state_after
from wire.messages import Logprob

VOCAB = 97


def cell_of(before: list[int], token: int, state: int = NO_STATE) -> int:
    """The cell of `token` after these cells, and after the recurrent state before it."""
    return hash((tuple(before), token, state))


def draw(cell: int, banned: Iterable[int] = ()) -> int:
    """The fake model's next token after this cell."""
    token = cell % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def score(cell: int, token: int) -> Logprob:
    """The fake log probability of `token` after this cell."""
    return Logprob(token, -float(hash((cell, token)) % 10007))


class Reference:
    """What the model says when nobody is ever parked: the text and the prompt's log probabilities."""

    def __init__(
        self, prompt: Sequence[int], limit: int, end_tokens: frozenset[int], min_tokens: int, recurrent: bool = False
    ) -> None:
        """Up to `limit` output tokens, the first end token included."""
        self._recurrent = recurrent
        self._state = NO_STATE
        self._cells: list[int] = []
        self.prompt_logprobs = []
        for position, token in enumerate(prompt):
            if position:
                self.prompt_logprobs.append(score(self._cells[-1], token))
            self._feed(token)
        self.output: list[int] = []
        self.reason = "length"
        while len(self.output) < limit:
            token = draw(self._cells[-1], end_tokens if len(self.output) < min_tokens else ())
            self.output.append(token)
            if token in end_tokens and len(self.output) > min_tokens:
                self.reason = "stop"
                break
            self._feed(token)

    def _feed(self, token: int) -> None:
        self._cells.append(cell_of(self._cells, token, self._state))
        if self._recurrent:
            self._state = state_after(self._state, entry_of(self._state, token))


class Device:
    """`cells[block * block_size + offset]`, and in `hidden[block]` the hidden row of the newest cell of each block; poisoned at
    the start, and never wiped, as device memory is. The fake hidden row of a cell is the cell."""

    def __init__(
        self, num_blocks: int, block_size: int, draft_max: int, rng: random.Random, state_slots: int | None = None
    ) -> None:
        self.block_size = block_size
        self.draft_max = draft_max
        self.rng = rng
        self.cells = [rng.getrandbits(60) for _ in range(num_blocks * block_size)]
        self.hidden = [rng.getrandbits(60) for _ in range(num_blocks)]
        self.states = None if state_slots is None else [FakeState(draft_max, rng) for _ in range(state_slots)]

    def blank_state(self) -> FakeState:
        """Room for a copy of a state."""
        return FakeState(self.draft_max, self.rng)

    def read(self, blocks: Sequence[int], count: int) -> list[int]:
        """The first `count` cells behind this block table."""
        size = self.block_size
        found: list[int] = []
        for block in blocks[: -(-count // size)]:
            found += self.cells[block * size : (block + 1) * size]
        return found[:count]

    def run(self, row: Row) -> RowResult:
        """Draft, feed the row and its drafts, write the cells, draw the tokens, and accept the drafts that agree."""
        size = self.block_size
        assert row.start + row.count + row.draft <= len(row.blocks) * size, f"{row.request_id} has no room for what it feeds"
        cells = self.read(row.blocks, row.start)
        drafts = self._draft(row, cells)
        fed = [*row.tokens[row.start : row.start + row.count], *drafts]
        logprobs = []
        for index, (token, state) in enumerate(zip(fed, self._states(row, fed), strict=True)):
            position = row.start + index
            cells.append(cell_of(cells, token, state))
            self._write(row, position, cells[-1])
            if row.prompt_logprobs is not None and index < row.count and position + 1 < row.prompt_len:
                logprobs.append(score(cells[-1], row.tokens[position + 1]))
        if not row.samples:
            return RowResult(row.request_id, prompt_logprobs=logprobs)
        newest = row.start + row.count - 1
        new = [draw(cells[newest], row.banned)]
        for index, draft in enumerate(drafts):
            if draft != new[-1]:
                break
            new.append(draw(cells[newest + 1 + index], row.banned))
        last = newest + len(new) - 1
        self.hidden[row.blocks[last // size]] = cells[last]  # what refused drafts have left there is not the newest cell's
        return RowResult(row.request_id, new, [], logprobs)

    def _write(self, row: Row, position: int, cell: int) -> None:
        size = self.block_size
        block = row.blocks[position // size]
        self.cells[block * size + position % size] = cell
        self.hidden[block] = cell

    def _states(self, row: Row, fed: list[int]) -> list[int]:
        """The recurrent state before each fed token."""
        if self.states is None:
            assert row.state_slot == -1, f"{row.request_id} has a state slot and the model no state"
            return [NO_STATE] * len(fed)
        return self.states[row.state_slot].run(row.start, fed, row.start + row.count)

    def _draft(self, row: Row, cells: list[int]) -> list[int]:
        """The head's drafts, each right seven times in ten. It starts from the hidden row of the newest cell."""
        if not row.draft:
            return []
        assert row.start and row.count == 1 and row.samples, f"{row.request_id} drafts where there is nothing to start from"
        newest = self.hidden[row.blocks[(row.start - 1) // self.block_size]]
        assert newest == cells[-1], f"{row.request_id} drafts from a hidden row that is not its newest cell's"
        state = NO_STATE if self.states is None else self.states[row.state_slot].before(row.start)
        token = row.tokens[row.start]
        drafts = []
        for _ in range(row.draft):
            cells = [*cells, cell_of(cells, token, state)]
            if self.states is not None:
                state = state_after(state, entry_of(state, token))
            token = draw(cells[-1]) if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
            drafts.append(token)
        return drafts
