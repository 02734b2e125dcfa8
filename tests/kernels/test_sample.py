"""Draws, drafts and their judgement on the card are those of model/sampler.py, token for token."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from gpu_worker.device.draw_params import DRAW_BYTES, DrawRecord, DrawTable
from gpu_worker.model import sampler
from gpu_worker.model.sampler import Candidates, SampleRow
from tests.kernels import harness
from wire.messages import Sampling

FAILED = {"the model's logits are not finite": -1, "every token is banned": -2}


@dataclass
class Sequence:
    """A sequence of a step: tokens[:end] and drafts, one draw behind each of the drafts and one before."""

    sampling: Sampling
    tokens: list[int]
    prompt_len: int
    drafts: list[int] = field(default_factory=list)
    banned: tuple[int, ...] = ()
    end: int = 0

    def __post_init__(self) -> None:
        self.end = self.end or len(self.tokens)

    def row(self, depth: int) -> SampleRow:
        return SampleRow(self.sampling, self.end + depth, self.tokens, self.prompt_len, self.banned, self.drafts[:depth])


class Step:
    """Records, lists and scratch rows of some sequences, as numpy arrays at addresses that the kernels are given."""

    def __init__(self, sequences: list[Sequence], columns: int, records: list[DrawRecord] | None = None) -> None:
        self.params = np.full((len(sequences), DRAW_BYTES), 0xFF, np.uint8)
        self._lists: list[np.ndarray] = []
        table = DrawTable(self.params, self._allocate)
        records = records or [DrawRecord(s.sampling, s.prompt_len) for s in sequences]
        self.changed = []
        for index, (s, record) in enumerate(zip(sequences, records, strict=True)):
            self.changed.append(np.full((1 + len(s.drafts), columns), np.nan, np.float32))
            table.put(index, record, s.tokens, s.end, s.banned, self.changed[-1].ctypes.data)
        table.place()

    def _allocate(self, count: int) -> tuple[np.ndarray, int]:
        self._lists.append(np.full(count, -1, np.int32))
        return self._lists[-1], self._lists[-1].ctypes.data


def drawn(logits: np.ndarray, sequences: list[Sequence], padding: int = 0) -> list[int]:
    """Tokens that the kernel draws; logits [draws][columns], a sequence's draws one behind another."""
    step = Step(sequences, logits.shape[1])
    tokens, positions, begin, count, rows, seqs = [], [], [], [], [], []
    for index, s in enumerate(sequences):
        fed = 1 + index % 2  # some have fed more than their newest token
        begin.append(len(tokens))
        tokens += [*s.tokens[s.end - fed : s.end], *s.drafts]
        positions += range(s.end - fed, s.end + len(s.drafts))
        count.append(fed + len(s.drafts))
        rows += range(begin[-1] + fed - 1, len(tokens))
        seqs += [index] * (1 + len(s.drafts))
    order = [*range(len(rows)), *[-1] * padding]
    found = np.full(len(order), -9, np.int32)
    drafts = [len(s.drafts) for s in sequences]
    rows += [-1, 0][: padding and 2] + [-1] * (padding - 2)
    seqs += [0, -1][: padding and 2] + [-1] * (padding - 2)
    ints = [np.array(a, np.int32) for a in (tokens, positions, begin, count, drafts, rows, seqs)]
    args = [found, logits, logits.shape[1], step.params, *ints]
    harness.run("sample", "draw", (len(order),), 1024, args)
    assert (found[len(logits) :] == -9).all()
    return found[: len(logits)].tolist()


def expected(logits: np.ndarray, sequences: list[Sequence]) -> list[int]:
    places = [(s, depth) for s in sequences for depth in range(1 + len(s.drafts))]
    results = [sampler.draw(row, s.row(depth)) for row, (s, depth) in zip(logits, places, strict=True)]
    return [FAILED[one.error] if one.error else one.token for one in results]


def logits_like(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Most far below a few, as a model has them."""
    peaks = np.where(rng.random((rows, columns)) < 20 / columns, rng.exponential(4, (rows, columns)), 0)
    return (rng.normal(-6, 2.5, (rows, columns)) + 3 * peaks).astype(np.float32)


def alone(logits: np.ndarray, *samplings: Sampling) -> None:
    """A row of logits, drawn with each of the settings."""
    sequences = [Sequence(s, list(range(5, 5 + 7 * i + 3)), 2) for i, s in enumerate(samplings)]
    rows = np.stack([logits] * len(sequences))
    assert drawn(rows, sequences) == expected(rows, sequences)


@pytest.mark.parametrize("columns", [97, 1025, 9001])
def test_draws_equal_the_twin(schedule, columns):
    rng = np.random.default_rng(columns)
    settings = [
        Sampling(temperature=0),
        Sampling(temperature=1.0, seed=-3),
        Sampling(temperature=0.7, top_k=20, top_p=0.8, seed=2**63 - 1),
        Sampling(temperature=0.6, top_p=0.95, seed=7),
        Sampling(temperature=1.3, min_p=0.02, seed=8),
    ]
    sequences = [Sequence(s, rng.integers(0, columns, 40).tolist(), 30) for s in settings]
    for s in sequences[1:3]:
        s.drafts = rng.integers(0, columns, 2).tolist()
    rows = logits_like(rng, sum(1 + len(s.drafts) for s in sequences), columns)
    assert drawn(rows, sequences, padding=3) == expected(rows, sequences)
