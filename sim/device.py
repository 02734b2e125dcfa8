"""The fake device: shadow cells instead of keys and values, and a fake model that computes from the cells it reads.

Each cell holds a hash of every cell before it and of its own token, read through the block table as attention reads. So a cell
that is stale, torn, missing or somebody else's changes every later token, and the text is compared with the reference.
"""

import random
from collections.abc import Iterable, Sequence

from gpu_worker.policy.events import Row, RowResult
from wire.messages import Logprob

VOCAB = 97


def cell_of(before: list[int], token: int) -> int:
    """The cell of `token` after these cells."""
    return hash((tuple(before), token))


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

    def __init__(self, prompt: Sequence[int], limit: int, end_tokens: frozenset[int], min_tokens: int) -> None:
        """Up to `limit` output tokens, the first end token included."""
        cells: list[int] = []
        self.prompt_logprobs = []
        for position, token in enumerate(prompt):
            if position:
                self.prompt_logprobs.append(score(cells[-1], token))
            cells.append(cell_of(cells, token))
        self.output: list[int] = []
        self.reason = "length"
        while len(self.output) < limit:
            token = draw(cells[-1], end_tokens if len(self.output) < min_tokens else ())
            self.output.append(token)
            if token in end_tokens and len(self.output) > min_tokens:
                self.reason = "stop"
                break
            cells.append(cell_of(cells, token))


class Device:
    """`cells[block * block_size + offset]`; poisoned at the start, and never wiped, as device memory is."""

    def __init__(self, num_blocks: int, block_size: int, draft_max: int, rng: random.Random) -> None:
        self.block_size = block_size
        self.draft_max = draft_max
        self.rng = rng
        self.cells = [rng.getrandbits(60) for _ in range(num_blocks * block_size)]

    def read(self, blocks: Sequence[int], count: int) -> list[int]:
        """The first `count` cells behind this block table."""
        size = self.block_size
        found: list[int] = []
        for block in blocks[: -(-count // size)]:
            found += self.cells[block * size : (block + 1) * size]
        return found[:count]

    def run(self, row: Row) -> RowResult:
        """Feed the row, write its cells, draw its tokens, accept the drafts that agree, guess new ones."""
        size = self.block_size
        fed = [*row.tokens[row.start : row.start + row.count], *row.draft]
        assert row.start + len(fed) <= len(row.blocks) * size, f"{row.request_id} has no room for what it feeds"
        cells = self.read(row.blocks, row.start)
        logprobs = []
        for index, token in enumerate(fed):
            position = row.start + index
            cells.append(cell_of(cells, token))
            self.cells[row.blocks[position // size] * size + position % size] = cells[-1]
            if row.prompt_logprobs is not None and index < row.count and position + 1 < row.prompt_len:
                logprobs.append(score(cells[-1], row.tokens[position + 1]))
        if not row.samples:
            return RowResult(row.request_id, prompt_logprobs=logprobs)
        newest = row.start + row.count - 1
        new = [draw(cells[newest], row.banned)]
        for index, guess in enumerate(row.draft):
            if guess != new[-1]:
                break
            new.append(draw(cells[newest + 1 + index], row.banned))
        return RowResult(row.request_id, new, [], logprobs, self._draft(cells[: newest + len(new)], new[-1]))

    def _draft(self, cells: list[int], token: int) -> list[int]:
        """The head's guesses: often right. More of them than asked for, to see them clipped."""
        guesses = []
        for _ in range(self.draft_max + (1 if self.draft_max and self.rng.random() < 0.1 else 0)):
            cells = [*cells, cell_of(cells, token)]
            token = draw(cells[-1]) if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
            guesses.append(token)
        return guesses
