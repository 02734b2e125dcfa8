"""How many tokens the head drafts, and what is said about them."""

import random

import pytest

from gpu_worker.policy import drafting
from gpu_worker.policy.events import RowResult, StepDone
from gpu_worker.policy.limits import Limits
from tests.policy.story import Story

LIMITS = {"num_blocks": 100, "block_size": 4, "slots": 8, "max_context": 400}


def drafts(plan) -> dict[str, int]:
    return {row.request_id: row.draft for row in plan.rows}


# when ------------------------------------------------------------------------------------------------------------------
def test_the_newest_token_alone_is_fed_with_drafts_and_a_prompt_without():
    story = Story(step_tokens=8, slots=1, draft_max=2)
    story.submit("a", 11)
    assert [drafts(story.step())["a"] for _ in range(4)] == [0, 0, 2, 2]


def test_the_last_token_of_a_chunked_prompt_may_be_fed_with_drafts_but_the_first_token_of_all_may_not():
    story = Story(step_tokens=8, slots=1, draft_max=2)
    story.submit("a", 9, max_tokens=2)
    story.step()
    (row,) = story.step().rows
    assert (row.start, row.count, row.draft) == (8, 1, 1), "two tokens are wanted"
    story.until(lambda: story.scheduler.idle)
    story.submit("b", 1)
    (row,) = story.step().rows
    assert (row.start, row.count, row.draft) == (0, 1, 0), "there is no cell before it whose hidden row could be used"
    story.submit("c", 1)
    drafting.assign([story["c"]], story.scheduler.limits)
    assert story["c"].draft == 0


def test_drafts_count_in_the_steps_budget():
    story = Story(step_tokens=8, draft_max=2)
    story.submit("a", 3)
    story.step()
    story.submit("long", 20)
    fed = story.step()
    assert sum(row.count + row.draft for row in fed.rows) == 12, "4 slots of 1 + 2 is the least a step can feed"
    assert story.row(fed, "long").count == 9


def test_refused_drafts_leave_no_trace():
    story = Story(draft_max=2)
    story.submit("a", 3)
    story.step()
    assert drafts(story.step(tokens={"a": [5]})) == {"a": 2}
    assert story["a"].tokens[-1] == 5
    assert story["a"].computed == len(story["a"].tokens) - 1
    assert (story["a"].draft, story["a"].recomputed) == (0, 0)
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (4, 1)


def test_agreed_drafts_are_cells_already():
    story = Story(draft_max=2)
    story.submit("a", 3)
    story.step()
    story.step(tokens={"a": [5, 6, 7]})
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (6, 1)


def test_none_beyond_the_last_token():
    story = Story(draft_max=2)
    story.submit("a", 3, max_tokens=5)
    assert [drafts(story.step())["a"] for _ in range(5)] == [0, 2, 2, 1, 0]


def test_none_beyond_the_context():
    story = Story(draft_max=8, max_context=10)
    story.submit("a", 5)
    assert [drafts(story.step())["a"] for _ in range(5)] == [0, 3, 2, 1, 0], "6 to 9 tokens of 10"
    assert story.ending("a").reason == "length"


def test_decodes_share_the_rows_of_a_step_and_one_that_comes_back_in_it_counts():
    story = Story(draft_max=4, draft_rows=12, num_blocks=60)
    for name in ("a", "b", "c"):
        story.submit(name, 4)
    story.step()
    assert drafts(story.step()) == {"a": 3, "b": 3, "c": 3}
    story.submit("d", 4)
    story.step()
    assert drafts(story.step()) == {"a": 2, "b": 2, "c": 2, "d": 2}
    story.until(lambda: story["a"].computed == 8)
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    assert drafts(story.step()) == {"b": 3, "c": 3, "d": 3}
    story.resume("a")
    assert drafts(story.step()) == {"a": 0, "b": 2, "c": 2, "d": 2}, "its image was found whole: it is back at once"


def test_a_stalled_one_and_a_parked_one_keep_no_drafts():
    story = Story(num_blocks=6, high=100, low=100, draft_max=3, saves="by hand")
    story.submit("a", 8)
    story.submit("b", 2)
    story.until(lambda: story.state("b") == "parking")
    assert story["b"].draft == 0
    story.until(lambda: story.plans[-1].rows == [])
    assert len(story["a"].tokens) == 4 * len(story["a"].blocks) + 1
    assert story["a"].draft == 0, "it has no room for its next token while b is saved"


# how many --------------------------------------------------------------------------------------------------------------
def worthwhile(likely: list[float], cost: int, decodes: int = 1, **limits) -> int:
    """Drafts of a sequence with these estimates among `decodes`."""
    story = Story(**{**LIMITS, "draft_max": len(likely), "draft_cost": (cost,), **limits})
    for number in range(decodes):
        story.submit(f"s{number}", 4)
    story.step()
    for seq in story.scheduler.sequences.values():
        seq.likely[:] = [round(p * drafting.LIKELY_ONE) for p in likely]
    return drafts(story.step())["s0"]


def best(likely: list[float], cost: int) -> int:
    """The same by trying every number."""
    yields = []
    for count in range(len(likely) + 1):
        reach, tokens = 1.0, 1.0
        for p in likely[:count]:
            reach *= p
            tokens += reach
        yields.append(tokens / (100 + count * cost))
    return yields.index(max(yields))


def test_as_many_as_yield_most_tokens_for_what_the_step_costs():
    seen = set()
    for likely in ([0.9] * 8, [0.8, 0.7, 0.6, 0.5], [0.5, 0.9, 0.9], [0.3] * 4, [0.99] * 8, [0.05, 1.0]):
        for cost in (6, 12, 31, 47, 73, 96):
            assert worthwhile(likely, cost) == best(likely, cost), (likely, cost)
            seen.add(best(likely, cost))
    assert seen >= {0, 1, 2, 3, 8}


def test_a_draft_costs_more_beside_others():
    costs = {"draft_cost": (20, 60, 90)}
    assert [worthwhile([0.8] * 3, 0, decodes, **costs) for decodes in (1, 2, 3, 5)] == [3, 1, 0, 0]


def test_drafts_that_are_refused_again_and_again_stop_and_are_tried_again_seldom():
    story = Story(draft_max=3, draft_cost=(30,), num_blocks=400, max_context=1600)
    story.submit("a", 4)
    numbers = [drafts(story.step())["a"] for _ in range(1000)]
    assert numbers[1] == 1
    assert 0 in numbers[:20]
    tries = sum(number > 0 for number in numbers[100:])
    assert 10 < tries < 60, "some, but not so many that they cost a percent"


def test_drafts_that_agree_again_become_more_again():
    story = Story(draft_max=3, draft_cost=(30,), num_blocks=600, max_context=2400)
    story.submit("a", 4)
    story.steps(100)
    assert story["a"].likely[0] < drafting.LIKELY_ONE // 2
    numbers = []
    for _ in range(400):
        plan = story.plan()
        numbers += [row.draft for row in plan.rows]
        story.handle(StepDone([RowResult(row.request_id, [7] * (1 + row.draft)) for row in plan.rows], plan.epoch))
    assert numbers[-1] == 3


def tokens_for_cost(agrees: float, cost: int, number: int | None, steps: int = 500) -> float:
    """Tokens a step for what it costs, against none at all, where each draft agrees this often; `number` None: the policy's."""
    rng = random.Random(5)
    story = Story(**LIMITS, draft_max=6, draft_cost=(cost,))
    story.submit("a", 4)
    seq, limits = story["a"], story.scheduler.limits
    seq.computed, seq.end_len = len(seq.tokens) - 1, 1000
    tokens = spent = 0
    for _ in range(steps):
        drafting.assign([seq], limits)
        drafted = seq.draft if number is None else number
        accepted = 0
        while accepted < drafted and rng.random() < agrees:
            accepted += 1
        drafting.learn(seq, drafted, accepted)
        tokens += 1 + accepted
        spent += 100 + drafted * cost
    return 100 * tokens / spent


@pytest.mark.parametrize("cost", [10, 30, 60])
@pytest.mark.parametrize("agrees", [0.1, 0.4, 0.6, 0.9])
def test_it_is_close_to_the_best_number_and_hardly_ever_worse_than_none(cost, agrees):
    found = tokens_for_cost(agrees, cost, None)
    assert found > 0.96, "none at all is 1, and what it costs to find out is paid early"
    assert found > 0.92 * max(tokens_for_cost(agrees, cost, number) for number in range(7))


def test_what_was_learnt_survives_a_park():
    story = Story(draft_max=2, draft_cost=(40,), saves="denied")
    story.submit("a", 4)
    story.steps(20)
    likely = list(story["a"].likely)
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.resume("a")
    story.plan()
    assert story["a"].likely == likely


def test_a_draft_behind_a_refused_one_says_nothing():
    story = Story(draft_max=3)
    story.submit("a", 4)
    seq = story["a"]
    before = list(seq.likely)
    drafting.learn(seq, 3, 1)
    assert seq.likely[0] > before[0] and seq.likely[1] < before[1] and seq.likely[2] == before[2]


# what is said ----------------------------------------------------------------------------------------------------------
def test_drafted_and_accepted_are_counted_by_position_and_by_sequence():
    story = Story(draft_max=3)
    story.submit("a", 4)
    story.submit("b", 4)
    story.step()
    story.step(tokens={"a": [1, 2], "b": [1, 2, 3, 4]})
    counters = story.scheduler.load().counters
    assert (counters.drafted, counters.accepted) == ([2, 2, 2], [2, 1, 1])
    slots = story.scheduler.load().slots
    assert [(slot.drafted, slot.accepted) for slot in slots] == [(3, 1), (3, 3), (0, 0), (0, 0)]


def test_what_agrees_behind_an_end_token_is_not_accepted():
    story = Story(draft_max=3, eos_token_ids=(2,))
    story.submit("a", 4)
    story.step()
    story.step(tokens={"a": [8, 2, 9, 10]})
    counters = story.scheduler.load().counters
    assert (counters.drafted, counters.accepted) == ([1, 1, 1], [1, 1, 0])


def test_without_a_head_nothing_is_counted_or_drafted():
    story = Story()
    story.submit("a", 4)
    story.steps(3)
    counters = story.scheduler.load().counters
    assert (counters.drafted, counters.accepted, story["a"].likely) == ([], [], [])


def test_costs_must_be_there():
    for wrong in ((), (-1,)):
        with pytest.raises(ValueError, match="draft_cost"):
            Limits(**LIMITS, draft_cost=wrong)
