"""Cancel works in every state; what a copy or a step touches changes hands only when that has ended; nobody else is touched."""

import pytest

from gpu_worker.policy.events import LeaseGranted, Loaded, ReleaseLease, Reserve, Saved, StepDone
from gpu_worker.policy.pool import KvPool
from tests.policy.story import Story


def beside(**limits) -> Story:
    """a and b run side by side."""
    story = Story(**{"saves": "by hand", **limits})
    story.submit("a", 10)
    story.submit("b", 5, max_tokens=30)
    story.steps(2)
    return story


def in_parking() -> Story:
    story = beside()
    story.park("a")
    story.plan()
    return story


def in_saving() -> Story:
    story = in_parking()
    story.handle(LeaseGranted(1, 7))
    story.plan()
    return story


def in_parked() -> Story:
    story = in_saving()
    story.handle(Saved("a", True))
    return story


def in_resuming() -> Story:
    story = in_parked()
    story.resume("a")
    story.plan()
    assert story.state("a") == "resuming"
    return story


def whole(story: Story) -> None:
    """a has ended as cancelled and gave everything back; b ends as if nothing had been."""
    assert story.ending("a").reason == "cancelled"
    story.until(lambda: story.state("b") == "gone")
    assert story.ending("b").usage.completion_tokens == 30
    assert story.said["b"] == [7] * 30
    pool: KvPool = story.scheduler.book.pool
    assert pool.used == 0
    assert story.scheduler.idle
    assert story.scheduler.load().slots[0].state == "idle"


def test_while_waiting():
    story = beside(slots=1)
    assert story.state("b") == "waiting"
    story.submit("c", 5)
    story.cancel("c")
    assert story.ending("c").reason == "cancelled"
    story.cancel("a")
    whole(story)


def test_in_its_prompt():
    story = Story(step_tokens=4)
    story.submit("b", 5, max_tokens=30)
    story.submit("a", 20)
    story.steps(4)
    assert 0 < story["a"].computed < 20
    story.cancel("a")
    assert story.ending("a").usage.completion_tokens == 0
    story.until(lambda: story.state("b") == "gone")
    assert story.used == 0


def test_while_running():
    story = beside()
    story.cancel("a")
    assert story.state("a") == "gone", "at once: no step is under way"
    whole(story)


def test_in_the_middle_of_a_step_it_ends_with_the_step():
    story = beside()
    plan = story.plan()
    story.cancel("a")
    assert story.state("a") == "running"
    blocks = list(story["a"].blocks)
    assert all(story.scheduler.book.pool.refs(block) for block in blocks)
    story.handle(StepDone([story.result(row, {}) for row in plan.rows], plan.epoch))
    assert story.state("a") == "gone"
    whole(story)


def test_while_it_waits_for_a_lease():
    story = in_parking()
    story.cancel("a")
    assert story.state("a") == "gone"
    story.handle(LeaseGranted(1, 7))
    story.plan()
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]
    whole(story)


def test_during_the_save_it_keeps_its_blocks_until_the_copy_has_ended():
    story = in_saving()
    blocks = list(story["a"].blocks)
    story.cancel("a")
    assert story.state("a") == "parking"
    story.steps(2)
    assert story["a"].blocks == blocks
    story.handle(Saved("a", True))
    assert story.state("a") == "gone"
    whole(story)
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]
    assert story.parked() == [], "nobody is told of a park that was not"


def test_while_parked():
    story = in_parked()
    story.cancel("a")
    assert story.state("a") == "gone"
    whole(story)
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]


@pytest.mark.parametrize("ok", [True, False])
def test_during_the_load_it_keeps_its_blocks_until_the_copy_has_ended(ok):
    story = in_resuming()
    story.cancel("a")
    story.steps(2)
    assert story.state("a") == "resuming"
    assert story["a"].blocks
    story.handle(Loaded("a", ok))
    whole(story)
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]


def test_the_unknown_and_the_ended_are_ignored():
    story = beside()
    story.cancel("nobody")
    story.cancel("a")
    story.cancel("a")
    assert story.ending("a").reason == "cancelled"


def test_cancelled_ones_that_wait_leave_nothing_in_the_queue():
    story = Story(slots=1)
    story.submit("a", 5)
    story.step()
    for number in range(50):
        story.submit(f"w{number}", 5)
    for number in range(50):
        story.cancel(f"w{number}")
    assert len(story.scheduler.book.waiting) == 0
    story.plan()
    assert not story.actions(Reserve)


def test_an_id_may_be_used_again_when_it_has_ended():
    story = Story()
    story.submit("a", 5, max_tokens=3)
    story.until(lambda: story.state("a") == "gone")
    story.plan()
    story.log.clear()
    story.submit("a", 5, max_tokens=4)
    story.until(lambda: story.state("a") == "gone")
    assert story.ending("a").usage.completion_tokens == 4


def test_an_id_that_is_in_use_ends_once():
    story = beside()
    story.submit("a", 5)
    assert story.state("a") == "gone"
    whole(story)
