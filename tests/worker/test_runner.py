"""The runner with a model of hashes: what is drafted, what is judged, and what the step leaves in the blocks."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpu_worker.policy.events import Plan, Row
from gpu_worker.runner import Runner
from wire.messages import Sampling

BLOCK, BLOCKS, HIDDEN, VOCAB = 4, 64, 8, 40
MATRIX = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (HIDDEN, VOCAB)).astype(np.float32))


def hidden_of(tokens: list[int]) -> torch.Tensor:
    """The hidden row behind these tokens: float32 [HIDDEN]."""
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=HIDDEN).digest()
    return torch.tensor([byte / 128 - 1 for byte in digest])


class HashModel:
    """Knows only what it is fed and what lies in the cells. Its head is right where a hash says so: `right` of 4 times."""

    def __init__(self, right: int = 3, draft_ids: list[int] | None = None) -> None:
        self.spec = SimpleNamespace(mtp=object(), vocab=VOCAB)
        self.right = right
        self.draft_greedy = None  # drafts are made one by one
        self.draft_ids = torch.tensor(draft_ids) if draft_ids is not None else None
        self.cells: dict[tuple[int, int], int] = {}  # (block, place) -> token
        self.drafted: dict[tuple[int, int], int] = {}  # the same, of the head
        self.made: dict[tuple[float, ...], tuple[int, list[int]]] = {}  # a row of the head's last pass -> depth, tokens behind it
        self.drafts: list[int] = []  # rows of each pass of the head
        self.fed: list[tuple[list[int], int, int]] = []  # of each sequence of each step: tokens, known, state slot

    def _prefix(self, table: torch.Tensor, count: int) -> list[int]:
        return [self.cells[int(table[p // BLOCK]), p % BLOCK] for p in range(count)]

    def forward(self, batch, kv):
        rows = []
        for s in range(len(batch.block_tables)):
            mine = (batch.seq_of == s).nonzero()[:, 0].tolist()
            self.fed.append((batch.token_ids[mine].tolist(), int(batch.known[s]), int(batch.state_slots[s])))
        for token, position, s in zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.seq_of.tolist(), strict=True):
            table = batch.block_tables[s]
            block = int(table[position // BLOCK])
            self.cells[block, position % BLOCK] = token
            rows.append(hidden_of(self._prefix(table, position + 1)))
            kv.hidden[block] = rows[-1]
        return torch.stack(rows)[batch.out_rows]

    def logits(self, hidden):
        return torch.stack([row @ MATRIX for row in hidden])  # not one product: its rows may depend on how many there are

    def draft(self, token_ids, positions, hidden, tables, kv):
        self.drafts.append(len(token_ids))
        made = {}
        for token, position, row, table in zip(token_ids.tolist(), positions.tolist(), hidden, tables, strict=True):
            self.drafted[int(table[position // BLOCK]), position % BLOCK] = token
            depth, behind = self.made.get(tuple(row.tolist()), (0, None))
            known = position - depth  # the tokens from here on are known to the head only
            tokens = self._prefix(table, known) + [
                self.drafted[int(table[p // BLOCK]), p % BLOCK] for p in range(known, position + 1)
            ]
            if behind is None:
                assert torch.equal(row, hidden_of(tokens[:-1])), f"position {position} was given another hidden row"
            else:
                assert behind == tokens[:-1], f"position {position} was given another draft's row"
            truth = hidden_of(tokens)
            digest = hashlib.blake2b(repr(tokens).encode() + b"?").digest()
            out = truth + 1e-4 if digest[0] % 4 < self.right else -truth
            made[tuple(out.tolist())] = (depth + 1, tokens)
        self.made = made
        return torch.tensor(list(made))

    def draft_logits(self, rows):
        logits = rows @ MATRIX
        return logits if self.draft_ids is None else logits[:, self.draft_ids]


class Bench:
    """A runner and some sequences that grow by what it returns, as the scheduler would let them."""

    def __init__(self, model: HashModel) -> None:
        self.model = model
        self.kv = SimpleNamespace(hidden=torch.full((BLOCKS, HIDDEN), torch.nan), block_size=BLOCK)
        self.runner = Runner(model, self.kv)

    def row(self, number: int, tokens: list[int], start: int, draft: int = 0, **settings) -> Row:
        blocks = [(number * 16 + 3 * i) % 16 + number * 16 for i in range(16)]  # in no order
        fields = {"sampling": Sampling(temperature=0), "prompt_len": 3} | settings
        return Row(f"r{number}", tokens, start, len(tokens) - start, blocks, True, draft=draft, **fields)

    def step(self, *rows: Row):
        return self.runner.step(Plan([], list(rows), 1)).rows

    def run(self, number: int, count: int, draft: int, **settings) -> tuple[list[int], list[int]]:
        """`count` tokens of one sequence alone, and how many each step gave."""
        tokens, computed, took = [7, number, 9], 0, []
        while len(tokens) < 3 + count:
            wanted = min(draft, 3 + count - len(tokens) - 1) if computed else 0
            row = self.row(number, tokens, computed, wanted, **settings)
            (result,) = self.step(row)
            tokens = tokens + result.tokens
            computed = len(tokens) - 1
            took.append(len(result.tokens))
            block = row.blocks[(computed - 1) // BLOCK]
            assert torch.equal(self.kv.hidden[block], hidden_of(tokens[:computed])), (
                "the block's hidden row is not its newest cell's"
            )
        return tokens[3:], took


@pytest.fixture(name="bench_of")
def plain_bench():
    """Makes a bench for a model; the runner of a card has its own, in test_card_runner.py."""
    return Bench


SETTINGS = {
    "greedy": {"sampling": Sampling(temperature=0)},
    "seeded": {"sampling": Sampling(temperature=1.0, seed=5)},
    "filtered": {"sampling": Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=6)},
    "penalised": {
        "sampling": Sampling(temperature=0.7, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5, seed=7)
    },
    "biased": {"sampling": Sampling(temperature=0, logit_bias={3: 4.0, 5: -1000.0}), "banned": (1, 2, 11)},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("right", [0, 3, 4])
def test_drafts_change_no_token(name, right, bench_of):
    expected, _ = bench_of(HashModel()).run(1, 45, 0, **SETTINGS[name])
    for draft in (1, 2, 3, 8):
        tokens, took = bench_of(HashModel(right)).run(1, 45, draft, **SETTINGS[name])
        assert tokens == expected
        if right == 4:  # a head that is always right sees the same penalties, bans and noise
            assert set(took[1:-1]) == {1 + draft}
        if right == 0:
            assert max(took) < 1 + draft or draft == 1


def test_a_head_that_knows_few_tokens_is_right_about_those(bench_of):
    """Its logits have a column for each id that it may draft; settings speak of ids."""
    known = [30, 4, 17, 3, 22, 9, 1, 36, 12, 5]
    for settings in SETTINGS.values():
        expected, _ = bench_of(HashModel()).run(1, 45, 0, **settings)
        model = HashModel(4, known)
        tokens, took = bench_of(model).run(1, 45, 1, **settings)
        assert tokens == expected
        at = np.cumsum([0, *took])[1:-2]  # where each draft stands
        assert [tokens[i] in known for i in at] == [count == 2 for count in took[1:-1]]


def test_rows_of_all_kinds_in_one_step(bench_of):
    bench = bench_of(HashModel())
    alone = {number: bench_of(HashModel()).run(number, 20, 0)[0] for number in range(3)}
    bench.run(0, 8, 2)
    bench.run(1, 8, 2)
    first, second, third = ([7, number, 9] + alone[number] for number in range(3))
    bench.model.drafts.clear(), bench.model.fed.clear()
    asked = [
        bench.row(0, first[:11], 10, 3, state_slot=5),
        bench.row(2, third[:3], 0, prompt_logprobs=1),
        bench.row(1, second[:11], 10, 1, state_slot=2),
    ]
    results = bench.step(*asked)
    for result, whole, known in zip(results, (first, third, second), (11, 3, 11), strict=True):
        assert result.tokens == whole[known : known + len(result.tokens)] and not result.error
    assert [one.token for one in results[1].prompt_logprobs] == [2, 9] and not results[0].prompt_logprobs
    assert bench.model.drafts == [2, 1, 1]  # rows of each depth
    assert [(len(tokens), known, slot) for tokens, known, slot in bench.model.fed] == [(4, 11, 5), (3, 3, 0), (2, 11, 2)]


def test_a_chunk_that_does_not_reach_the_newest_token_draws_nothing(bench_of):
    bench = bench_of(HashModel())
    row = Row("r", [7, 1, 9, 4, 5], 0, 3, [0, 1], False, Sampling(temperature=0), 5, prompt_logprobs=0)
    (result,) = bench.step(row)
    assert result.tokens == [] and [one.token for one in result.prompt_logprobs] == [1, 9, 4]


def test_the_first_token_of_all_is_not_drafted_behind(bench_of):
    bench = bench_of(HashModel())
    (result,) = bench.step(bench.row(0, [7], 0, 2, prompt_len=1))
    assert len(result.tokens) == 1 and bench.model.drafts == []


def test_a_draft_that_cannot_be_drawn_ends_the_chain(bench_of):
    bench = bench_of(HashModel(4, [3, 5]))
    tokens, _ = bench.run(0, 4, 0)
    (result,) = bench.step(bench.row(0, [7, 0, 9, *tokens], 6, 3, banned=(3, 5)))
    assert len(result.tokens) == 1 and bench.model.drafts == [1]


def test_logits_that_are_not_finite_end_one_row_only(bench_of):
    model = HashModel()
    bench = bench_of(model)
    tokens = [[7, number, 9, *bench.run(number, 4, 0)[0]] for number in range(2)]
    real = model.logits

    def logits(hidden):
        values = real(hidden)
        values[0, 5] = torch.nan
        return values

    model.logits = logits
    failed, whole = bench.step(bench.row(0, tokens[0], 6, 2), bench.row(1, tokens[1], 6, 2))
    assert "not finite" in failed.error and not failed.tokens
    assert whole.tokens and not whole.error


def test_logits_that_are_not_finite_behind_an_accepted_draft_wait_for_their_own_step(bench_of):
    """What was drawn before them stands, as without drafts: it may even end the text."""
    model = HashModel(4)
    bench = bench_of(model)
    tokens = [7, 0, 9, *bench_of(HashModel()).run(0, 6, 0)[0]]
    bench.run(0, 4, 0)
    real = model.logits

    def logits(hidden):
        values = real(hidden)
        values[1:, 5] = torch.nan
        return values

    model.logits = logits
    (result,) = bench.step(bench.row(0, tokens[:7], 6, 2))
    assert (result.tokens, result.error) == ([tokens[7]], "")
    (after,) = bench.step(bench.row(0, tokens[:8], 7, 2))
    assert (after.tokens, after.error) == ([tokens[8]], "")


def test_logprobs_come_from_the_row_that_judged(bench_of):
    settings = {"sampling": Sampling(temperature=1.0, seed=5, logprobs=2)}
    plain, drafted = bench_of(HashModel()), bench_of(HashModel(4))
    tokens = [7, 1, 9, *plain.run(1, 5, 0, **settings)[0]]
    drafted.run(1, 5, 0, **settings)
    (together,) = drafted.step(drafted.row(1, tokens, 7, 2, **settings))
    assert len(together.tokens) == len(together.logprobs) == 3
    for token, logprob in zip(together.tokens, together.logprobs, strict=True):
        (one,) = plain.step(plain.row(1, tokens, len(tokens) - 1, **settings))
        assert (one.tokens, one.logprobs) == ([token], [logprob])
        tokens = [*tokens, token]
