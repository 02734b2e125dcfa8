"""Draws against a slow oracle in plain Python, the distribution against chi-square, and what each setting means."""

import math
import random

import numpy as np
import pytest
import torch

from gpu_worker.model.sampler import Candidates, Sampled, SampleRow, draft, draw, gumbel, stream_key, token_logprobs
from wire.messages import Sampling

MASK = 2**64 - 1


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
    """One draw a row from float32 logits [n, vocab]."""
    return [draw(values, row) for values, row in zip(logits.numpy(), rows, strict=True)]


# an oracle that shares no code with the sampler ----------------------------------------------------------------------
def oracle_noise(seed: int, position: int, token: int) -> float:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    key = mix((mix(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK)
    u = ((mix((key + token * 0x9E3779B97F4A7C15) & MASK) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(u))


def oracle(logits: list[float], row: SampleRow) -> int:
    """The drawn token, by the definitions of each setting."""
    s, values = row.sampling, list(logits)
    seen, output = row.tokens[: row.position], row.tokens[row.prompt_len : row.position]
    for token in set(seen):
        values[token] = values[token] / s.repetition_penalty if values[token] > 0 else values[token] * s.repetition_penalty
    for token in set(output):
        values[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    for token, bias in s.logit_bias.items():
        values[token] += bias
    for token in row.banned:
        values[token] = -math.inf
    order = sorted((i for i, v in enumerate(values) if v > -math.inf), key=lambda i: (-values[i], i))
    if s.temperature == 0:
        return order[0]
    scaled = {i: (values[i] - values[order[0]]) / s.temperature for i in order}
    if s.min_p > 0:
        order = [i for i in order if math.exp(scaled[i]) >= s.min_p]
    if s.top_k:
        order = order[: s.top_k]
    if s.top_p < 1:
        total, mass, kept = sum(math.exp(scaled[i]) for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += math.exp(scaled[i])
            if mass >= s.top_p * total:
                break
        order = kept
    return max(order, key=lambda i: scaled[i] + oracle_noise(s.seed or 0, row.position, i))


def row(
    position: int = 5, prompt_len: int = 3, tokens: list[int] | None = None, banned: tuple[int, ...] = (), **sampling
) -> SampleRow:
    return SampleRow(Sampling(**sampling), position, tokens or [1, 2, 3, 2, 2], prompt_len, banned)


def one(logits: list[float], settings: SampleRow) -> int:
    (result,) = sample(torch.tensor([logits]), [settings])
    assert not result.error
    return result.token


def test_noise_is_the_oracle_s():
    ids = np.array([0, 1, 77, 2**20], dtype=np.uint64)
    for seed, position in ((0, 0), (-5, 1), (2**63 - 1, 10**6)):
        assert gumbel(seed, position, ids).tolist() == pytest.approx(
            [oracle_noise(seed, position, int(i)) for i in ids], rel=1e-12
        )
    assert stream_key(1, 0) != stream_key(0, 1)


def test_every_combination_of_settings_draws_what_the_oracle_draws():
    rng = random.Random(4)
    for _ in range(400):
        vocab = rng.choice([5, 40, 300])
        logits = [rng.choice([rng.gauss(0, 3), float(rng.randrange(4))]) for _ in range(vocab)]  # ties among them
        settings = row(
            position=(length := rng.randrange(1, 30)),
            prompt_len=rng.randrange(length),
            tokens=[rng.randrange(vocab) for _ in range(length + 2)],
            banned=tuple(rng.sample(range(vocab), rng.randrange(3))),
            temperature=rng.choice([0, 0.3, 1.0, 2.5]),
            top_k=rng.choice([0, 0, 1, 3, 1000]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0, 0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0, 0.7]),
            frequency_penalty=rng.choice([0, -0.4]),
            logit_bias=rng.choice([{}, {1: 3.0, 4: -2.0}]),
            seed=rng.randrange(-(2**63), 2**63),
        )
        assert one(torch.tensor(logits).tolist(), settings) == oracle(torch.tensor(logits).tolist(), settings)


def test_draws_follow_the_distribution():
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    logits = np.log(probabilities).tolist()
    chi_square, draws = 0.0, 1500
    for seed in range(8):
        counts = np.zeros(6)
        for position in range(draws):
            counts[one(logits, row(position=position, tokens=[0], prompt_len=0, temperature=1.0, seed=seed))] += 1
        chi_square += float((((counts - draws * probabilities) ** 2) / (draws * probabilities)).sum())
    assert chi_square < 63.7  # 40 degrees of freedom, 1 %


def test_seeds_and_positions_are_independent_and_repeatable():
    logits = torch.zeros(1, 1000)
    first = [sample(logits, [row(position=p, seed=s, temperature=1.0)])[0].token for s in range(8) for p in range(8)]
    again = [sample(logits, [row(position=p, seed=s, temperature=1.0)])[0].token for s in range(8) for p in range(8)]
    assert first == again
    assert len(set(first)) > 55


def test_temperature_sharpens_and_a_tiny_one_is_greedy():
    logits = [0.0, 1.0, 0.999]
    assert {one(logits, row(position=p, temperature=1e-30, seed=3)) for p in range(50)} == {1}
    assert {one(logits, row(position=p, temperature=100.0, seed=3)) for p in range(50)} == {0, 1, 2}


def test_ties_go_to_the_lower_id():
    assert one([1.0, 5.0, 5.0, 5.0], row(temperature=0)) == 1
    assert {one([5.0] * 6, row(position=p, temperature=1.0, top_k=2, seed=1)) for p in range(40)} == {0, 1}
    assert {one([5.0] * 6, row(position=p, temperature=1.0, top_p=0.5, seed=1)) for p in range(60)} == {0, 1, 2}


def test_penalties_by_hand():
    at = {"tokens": [1, 2, 3, 2, 2], "prompt_len": 3, "temperature": 0}  # the output is 2 2
    assert one([0, 0.5, 2.0, 1.0], row(**at, frequency_penalty=0.6)) == 3  # 2 - 2 * 0.6 is below 1
    assert one([0, 0.5, 2.0, 1.0], row(**at, presence_penalty=0.9)) == 2  # 2 - 0.9 is not
    assert one([0.9, 1.0, 2.0, 1.0], row(**at, repetition_penalty=2.5)) == 0
    assert one([-1.0, -0.5, -0.6, -0.7], row(**at, repetition_penalty=3.0)) == 0
    assert one([0, 0, 0, 0], row(temperature=0, logit_bias={2: 0.5, 3: 1.0, 99: 50.0})) == 3


def test_tokens_behind_the_position_do_not_count():
    settings = {"temperature": 0, "presence_penalty": 1.0}
    assert one([0.0, 1.0, 0.5], row(position=2, prompt_len=1, tokens=[0, 0, 1, 1], **settings)) == 1


def test_banned_tokens_are_never_drawn_and_all_banned_is_an_error():
    assert {one([9.0, 0.0, 0.0], row(position=p, banned=(0,), temperature=1.0, seed=2)) for p in range(30)} == {1, 2}
    assert one([9.0, 1.0, 0.0], row(banned=(0,), temperature=0)) == 1
    (result,) = sample(torch.zeros(1, 2), [row(banned=(0, 1), temperature=1.0)])
    assert result.error == "every token is banned" and result.logprob is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_that_row_only(bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    logits[2] = -math.inf
    results = sample(logits, [row(temperature=t, seed=1) for t in (0, 1.0, 0)])
    assert [bool(result.error) for result in results] == [False, True, True]
    assert "\n" not in results[1].error


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    settings = row(temperature=0.5, seed=1, banned=(1,), top_k=1, logprobs=3)
    (result,) = sample(logits, [settings])
    truth = torch.log_softmax(logits[0].double(), 0).tolist()
    assert result.token == 2
    assert result.logprob.logprob == pytest.approx(truth[2], abs=1e-6)
    assert [token for token, _ in result.logprob.top] == [1, 2, 3]
    assert [value for _, value in result.logprob.top] == pytest.approx([truth[1], truth[2], truth[3]], abs=1e-6)
    (silent,) = sample(logits, [row(temperature=0)])
    assert silent.logprob is None
    (bare,) = sample(logits, [row(temperature=0, logprobs=0)])
    assert bare.logprob.top == []


def test_logprobs_of_given_tokens():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = token_logprobs(logits, [4, 0, 49], 2)
    truth = torch.log_softmax(logits.double(), -1)
    assert [one.logprob for one in found] == pytest.approx([truth[i, t].item() for i, t in enumerate([4, 0, 49])], abs=1e-6)
    assert [one.top[0][0] for one in found] == logits.argmax(-1).tolist()


def test_company_in_the_batch_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 5000, generator=generator) * 4
    plain, filtered = {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "logprobs": 2}
    rows = [row(seed=i, position=4 + i, tokens=list(range(20)), **(filtered if i % 3 else plain)) for i in range(9)]
    together = sample(logits, rows)
    for i in range(9):
        assert sample(logits[i : i + 1].clone(), [rows[i]]) == [together[i]]
    assert sample(logits.flip(0).contiguous(), rows[::-1]) == together[::-1]


def test_no_rows_draw_nothing():
    assert sample(torch.empty(0, 10), []) == []


def test_the_columns_that_cannot_win_are_left_out_rightly():
    """A wide vocabulary without filters, against the noise of every token: near ties, long tails, a best one with bad luck."""
    draws = np.random.default_rng(8)
    ids = np.arange(5000, dtype=np.uint64)
    lucky = 0
    for case in range(300):
        logits = (draws.normal(size=5000) * (0.01, 1.0, 30.0)[case % 3]).astype(np.float32)
        if case % 3 == 0:
            logits[case] = 8.05 + case % 4 / 5  # so far ahead of many equals that one of them wins now and then
        scaled = logits - logits.max()
        expected = int((gumbel(case, case % 7, ids) + scaled).argmax())
        assert draw(logits, SampleRow(Sampling(temperature=1.0, seed=case), case % 7, [1], 1)).token == expected
        lucky += scaled[expected] < -8
    assert lucky > 10  # some were won from far behind


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_is_the_draw_among_its_candidates(temperature):
    """For every setting: the token drawn from the whole row in which all others are impossible, and a row without one."""
    known = np.array([7, 2, 11, 30, 5, 19], dtype=np.int64)
    candidates = Candidates(known, 40)
    draws = random.Random(4)
    changes = [
        {}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"repetition_penalty": 2.0}, {"presence_penalty": 3.0},
        {"frequency_penalty": 2.0}, {"logit_bias": {5: 4.0, 8: 90.0, 39: 3.0, 77: 5.0}},
    ]  # fmt: skip
    for case in range(20):
        logits = np.array([draws.gauss(0, 2) for _ in range(40)], dtype=np.float32)
        only = np.full(40, -1e30, dtype=np.float32)
        only[known] = logits[known]
        for change in changes:
            sampling = Sampling(temperature=temperature, seed=case, **change)
            settings = SampleRow(sampling, 7, [7, 30, 8, 2, 2, 60, 9], 3, (11, 8, 90))
            assert draft(logits[known], settings, candidates) == draw(only, settings).token
            assert draft(logits, settings, None) == draw(logits, settings).token
    assert draft(np.zeros(2, np.float32), SampleRow(Sampling(), 1, [1], 1, (2, 7)), Candidates(known[:2], 40)) == -1
    assert draft(np.full(6, np.nan, np.float32), SampleRow(Sampling(), 1, [1], 1), candidates) == -1
