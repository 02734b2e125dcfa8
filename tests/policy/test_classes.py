"""Classes: who counts as better, who is parked for whom, and why nobody starves. Pool: 20 blocks of 4 cells, HIGH 18, LOW 12."""

import pytest

from gpu_worker.policy import preemption
from gpu_worker.policy.events import Reserve
from tests.policy.story import Story

PARKING = ("watermark", "lookahead", "ondemand")


@pytest.mark.parametrize("policy", PARKING)
def test_the_worst_class_is_parked_first_and_the_largest_of_the_best_is_protected(policy):
    story = Story(policy=policy)
    for name, prompt, priority in (("worst", 18, 9), ("best", 4, 0), ("largest best", 9, 0), ("middle", 5, 4)):
        story.submit(name, prompt, priority=priority, max_tokens=6)
    story.step()
    for name in ("worst", "best", "largest best", "middle"):
        story[name].end_len += 50
    story.until(lambda: story.state("largest best") == "gone", most=1000)
    first = list(dict.fromkeys(story.parked()))
    assert first == ["worst", "middle", "best"]
    assert story.ending("largest best").usage.parks == 0
    story.until(lambda: story.scheduler.idle, most=2000)


@pytest.mark.parametrize("policy", PARKING)
def test_a_better_one_displaces_a_worse_one_for_cells(policy):
    story = Story(policy=policy)
    story.submit("batch", 30, priority=5, max_tokens=40)
    story.step()
    story.submit("chat", 30, priority=0, max_tokens=20)
    story.until(lambda: story.state("chat") == "running", most=5)
    assert story.state("batch") == "parked"
    story.until(lambda: story.state("chat") == "gone")
    assert story.ending("chat").usage.parks == 0
    story.until(lambda: story.state("batch") == "gone")
    assert story.ending("batch").usage.completion_tokens == 40


@pytest.mark.parametrize("policy", PARKING)
def test_a_better_one_displaces_a_worse_one_for_a_seat(policy):
    story = Story(policy=policy, slots=2)
    story.submit("batch", 3, priority=5, max_tokens=20)
    story.submit("other", 3, priority=6, max_tokens=20)
    story.step()
    story.submit("chat", 3, priority=0, max_tokens=3)
    story.until(lambda: story.state("chat") == "running", most=5)
    assert story.states("batch", "other") == ["running", "parked"], "the worst, and no more than the one seat needs"


def test_a_seat_that_is_about_to_become_free_is_counted_so_that_no_second_one_is_displaced():
    """Who is being parked keeps its state slot until it is saved."""
    story = Story("by hand", slots=2, state_slots=2, reuse=False)
    story.submit("batch", 3, priority=5)
    story.submit("other", 3, priority=6)
    story.step()
    story.submit("chat", 3, priority=0)
    story.step()
    story.submit("another", 3, priority=6)
    story.steps(2)
    assert story.states("batch", "other", "chat") == ["running", "parking", "waiting"]


def test_an_equal_one_displaces_nobody():
    story = Story(slots=1)
    story.submit("a", 3, priority=5)
    story.step()
    story.submit("b", 3, priority=5)
    story.submit("c", 3, priority=6)
    story.steps(10)
    assert story.states("a", "b", "c") == ["running", "waiting", "waiting"]
    assert not story.actions(Reserve)


def test_one_that_comes_back_alone_only_displaces_nobody():
    story = Story()
    story.submit("chat", 3, priority=0)
    story.step()
    story.park("chat")
    story.until(lambda: story.state("chat") == "parked")
    story["chat"].pressure_parks = preemption.EXHAUSTED_AFTER
    story.submit("equal", 20, priority=0, max_tokens=30)
    story.submit("batch", 20, priority=5, max_tokens=10)
    story.until(lambda: story.used == 12)
    story.resume("chat")
    story.steps(3)
    assert story.states("chat", "equal", "batch") == ["parked", "running", "running"]


def test_off_displaces_nobody():
    story = Story(policy="off", slots=1)
    story.submit("batch", 3, priority=5)
    story.step()
    story.submit("chat", 3, priority=0)
    story.steps(3)
    assert story.states("batch", "chat") == ["running", "waiting"]


def test_nobody_is_displaced_where_that_would_not_be_enough():
    story = Story()
    story.submit("equal", 31, priority=0, max_tokens=40)
    story.submit("batch", 3, priority=5, max_tokens=40)
    story.step()
    story.submit("chat", 30, priority=0, max_tokens=4)
    story.steps(3)
    assert story.states("equal", "batch", "chat") == ["running", "running", "waiting"]


def test_blocks_that_the_better_one_would_share_with_the_worse_are_not_won_by_parking_that():
    story = Story()
    shared = list(range(36))
    story.submit("batch", [*shared, 1], priority=5, max_tokens=30)
    story.submit("chat", 3, priority=0, max_tokens=30)
    story.until(lambda: story.used == 14)
    story.submit("late", [*shared, 2], priority=0, max_tokens=2)
    story.step()
    assert story.states("batch", "late") == ["running", "waiting"], "10 blocks less, and 10 more"
    assert not story.actions(Reserve)


def test_two_are_displaced_where_one_is_not_enough_and_no_third():
    story = Story(low=80)  # 16
    for number in range(3):
        story.submit(f"batch{number}", 16, priority=5, max_tokens=40)
    story.step()
    assert story.used == 15
    story.submit("chat", 31, priority=0, max_tokens=8)
    story.until(lambda: story.state("chat") == "running", most=5)
    assert story.states("batch0", "batch1", "batch2") == ["running", "parked", "parked"], "5 + 8 blocks are within LOW"


def test_the_one_displaced_does_not_come_back_before_the_better_one_has_left():
    story = Story(slots=1)
    story.submit("batch", 3, priority=5, max_tokens=8)
    story.step()
    story.submit("chat", 3, priority=0, max_tokens=8)
    story.until(lambda: story.state("chat") == "gone")
    assert story.parked() == ["batch"]
    assert story.resumed() == []
    story.until(lambda: story.state("batch") == "gone")
    assert story.resumed() == ["batch"]


def test_nobody_of_a_worse_class_comes_in_before_a_better_one_that_does_not_fit():
    story = Story()
    story.submit("a", 40, max_tokens=30)
    story.step()
    story.submit("large", 30, max_tokens=2)
    story.submit("small and worse", 2, priority=1, max_tokens=2)
    story.steps(5)
    assert story.states("large", "small and worse") == ["waiting", "waiting"]


def test_every_third_park_promotes_by_one_class():
    story = Story(slots=1)
    story.submit("batch", 3, priority=2, max_tokens=60)
    story.step()
    for number in range(4):
        story.submit(f"chat{number}", 3, priority=0, max_tokens=2)
        story.until(lambda number=number: story.state(f"chat{number}") == "gone")
        story.until(lambda: story.state("batch") == "running")
    story.submit("middle", 3, priority=1, max_tokens=2)
    story.steps(5)
    assert story.parked("pressure") == ["batch"] * 4
    assert story.states("batch", "middle") == ["running", "waiting"], "it counts as one of these now"


def test_nobody_is_displaced_by_the_park_that_makes_it_an_equal():
    """It would come back at once, before the one it was parked for."""
    story = Story(slots=1)
    story.submit("batch", 3, priority=1, max_tokens=60)
    story.step()
    story["batch"].pressure_parks = 2
    story.submit("chat", 3, priority=0, max_tokens=2)
    story.steps(5)
    assert story.states("batch", "chat") == ["running", "waiting"]
    assert story.parked() == []


@pytest.mark.parametrize("policy", PARKING)
@pytest.mark.parametrize("priorities", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3), (-100, 0, 10, 100)])
def test_equal_ones_and_classes_do_not_take_turns(policy, priorities):
    """Each park lies at least the policy's gap in new cells, an arrival or an end behind the last one that came in."""
    story = Story(policy=policy)
    for number, priority in enumerate(priorities):
        story.submit(f"r{number}", 5, priority=priority, max_tokens=60)
    story.until(lambda: story.scheduler.idle, most=3000)
    cells = 4 * 65
    assert len(story.parked()) <= cells // (4 * 6) + 4, "six blocks between HIGH and LOW for each, and as many ends"


def test_one_of_the_worst_class_under_a_stream_of_better_ones_comes_to_its_end():
    story = Story(slots=1)
    story.submit("batch", 3, priority=2, max_tokens=60)
    story.step()
    for number in range(30):
        if story.state("batch") != "gone":
            story.submit(f"chat{number}", 3, priority=0, max_tokens=40)
            for _ in range(5):
                story.now += 1
                story.step()
    story.until(lambda: story.state("batch") == "gone", most=2000)
    assert any(story.state(f"chat{number}") == "waiting" for number in range(30)), "before the last of them"
    assert story.ending("batch").usage.parks <= preemption.EXHAUSTED_AFTER


def test_a_promotion_never_makes_better_than_the_best_present():
    story = Story()
    story.submit("batch", 3, priority=5)
    story.submit("chat", 3, priority=2)
    story.step()
    story["batch"].promoted = 50
    assert story.watch.class_of(story["batch"]) == 2
    story.cancel("chat")
    assert story.watch.class_of(story["batch"]) == 5
