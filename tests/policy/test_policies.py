"""Each policy's line, how far ahead it looks, whom it parks first, and the gap it leaves when somebody comes in.

Pool: 20 blocks of 4 cells, HIGH 18, LOW 12.
"""

import pytest

from gpu_worker.policy import preemption
from gpu_worker.policy.events import LeaseDenied, Reserve
from gpu_worker.policy.policies import ENTER_AHEAD, policy_of
from gpu_worker.policy.scheduler import Limits
from tests.policy.story import Story

AHEAD = ("lookahead", "ondemand")
PARKING = ("watermark", *AHEAD)


def two(policy: str, **limits) -> Story:
    """a is the larger, b the newer; they end far beyond the pool. Both came in at once, while nobody had to leave a gap."""
    story = Story(policy=policy, **limits)
    story.submit("a", 14, max_tokens=60)
    story.submit("b", 7, max_tokens=60)
    story.until(lambda: story.states("a", "b") == ["running", "running"])
    return story


def full_at_first_park(story: Story) -> tuple[int, int]:
    """(blocks used, blocks that the next step needs) when the first one is parked."""
    needs = 0
    while not story.actions(Reserve):
        running = story.scheduler.book.running.values()
        needs = sum(len(seq.tokens) + 1 > len(seq.blocks) * 4 for seq in running)
        used = story.used
        story.step()
    return used, needs


def enter_both(policy: str, first: int, second: int, tokens: int, **limits) -> list[str]:
    """Who is on the device after two that may get `tokens` each have asked to come in."""
    story = Story(policy=policy, **limits)
    story.submit("a", first, max_tokens=tokens)
    story.submit("b", second, max_tokens=tokens)
    story.step()
    return story.states("a", "b")


def test_the_table_of_policies():
    def limits(policy: str, **more) -> Limits:
        return Limits(num_blocks=100, block_size=4, slots=4, max_context=400, policy=policy, **more)

    watermark, lookahead, ondemand, off = (policy_of(limits(policy)) for policy in ("watermark", "lookahead", "ondemand", "off"))
    assert (watermark.park_line, watermark.park_ahead, watermark.enter_line, watermark.enter_ahead) == (94, 1, 80, 1)
    assert (lookahead.park_line, lookahead.park_ahead, lookahead.enter_line, lookahead.enter_ahead) == (100, 8, 100, ENTER_AHEAD)
    assert (ondemand.park_line, ondemand.park_ahead, ondemand.enter_line, ondemand.enter_ahead) == (100, 1, 100, ENTER_AHEAD)
    assert (off.enter_line, off.enter_ahead) == (100, 1)
    assert [policy.parks for policy in (watermark, lookahead, ondemand, off)] == [True, True, True, False]
    assert policy_of(limits("lookahead", lookahead_steps=50)).enter_ahead == 100, "the gap is wider than the look ahead"


def test_watermark_parks_when_the_next_step_would_pass_high():
    story = Story()
    story.submit("a", 24)
    story.submit("b", 7)
    used, needs = full_at_first_park(story)
    assert used <= 18 < used + needs


def test_ondemand_parks_when_the_next_step_does_not_fit():
    story = Story(policy="ondemand")
    story.submit("a", 4, max_tokens=50)
    story.submit("b", 4, max_tokens=50)
    story.step()
    assert story.states("a", "b") == ["running", "waiting"], "it would not fit for 64 steps more"
    story = together("ondemand")
    used, needs = full_at_first_park(story)
    assert used <= 20 < used + needs, "the pool is full to the last block"


def together(policy: str, **limits) -> Story:
    """Two whose growth does not fit: their end was set when both were in."""
    story = Story(policy=policy, **limits)
    story.submit("a", 10, max_tokens=20)
    story.submit("b", 6, max_tokens=20)
    story.step()
    assert story.states("a", "b") == ["running", "running"]
    for name in "ab":
        story[name].end_len += 40
    return story


@pytest.mark.parametrize("steps", [1, 4, 8, 16])
def test_lookahead_parks_so_many_steps_before_the_pool_is_full(steps):
    story = together("lookahead", lookahead_steps=steps)
    story.until(story.parked)
    ends = [len(story[name].tokens) for name in "ab"]  # b has left before this step was taken
    grown = -(-(ends[0] - 1 + steps - 1) // 4) + -(-(ends[1] + steps - 1) // 4)
    assert grown > 20, "with so many steps more it would not have fitted"
    assert grown - 2 <= 20, "and with as many less it would have"


@pytest.mark.parametrize("policy", AHEAD)
def test_the_smallest_is_parked_first_though_it_is_the_oldest(policy):
    story = Story(policy=policy, slots=3)
    story.submit("small", 4, max_tokens=16)
    story.submit("large", 14, max_tokens=12)
    story.submit("middle", 9, max_tokens=12)
    story.step()
    for name in ("small", "large", "middle"):
        story[name].end_len += 30
    story.until(story.parked)
    assert story.parked() == ["small"]


def test_watermark_parks_the_newest_first_though_it_is_larger_than_another():
    story = Story(slots=3)
    for name, prompt in (("large", 20), ("small", 4), ("newest", 9)):
        story.submit(name, prompt)
    story.until(story.parked)
    assert story.parked() == ["newest"]


def test_watermark_lets_in_what_fits_below_low():
    assert enter_both("watermark", 23, 23, 30) == ["running", "running"], "6 + 6 blocks"
    assert enter_both("watermark", 23, 24, 30) == ["running", "waiting"], "6 + 7"


@pytest.mark.parametrize("policy", AHEAD)
def test_there_must_be_room_for_the_next_64_steps_or_up_to_the_end(policy):
    assert enter_both(policy, 20, 20, 20) == ["running", "running"], "10 + 10 blocks at their ends"
    assert enter_both(policy, 20, 20, 22) == ["running", "waiting"], "11 + 11"
    wide = {"num_blocks": 40, "policy": policy}
    story = Story(**wide)
    story.submit("a", 16, max_tokens=1000)
    story.submit("b", 16, max_tokens=1000)
    story.step()
    assert story.states("a", "b") == ["running", "running"], "16 + 63 tokens each: 20 + 20 blocks"
    story.submit("c", 1, max_tokens=1)
    story.step()
    assert story.state("c") == "waiting"


@pytest.mark.parametrize("policy", PARKING)
def test_a_prompt_beyond_the_gap_comes_in_when_nobody_is_on_the_device(policy):
    assert enter_both(policy, 75, 3, 5) == ["running", "waiting"]


def test_off_fills_the_pool_with_no_gap():
    assert enter_both("off", 39, 39, 60) == ["running", "running"], "10 + 10 blocks, to the last"
    assert enter_both("off", 39, 40, 60) == ["running", "waiting"]


@pytest.mark.parametrize("policy", PARKING)
@pytest.mark.parametrize("order", ["most-parked", "head"])
@pytest.mark.parametrize("saves", ["granted", "denied"])
def test_many_short_beside_one_huge_all_end(policy, order, saves):
    story = Story(policy=policy, resume_order=order, saves=saves)
    story.submit("huge", 50, max_tokens=29)
    names = [f"s{number}" for number in range(10)]
    for name in names:
        story.submit(name, 5, max_tokens=12)
    story.until(lambda: story.scheduler.idle, most=2000)
    assert story.ending("huge").usage.completion_tokens == 29
    assert {story.ending(name).usage.completion_tokens for name in names} == {12}


@pytest.mark.parametrize("policy", PARKING)
def test_one_that_outgrows_the_pool_alone_ends_with_length(policy):
    story = Story(policy=policy)
    story.submit("a", 20, max_tokens=1000)
    story.until(lambda: story.scheduler.idle)
    assert (story.ending("a").reason, story.ending("a").usage.completion_tokens) == ("length", 60)


@pytest.mark.parametrize("policy", [*PARKING, "off"])
def test_a_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers(policy):
    story = Story(policy=policy)
    story.submit("long", 80)
    ending = story.ending("long")
    assert ending.code == "context_length_exceeded"
    assert "80 tokens" in ending.error and "80 cells" in ending.error


@pytest.mark.parametrize("policy", PARKING)
def test_siblings_under_pressure_share_their_prompt_and_all_end(policy):
    story = Story(policy=policy)
    story.submit("first", 13, max_tokens=40)
    prompt = story["first"].tokens[:]
    for number in range(1, 4):
        story.submit(f"n{number}", prompt, max_tokens=40, sibling_of="first")
    story.until(lambda: story.scheduler.idle, most=1000)
    for name in ("first", "n1", "n2", "n3"):
        assert story.ending(name).usage.completion_tokens == 40
    assert any(story.ending(f"n{number}").usage.cached_tokens == 12 for number in range(1, 4))


@pytest.mark.parametrize("policy", PARKING)
def test_a_prompt_in_the_middle_of_its_prefill_may_be_a_victim_and_ends_whole(policy):
    story = Story(policy=policy, step_tokens=4, low=80)
    story.submit("a", 20, max_tokens=50)
    story.submit("b", 9, max_tokens=12)
    story.until(lambda: story["b"].generated > 0)
    story.submit("late", 19, max_tokens=4)
    story.until(lambda: story.state("late") == "running" and 0 < story["late"].computed < 19)
    story.park("late")
    story.until(lambda: story.state("late") == "parked")
    assert story["late"].generated == 0
    story.resume("late")
    story.until(lambda: story.state("late") == "gone")
    assert story.said["late"] == [7, 7, 7, 7]


def test_what_a_running_park_will_free_is_counted_so_that_nobody_else_is_parked():
    for policy in AHEAD:
        story = together(policy)
        story.saves = "by hand"
        story.until(lambda story=story: story.state("b") == "parking")
        story.steps(3)
        assert [action.request_id for action in story.actions(Reserve)] == ["b"]


def test_two_that_share_blocks_free_them_together_and_nobody_else_is_parked():
    story = Story(num_blocks=60, low=80)
    shared = list(range(32))
    story.submit("b", [*shared, 1])
    story.submit("other", 20)
    story.until(lambda: "b" in story.said)
    story.submit("c", [*shared, 2])
    story.step()
    book = story.scheduler.book
    order = [story["b"], story["c"], story["other"]]
    assert preemption.enough(order, 10, book.leaving(), steps=1) == (order[:2], 0), "8 shared blocks and one each"
    assert preemption.enough(order, 11, book.leaving(), steps=1) == (order, -5)
    assert preemption.enough(order, 1, book.leaving(), steps=1) == (order[:1], 0)
    assert preemption.enough([order[0], order[2]], 5, book.leaving(), steps=1) == (order[2:], -1), "the larger alone would do"


def test_one_that_fits_alone_only_is_the_next_when_the_last_one_is_leaving():
    story = Story()
    story.submit("large", 52, max_tokens=20)
    story.step()
    for name in ("small", "leaving"):
        story.park("large" if name == "small" else "small")
        story.step()
        story.submit(name, 5, max_tokens=60)
        story.until(lambda name=name: story.state(name) == "running")
    story.saves = "by hand"
    story.park("leaving")
    story.step()
    story.resume("small")
    story.resume("large")
    story["large"].pressure_parks = 1  # it would be the first
    story.steps(3)
    assert story.states("large", "small", "leaving") == ["parked", "parked", "parking"], "the small one does not pass it"
    story.handle(LeaseDenied(story.actions(Reserve, "leaving")[-1].ask, "full"))
    story.plan()
    assert story.state("large") in ("resuming", "running")
    assert story.state("small") == "parked"
