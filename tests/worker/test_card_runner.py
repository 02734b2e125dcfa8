"""The runner of a card: everything the CPU's runner promises, on a stand-in for the card; then seats, shapes, graphs, draws."""

import numpy as np
import pytest

from gpu_worker.card_runner import CardRunner, Graphs
from gpu_worker.device.step_buffers import Limits, Shape
from gpu_worker.policy.events import Row
from gpu_worker.staging import Seats, round_up
from tests.worker import test_runner as plain
from tests.worker.stand_in_card import StandInCard, StandInModel
from tests.worker.test_runner import (
    BLOCKS,
    SETTINGS,
    Bench,
    HashModel,
    test_a_chunk_that_does_not_reach_the_newest_token_draws_nothing,
    test_a_draft_that_cannot_be_drawn_ends_the_chain,
    test_a_head_that_knows_few_tokens_is_right_about_those,
    test_drafts_change_no_token,
    test_logits_that_are_not_finite_behind_an_accepted_draft_wait_for_their_own_step,
    test_logits_that_are_not_finite_end_one_row_only,
    test_logprobs_come_from_the_row_that_judged,
    test_rows_of_all_kinds_in_one_step,
    test_the_first_token_of_all_is_not_drafted_behind,
)
from wire.messages import Sampling

__all__ = [
    "test_a_chunk_that_does_not_reach_the_newest_token_draws_nothing",
    "test_a_draft_that_cannot_be_drawn_ends_the_chain",
    "test_a_head_that_knows_few_tokens_is_right_about_those",
    "test_drafts_change_no_token",
    "test_logits_that_are_not_finite_behind_an_accepted_draft_wait_for_their_own_step",
    "test_logits_that_are_not_finite_end_one_row_only",
    "test_logprobs_come_from_the_row_that_judged",
    "test_rows_of_all_kinds_in_one_step",
    "test_the_first_token_of_all_is_not_drafted_behind",
]
LIMITS = Limits(rows=64, sequences=4, draft_max=8, seats=4, table_stride=16)


class CardBench(Bench):
    """A card's runner and some sequences. Each has one list of blocks, as the scheduler keeps it."""

    def __init__(self, model: HashModel, limits: Limits = LIMITS) -> None:
        super().__init__(model)
        self.card = StandInCard()
        self.on_card = StandInModel(model, self.kv, self.card, limits)
        self.runner = CardRunner(self.card, self.card, self.on_card)

    def step(self, *rows: Row):
        self.on_card.rows = list(rows)
        results = super().step(*rows)
        assert not self.card.work
        return results


@pytest.fixture(name="bench_of")
def card_bench():
    return CardBench


def test_every_test_of_the_plain_runner_runs_here() -> None:
    assert sorted(__all__) == sorted(name for name in vars(plain) if name.startswith("test_"))


def test_results_of_both_runners_are_the_same():
    """Prompts in chunks, decodes with and without drafts, logprobs and penalties, in steps of several sequences."""
    rng = np.random.default_rng(3)
    benches = Bench(HashModel()), CardBench(HashModel())
    names = list(SETTINGS)
    texts = [[int(token) for token in rng.integers(0, 40, 7)] for _ in range(4)]
    computed = [0] * 4
    settings = []
    for number in range(4):
        one = dict(SETTINGS[names[number]])
        sampling = one["sampling"]
        fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__} | {"logprobs": number % 3 or None}
        settings.append(one | {"sampling": Sampling(**fields), "prompt_len": 7, "prompt_logprobs": number % 2 or None})
    for _ in range(40):
        rows = []
        for number in rng.permutation(4)[: rng.integers(1, 5)].tolist():
            left = len(texts[number]) - computed[number]
            count = int(rng.integers(1, left + 1))
            draft = int(rng.integers(0, 4)) if left == 1 else 0
            row = benches[0].row(number, texts[number], computed[number], draft, **settings[number])
            fields = {name: getattr(row, name) for name in row.__struct_fields__}
            rows.append(Row(**fields | {"count": count, "samples": count == left}))
            if len(texts[number]) > 48:
                rows.pop()
        if not rows:
            continue
        expected, found = (bench.step(*rows) for bench in benches)
        assert found == expected
        for row, result in zip(rows, found, strict=True):
            number = int(row.request_id[1:])
            texts[number] += result.tokens
            computed[number] = row.start + row.count + max(0, len(result.tokens) - 1)
    assert max(map(len, texts)) > 40 and all(len(text) > 10 for text in texts)


def test_prompt_logprobs_of_more_rows_than_are_drawn_at_once():
    limits = Limits(rows=64, sequences=1, draft_max=0, seats=1, table_stride=16)
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 40, 30)]
    row = Row("r", tokens, 0, 30, list(range(8)), True, Sampling(temperature=0), 30, prompt_logprobs=2)
    bench = CardBench(HashModel(), limits)
    assert bench.step(row) == Bench(HashModel()).step(row)


def test_steps_of_one_shape_are_captured_once_and_repeated():
    bench = CardBench(HashModel())
    bench.run(1, 40, 0)
    card = bench.card
    assert (card.graphs_captured, card.graphs_open) == (2, 2)  # up to 31 cells, and up to 47
    assert card.graphs_launched == 40 - 3  # not the prompt's step, nor the first of each shape
    assert set(bench.on_card.shapes[1:]) == {Shape(1, 1, 1, 1, 1, splits=n) for n in (1, 2)}


def test_a_step_of_decodes_is_rounded_up_and_the_rest_is_padding():
    limits = Limits(rows=64, sequences=7, draft_max=2, seats=7, table_stride=16)
    bench = CardBench(HashModel(), limits)
    texts = [[7, number, 9, *Bench(HashModel()).run(number, 6, 0)[0]] for number in range(3)]
    for number in range(3):
        bench.run(number, 4, 0)
    bench.step(*(bench.row(number, texts[number][:7], 6, number) for number in range(3)))
    assert bench.on_card.shapes[-1] == Shape(rows=9, sequences=3, tiles=3, outs=9, draws=9, depth=2)
    asked = [bench.row(number, texts[number % 3][:7], 6) for number in range(3)]
    bench.step(
        *asked, Row("r4", [1], 0, 1, [50], True, Sampling(temperature=0), 1), Row("r5", [1], 0, 1, [51], True, Sampling(), 1)
    )
    assert bench.on_card.shapes[-1] == Shape(rows=6, sequences=6, tiles=6, outs=6, draws=6)


def test_sizes_are_rounded_up():
    assert round_up(65536, 65536) == 65536  # the greatest --step-tokens
    assert [round_up(n, 100) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 65, 97)] == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96, 100),
    ]


def test_a_state_of_another_position_is_a_bug_that_ends_the_worker():
    bench = CardBench(HashModel())
    bench.on_card.enqueue_forward = lambda shape: bench.card.work.append(lambda: bench.on_card.at("status").fill(1))
    with pytest.raises(RuntimeError, match="not of the position"):
        bench.step(bench.row(0, [7, 0, 9], 0))


def test_graphs_that_are_not_used_are_given_back():
    card = StandInCard()
    graphs = Graphs(card, most=2)
    ran = []
    for rows in (1, 2, 3, 1, 2, 3, 1, 2, 2, 1):
        graphs.run(Shape(rows, 1, 1, 1, 1), lambda shape: card.work.append(lambda: ran.append(shape.rows)))
        card.run()
    assert ran == [1, 2, 3, 1, 2, 3, 1, 2, 2, 1]
    assert (card.graphs_open, len(graphs)) == (2, 2)
    graphs.close()
    assert card.graphs_open == 0


def test_bans_end_and_may_begin_again():
    """As `min_tokens` does it for the end tokens. The stand-in looks at what the card would read of them."""
    bench, plain_bench = CardBench(HashModel()), Bench(HashModel())
    texts = [[7, 0, 9]], [[7, 0, 9]]
    sampling = Sampling(temperature=0)
    for banned in ((3, 5), (3, 5), (), (), (4,), ()):
        for one, (text,) in zip((bench, plain_bench), texts, strict=True):
            start = len(text) - 1 if len(text) > 3 else 0
            (result,) = one.step(one.row(0, text, start, sampling=sampling, banned=banned))
            text += result.tokens
    assert texts[0] == texts[1]


# seats ----------------------------------------------------------------------------------------------------------------
class Tables:
    def __init__(self, count: int) -> None:
        self.host = np.full((count, 8), -1, np.int32)
        self.card = self.host.copy()
        self.uploads: list[tuple[int, int, int]] = []
        self.seats = Seats(count, self.host, self._upload)

    def _upload(self, seat: int, first: int, count: int) -> None:
        self.uploads.append((seat, first, count))
        self.card[seat, first : first + count] = self.host[seat, first : first + count]

    def place(self, **blocks: list[int]) -> list[int]:
        rows = [Row(name, [1], 0, 1, found, True, SAMPLING, 1) for name, found in blocks.items()]
        seats = [seat.number for seat in self.seats.place(rows)]
        for seat, row in zip(seats, rows, strict=True):
            assert self.card[seat, : len(row.blocks)].tolist() == row.blocks
        return seats


SAMPLING = Sampling(seed=1)


def test_only_new_blocks_are_uploaded():
    tables, blocks = Tables(2), [5, 6]
    (seat,) = tables.place(a=blocks)
    tables.place(a=blocks)
    blocks += [9, 1]
    tables.place(a=blocks)
    assert tables.uploads == [(seat, 0, 2), (seat, 2, 2)]


def test_blocks_that_are_others_are_read_anew():
    tables, blocks = Tables(2), [5, 6, 7]
    (seat,) = tables.place(a=blocks)
    del blocks[1:]  # as a park leaves it
    tables.place(a=blocks)
    tables.place(a=[2, 3, 4])
    tables.place(a=[2, 8])
    assert tables.uploads == [(seat, 0, 3), (seat, 0, 3), (seat, 0, 2)]


def test_the_seat_of_who_was_away_for_longest_is_taken():
    tables = Tables(3)
    a, b, c = [1], [2], [3]
    seats = dict(zip("abc", tables.place(a=a, b=b, c=c), strict=True))
    tables.place(a=a)
    tables.place(c=c)
    assert tables.place(d=[4], a=a) == [seats["b"], seats["a"]]
    assert tables.place(b=b, a=a, d=[4]) == [seats["c"], seats["a"], seats["b"]]


def test_another_request_of_the_same_name_draws_by_its_own_settings():
    tables = Tables(2)
    (first,) = tables.seats.place([Row("a", [1], 0, 1, [1], True, Sampling(seed=1), 1)])
    (other,) = tables.seats.place([Row("a", [1], 0, 1, [1], True, Sampling(seed=2), 1)])
    assert first.number == other.number and first.record.packed != other.record.packed
    assert BLOCKS  # of the bench
