"""What an earlier life of a worker has delivered is part of the sequence; what it has cost is carried over. And results of steps
that nobody wants any more."""

from gpu_worker.policy.events import Emit, RowResult, StepDone
from tests.policy.story import Story
from wire.messages import Logprob, Usage

EOS = 2


def test_a_replayed_stream_goes_on_where_it_was():
    story = Story()
    story.submit("a", 6, delivered=[7, 7, 7], max_tokens=5)
    plan = story.step()
    row = story.row(plan, "a")
    assert (row.start, row.count, row.samples, row.prompt_len) == (0, 9, True, 6)
    story.until(lambda: story.scheduler.idle)
    assert [(e.offset, e.tokens) for e in story.actions(Emit)] == [(3, [7]), (4, [7])]
    usage = story.ending("a").usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 5)
    assert usage.recomputed_tokens == 6 + 3 - 1, "the newest token had no cell before either"


def test_a_replay_without_delivered_tokens_has_recomputed_nothing_that_anybody_saw():
    story = Story()
    story.submit("a", 6, max_tokens=2)
    story.until(lambda: story.scheduler.idle)
    assert story.ending("a").usage.recomputed_tokens == 0


def test_enough_tokens_delivered_ends_at_once():
    story = Story()
    story.submit("a", 6, delivered=[7, 7], max_tokens=2)
    assert story.ending("a").reason == "length"
    story.submit("b", 6, delivered=[7, EOS], stop_token_ids=[EOS])
    assert story.ending("b").reason == "stop"
    story.submit("c", 40, delivered=[7] * 40)
    assert story.ending("c").reason == "length", "the pool is full for it"
    assert not story.actions(Emit)
    assert story.ending("a").usage.completion_tokens == 2


def test_a_delivered_end_token_below_min_tokens_is_text():
    story = Story()
    story.submit("a", 6, delivered=[7, EOS], stop_token_ids=[EOS], min_tokens=3, max_tokens=5)
    story.until(lambda: story.scheduler.idle)
    assert story.ending("a").reason == "length"


def test_what_earlier_lives_have_cost_is_carried_over():
    story = Story()
    before = Usage(prompt_tokens=6, cached_tokens=4, parks=3, parked_ms=500, recomputed_tokens=11)
    story.submit("a", 6, delivered=[7, 7], max_tokens=6, usage=before)
    story.step()
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.now += 1.5
    story.resume("a")
    story.until(lambda: story.scheduler.idle)
    usage = story.ending("a").usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 6, 4)
    assert (usage.parks, usage.parked_ms, usage.recomputed_tokens) == (4, 2000, 11 + 7)


def test_forced_parks_go_on_counting_from_the_delivered_tokens():
    story = Story(park_every=5)
    story.submit("a", 6, delivered=[7] * 7, max_tokens=12)
    story.until(lambda: story.scheduler.idle)
    assert story.ending("a").usage.parks == 1


def test_a_step_that_is_forgotten_is_fed_again_and_its_late_result_ignored():
    story = Story()
    story.submit("a", 6, max_tokens=3)
    lost = story.plan()
    again = story.plan()
    assert again.epoch > lost.epoch
    assert [(row.start, row.count) for row in again.rows] == [(0, 6)]
    story.handle(StepDone([RowResult("a", [99])], lost.epoch))
    assert "a" not in story.said and len(story["a"].tokens) == 6
    story.handle(StepDone([RowResult("a", [7])], again.epoch))
    story.handle(StepDone([RowResult("a", [7])], again.epoch))
    story.until(lambda: story.scheduler.idle)
    assert story.said["a"] == [7, 7, 7]


def test_results_without_a_row_and_rows_without_a_result_are_survived():
    story = Story()
    story.submit("a", 6, max_tokens=3)
    story.submit("b", 6, max_tokens=3)
    plan = story.plan()
    story.handle(StepDone([RowResult("stranger", [1]), RowResult("b", [7])], plan.epoch))
    assert len(story["a"].tokens) == 6
    story.until(lambda: story.scheduler.idle)
    assert (story.said["a"], story.said["b"]) == ([7] * 3, [7] * 3)


# reuse and its numbers -------------------------------------------------------------------------------------------------
def test_the_next_turn_of_a_chat_finds_the_blocks_of_the_last():
    story = Story()
    first = list(range(10))
    story.submit("one", first, max_tokens=6)
    story.until(lambda: story.scheduler.idle)
    story.submit("two", [*first, *[7] * 6, 50, 51], max_tokens=2)
    plan = story.step()
    row = story.row(plan, "two")
    assert (row.start, row.count) == (12, 6), "15 cells were computed: three full blocks"
    story.until(lambda: story.scheduler.idle)
    assert story.ending("two").usage.cached_tokens == 12


def test_at_least_the_last_prompt_token_is_computed():
    story = Story()
    prompt = list(range(12))
    story.submit("one", prompt, max_tokens=1)
    story.until(lambda: story.scheduler.idle)
    story.submit("two", prompt, max_tokens=1)
    row = story.row(story.step(), "two")
    assert (row.start, row.count) == (8, 4)


def test_without_reuse_nothing_is_found_or_kept():
    story = Story(reuse=False)
    prompt = list(range(12))
    for name in ("one", "two"):
        story.submit(name, prompt, max_tokens=3)
        story.until(lambda: story.scheduler.idle)
        assert story.ending(name).usage.cached_tokens == 0
    assert story.scheduler.book.pool.free == 20


def test_hits_after_a_park_are_not_cached_tokens():
    story = Story(saves="denied")
    story.submit("a", 20, max_tokens=8)
    story.steps(2)
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.resume("a")
    story.until(lambda: story.scheduler.idle)
    assert story.ending("a").usage.cached_tokens == 0


# prompt log probabilities ----------------------------------------------------------------------------------------------
def run_scored(story: Story, name: str) -> list[tuple[int, int]]:
    """Run to the end, answering each prompt position with Logprob(position); what was delivered as (offset, position)."""
    for _ in range(100):
        if name not in story.scheduler.sequences:
            break
        plan = story.plan()
        results = []
        for row in plan.rows:
            scored = []
            if row.prompt_logprobs is not None:
                end = min(row.start + row.count, row.prompt_len - 1)
                scored = [Logprob(position, -1.0) for position in range(row.start + 1, end + 1)]
            results.append(RowResult(row.request_id, [7] if row.samples else [], prompt_logprobs=scored))
        if plan.rows:
            story.handle(StepDone(results, plan.epoch))
        if name in story.scheduler.sequences and story["a"].parks == 0 and story["a"].computed >= 5:
            story.park(name)
            story.resume(name)
            story.scheduler._to_park[name] = "explicit"
    story.plan()
    return [(e.prompt_offset + i, p.token) for e in story.actions(Emit, name) for i, p in enumerate(e.prompt_logprobs)]


def test_each_prompt_position_is_scored_once_though_it_was_parked_in_its_prompt_and_recomputed():
    for saves, reuse in (("granted", True), ("denied", True), ("denied", False)):
        story = Story(saves=saves, reuse=reuse, step_tokens=3, slots=1)
        story.submit("a", 14, max_tokens=2, prompt_logprobs=0)
        assert run_scored(story, "a") == [(position, position) for position in range(1, 14)]
        assert story.parked() == ["a"]


def test_a_scored_prompt_takes_no_hit():
    story = Story()
    prompt = list(range(12))
    story.submit("one", prompt, max_tokens=1)
    story.until(lambda: story.scheduler.idle)
    story.submit("a", prompt, max_tokens=1, prompt_logprobs=0)
    story["a"].parks = 1
    assert run_scored(story, "a") == [(position, position) for position in range(1, 12)]
    assert story.ending("a").usage.cached_tokens == 0
