"""Draws, drafts and their judgement on the card are those of model/sampler.py, token for token."""

import struct
from dataclasses import dataclass, field

import numpy as np
import pytest

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

    def __init__(self, sequences: list[Sequence], columns: int) -> None:
        self.params = np.full((len(sequences), DRAW_BYTES), 0xFF, np.uint8)
        self._lists: list[np.ndarray] = []
        table = DrawTable(self.params, self._allocate)
        self.changed = []
        for index, s in enumerate(sequences):
            self.changed.append(harness.reachable(np.full((1 + len(s.drafts), columns), np.nan, np.float32)))
            table.put(index, DrawRecord(s.sampling, s.prompt_len), s.tokens, s.end, s.banned, self.changed[-1].ctypes.data)
        table.place()

    def _allocate(self, count: int) -> tuple[np.ndarray, int]:
        self._lists.append(harness.reachable(np.full(count, -1, np.int32)))
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


def test_cuts_among_equal_logits(schedule):
    """Ties at the edge of a filter stay by the lower id."""
    rng = np.random.default_rng(1)
    few = rng.choice(np.float32([0, -0.25, -1, -2.5]), 1500)
    alone(
        few,
        *(Sampling(temperature=1.0, top_k=k, seed=k) for k in (1, 2, 300, 700, 1499)),
        *(Sampling(temperature=1.0, top_p=p, seed=3) for p in (1e-9, 0.2, 0.5, 0.9, 1 - 2**-53)),
        *(Sampling(temperature=1.0, top_k=700, top_p=p, seed=4) for p in (0.3, 0.9, 0.999)),  # top-p cuts what top-k has cut
        Sampling(temperature=1.0, top_k=2000, top_p=0.999, min_p=0.3, seed=5),
    )


def test_which_of_equal_logits_stay():
    """All logits equal: the seeds draw from the first ids only, and from all of these."""
    for sampling, left in [({"top_k": 2}, 2), ({"top_k": 6, "top_p": 0.5}, 3)]:
        sequences = [Sequence(Sampling(seed=seed, **sampling), [1, 2], 1) for seed in range(12)]
        tokens = drawn(np.zeros((12, 20), np.float32), sequences)
        assert set(tokens) == set(range(left))


def test_nobody_fits_into_the_list(schedule):
    """More equal logits than keys fit into shared memory, so that the whole search reads the row."""
    flat = np.zeros(9000, np.float32)
    flat[::7] = -1
    alone(flat, Sampling(seed=1, top_k=8500), Sampling(seed=2, top_k=7900, top_p=0.77), Sampling(seed=3, top_p=0.5))


def test_min_p_is_exact_to_the_bit(schedule):
    """A column at the limit stays, the next float below it goes."""
    least = np.float32(np.log(0.25))
    for value, stays in [(least, True), (np.nextafter(least, np.float32(-9)), False)]:
        row = np.full(40, -50, np.float32)
        row[3], row[8] = 0, value
        sequences = [Sequence(Sampling(min_p=0.25, seed=seed), [1, 2], 1) for seed in range(20)]
        rows = np.stack([row] * 20)
        tokens = drawn(rows, sequences)
        assert (8 in tokens) == stays
        assert tokens == expected(rows, sequences)
    alone(np.float32([1, 2, 2, 0]), *(Sampling(min_p=1.0, seed=seed) for seed in range(4)))


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")
def test_extreme_settings(schedule):
    rng = np.random.default_rng(2)
    wild = rng.normal(0, 30, 2100).astype(np.float32)
    wild[rng.random(2100) < 0.3] = -np.inf
    wild[5] = wild[77] = wild.max() + np.float32(1)
    wild[9] = -3e38
    alone(
        wild,
        Sampling(temperature=1e-30, seed=1),  # all distances but those of equal logits overflow
        Sampling(temperature=1e-30, seed=1, top_k=40, top_p=0.9),
        Sampling(temperature=100.0, seed=2, top_p=0.99),
        Sampling(temperature=100.0, seed=3, top_k=1800, min_p=1e-6),
        Sampling(temperature=0.01, seed=4, top_k=2000, top_p=0.5, min_p=0.5),
        Sampling(temperature=1.0, seed=-(2**63), top_k=2**31 - 1),
    )
    alone(np.zeros(1, np.float32), Sampling(seed=1, top_k=1, top_p=0.5), Sampling(temperature=0))
    zeros = np.float32([-1, -0.0, 0.0, -0.0])
    alone(zeros, Sampling(temperature=0), Sampling(seed=4, top_k=2))


def test_who_is_far_behind_can_win(schedule):
    """Columns 9 below the best: each has little chance, all of them together win about every other draw."""
    row = np.full(4001, -9, np.float32)
    row[1234] = 0
    sequences = [Sequence(Sampling(seed=seed), [1, 2], 1) for seed in range(20)]
    rows = np.stack([row] * 20)
    tokens = drawn(rows, sequences)
    assert tokens == expected(rows, sequences)
    assert 3 < sum(token != 1234 for token in tokens) < 17


def test_penalties_bias_and_bans(schedule):
    rng = np.random.default_rng(3)
    columns, sequences = 1100, []
    for i in range(6):
        sampling = Sampling(
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            repetition_penalty=(1.0, 1.3, 0.8)[i % 3],
            presence_penalty=(0.0, 0.7)[i // 2 % 2],
            frequency_penalty=(0.0, 0.31, -0.2)[i // 2],
            logit_bias={int(t): float(b) for t, b in zip(rng.integers(0, 1300, 30), rng.normal(0, 3, 30), strict=True)}
            if i
            else {},
        )
        tokens = rng.integers(0, 60 if i % 2 else 1300, 90).tolist()  # some ids have no logit
        drafts = [tokens[-1], 7, 7, int(rng.integers(0, 1100)), 7][: i % 6]  # some twice, some seen before
        sequences.append(Sequence(sampling, tokens, 40, drafts, tuple(range(0, 1200, 5 + i)) if i > 2 else (), end=90 - i % 2))
    rows = rng.normal(0, 1.5, (sum(1 + len(s.drafts) for s in sequences), columns)).astype(np.float32)
    raw = rows.copy()
    assert drawn(rows, sequences) == expected(rows, sequences)
    assert (rows == raw).all()  # logprobs are of the logits as the model gave them


def test_changed_logits_equal_the_twin_to_the_bit(schedule):
    rng = np.random.default_rng(4)
    sampling = Sampling(repetition_penalty=1.37, presence_penalty=0.3, frequency_penalty=0.123, logit_bias={1000: 0.7, 5: -1.1})
    s = Sequence(sampling, rng.integers(0, 40, 300).tolist(), 100, [5, 5, 1000], banned=(17,))
    rows = rng.normal(0, 0.1, (4, 1001)).astype(np.float32)
    step = Step([s], 1001)
    ints = ([*s.tokens[-1:], *s.drafts], range(299, 303), [0], [4], [3], range(4), [0] * 4)
    args = [np.zeros(4, np.int32), rows, 1001, step.params, *(np.array(a, np.int32) for a in ints)]
    harness.run("sample", "draw", (4,), 1024, args)
    for depth in range(4):
        twin = sampler._changed(rows[depth], s.row(depth), None)
        assert step.changed[0][depth].tobytes() == twin.tobytes()


def test_failures_are_values(schedule):
    nan, infinite, nothing, good = np.zeros((4, 600), np.float32)
    nan[500] = np.nan
    infinite[3] = np.inf
    nothing[:] = -np.inf
    hidden_nan = good.copy()
    hidden_nan[9] = np.nan  # banned, and yet the logits are not finite
    everything = tuple(range(600))
    rows = np.stack([nan, infinite, nothing, good, hidden_nan, good])
    bans = [(), (), (), everything, (9,), everything[1:]]
    for temperature in (0.0, 1.0):
        settings = Sampling(temperature=temperature, seed=1)
        sequences = [Sequence(settings, [1, 2], 1, banned=banned) for banned in bans]
        assert drawn(rows, sequences) == expected(rows, sequences) == [-1, -1, -1, -2, -1, 0]


def test_lists_follow_a_request():
    """A record that has gone along with a request says what one made anew says."""
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, 400, 500).tolist()
    for penalty in (1.1, 1.0):  # without it, the prompt does not count
        sampling = Sampling(temperature=0.5, seed=1, repetition_penalty=penalty, frequency_penalty=0.2)
        record = DrawRecord(sampling, 100)
        for end in (100, 101, 104, 300, 300, 500):
            fresh = DrawRecord(sampling, 100).seen(tokens[:end], end)
            assert record.seen(tokens, end).tolist() == fresh.tolist()
            counts = {int(token): int(count) for token, count in fresh}
            assert counts == {t: tokens[100:end].count(t) for t in tokens[0 if penalty > 1 else 100 : end]}


def test_lists_find_more_room():
    """Lists of several sequences, more of them in the second step than there is room for, fewer in the third."""
    memories: list[np.ndarray] = []

    def allocate(count: int) -> tuple[np.ndarray, int]:
        memories.append(np.full(count, -1, np.int32))
        return memories[-1], 10_000_000 * len(memories)  # the card has it elsewhere

    settings = Sampling(repetition_penalty=1.2, logit_bias={3: 0.5})
    records = [DrawRecord(settings, 4), DrawRecord(Sampling(), 4), DrawRecord(Sampling(), 4)]
    table = DrawTable(np.zeros((3, DRAW_BYTES), np.uint8), allocate)
    tokens = list(range(100, 700))
    for end, banned in [(5, (8, 9)), (600, (8,)), (600, ())]:
        table.clear()
        table.put(2, records[0], tokens, end, (), 77)
        table.put(0, records[1], tokens, end, banned, 88)
        table.put(1, records[2], tokens, end, (), 99)
        used, address = table.place()
        assert address == 10_000_000 * len(memories) and used.base is memories[-1]
        fields = [struct.unpack_from("@Qd4P3i", table.records, index * DRAW_BYTES) for index in range(3)]
        assert fields[1][2:] == (0,) * 7  # nothing changes its logits
        assert fields[0][5:] == ((88, 0, 0, len(banned)) if banned else (0,) * 4)
        assert fields[2][5:] == (77, end, 1, 0)

        def stored(place: int, count: int, used=used, address=address) -> list[int]:
            return used[(place - address) // 4 :][:count].tolist()

        assert stored(fields[0][4], len(banned)) == list(banned)
        assert stored(fields[2][2], 2 * end)[::2] == tokens[:end]
        assert stored(fields[2][3], 2) == [3, int(np.float32(0.5).view(np.int32))]
    assert len(memories) == 2


@pytest.mark.parametrize("few", [False, True])
def test_drafts_equal_the_twin(schedule, few):
    """Passes one behind another, with penalties that count the drafts before; `few`: over some ids only, in any order."""
    rng = np.random.default_rng(9)
    vocab, passes, count = 1200, 3, 4
    ids = rng.permutation(vocab)[:500] if few else np.arange(vocab)
    candidates = Candidates(ids, vocab) if few else None
    settings = [
        Sampling(temperature=0),
        Sampling(temperature=0.9, seed=4, top_k=30, top_p=0.9),
        Sampling(
            temperature=0.4, seed=5, repetition_penalty=3.0, frequency_penalty=2.0, logit_bias={int(ids[3]): 4.0, 1199: 3.0}
        ),
        Sampling(temperature=0.8, seed=6),
    ]
    sequences = [Sequence(s, rng.integers(0, 1500, 50).tolist(), 20, banned=(3, 4)) for s in settings]
    step = Step([Sequence(s.sampling, s.tokens, 20, [0] * passes, s.banned) for s in sequences], len(ids))
    begin = np.arange(count, dtype=np.int32) * (passes + 2)
    tokens = np.full(count * (passes + 2), -9, np.int32)
    columns = [ids.astype(np.int32), candidates.columns.astype(np.int32)] if few else [None, None]
    base = rng.normal(0, 1, (count, len(ids))).astype(np.float32)  # much the same each time, so that penalties matter
    for depth in range(passes):
        logits = base + rng.normal(0, 0.1, base.shape).astype(np.float32)
        if depth == 1:
            logits[1, 6] = np.nan
        positions = np.array([s.end - 1 + depth for s in sequences], np.int32)
        if depth == 2:
            positions[[1, 3]] = -1  # they draft no more
        args = [tokens, logits, len(ids), *columns, vocab, step.params, positions, begin, depth]
        harness.run("sample", "draw_draft", (count,), 1024, args)
        for i, s in enumerate(sequences):
            found = tokens[begin[i] + 1 + depth]
            assert found == (sampler.draft(logits[i], s.row(depth), candidates) if positions[i] >= 0 else -9)
            s.drafts.append(int(found))
    assert (tokens[begin] == -9).all() and (tokens[begin + 1 + passes] == -9).all()
    assert sequences[1].drafts == [sequences[1].drafts[0], -1, -9]


def test_who_is_accepted(schedule):
    """drafts, draws -> accepted; and three hundred of them at random places of the step."""
    cases = [
        ([], [7], 0),
        ([5, 6], [5, 6, 7], 2),
        ([5, 6], [5, 9, 7], 1),
        ([5, 6], [9, 6, 7], 0),
        ([-1, 6], [-1, 6, 7], 0),  # no draft could be made; the draw failed
        ([-1], [4, 7], 0),
        ([5, 6], [5, -1, 7], 0),  # the draw behind the accepted draft failed: left to a step of its own
        ([5, 6], [5, 6, -2], 1),
        ([5], [-2, 5], 0),
        ([3, 3, 3, 3], [3, 3, 3, 3, 3], 4),
        ([1], None, -1),
    ]
    rng = np.random.default_rng(10)
    picks = [cases[i] for i in [*range(len(cases)), *rng.integers(0, len(cases), 289)]]
    tokens, begin, count, drafts, first, draws, results = [], [], [], [], [], [], []
    for given, found, result in picks:
        fed = int(rng.integers(1, 4))
        begin.append(len(tokens))
        tokens += [*[5] * fed, *given]
        count.append(fed + len(given))
        drafts.append(len(given))
        first.append(-1 if found is None else len(draws))
        draws += found or []
        results.append(result)
    accepted = np.full(len(picks) + 1, -9, np.int32)
    args = [accepted, *(np.array(a, np.int32) for a in (draws, tokens, begin, count, drafts, first)), len(picks)]
    harness.run("sample", "accept", (3,), 128, args)
    assert accepted.tolist() == [*results, -9]


def test_noise_is_that_of_the_twin():
    """Draws from equal logits show the noise itself: the column of its maximum."""
    sequences = [Sequence(Sampling(seed=i * 2**40 - 5), list(range(3 + 50_000 * i)), 1) for i in range(6)]
    tokens = drawn(np.zeros((6, 3000), np.float32), sequences)
    for s, token in zip(sequences, tokens, strict=True):
        assert token == sampler.gumbel(s.sampling.seed, s.end, np.arange(3000, dtype=np.uint64)).argmax()
