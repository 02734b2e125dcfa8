"""Bounds: on parks, on waits, on recomputes that lead nowhere. Pool: 20 blocks of 4 cells, HIGH 18, LOW 12."""

import pytest

from gpu_worker.policy import preemption
from gpu_worker.policy.events import Reserve, StepDone
from tests.policy.story import Story


def crowd(**limits) -> Story:
    story = Story(slots=1, **limits)
    story.submit("batch", 3, priority=3, max_tokens=10)
    story.step()
    story.submit("chat", 3, priority=0, max_tokens=6)
    story.until(lambda: story.state("batch") == "parked")
    story.submit("next chat", 3, priority=0, max_tokens=6)
    return story


def test_one_that_has_waited_max_park_s_comes_back_first_whatever_its_class():
    story = crowd(max_park_s=20.0)
    story.now += 19
    story.step()
    assert preemption.aged(story["batch"], 20.0, story.now) is False
    story.now += 1
    story.until(lambda: story.state("chat") == "gone")
    story.step()
    assert story.states("batch", "next chat") == ["running", "waiting"]


def test_without_max_park_s_the_better_class_goes_first():
    story = crowd()
    story.now += 25
    story.until(lambda: story.state("chat") == "gone")
    story.step()
    assert story.states("batch", "next chat") == ["parked", "running"]


def test_one_that_came_back_by_its_age_is_not_parked_for_a_better_one_at_once():
    story = crowd(max_park_s=20.0)
    story.now += 20
    story.until(lambda: story.state("batch") == "running")
    story.steps(3)
    assert story.states("batch", "next chat") == ["running", "waiting"]
    story.until(lambda: story.state("batch") == "gone")
    assert story.parked() == ["batch"]


def test_nobody_passes_one_that_has_waited_too_long_and_does_not_fit():
    story = Story(max_park_s=10.0)
    for name, prompt in (("a", 20), ("large", 18), ("small", 2)):
        story.submit(name, prompt, max_tokens=40)
        story.step()
        if name != "a":
            story.park(name)
            story.until(lambda name=name: story.state(name) == "parked")
    story.until(lambda: len(story["a"].blocks) == 9)
    story.resume("large")
    story.now += 10
    story.resume("small")
    story.steps(3)
    assert story.states("a", "large", "small") == ["running", "parked", "parked"]
    story.until(lambda: story.state("a") == "gone")
    story.until(lambda: story.states("large", "small") == ["running", "running"], most=5)


def test_waiting_by_an_operators_wish_is_not_counted_as_waiting():
    story = Story(max_park_s=10.0)
    story.submit("a", 3)
    story.step()
    story.park("a")
    story.step()
    story.now += 100
    assert not preemption.aged(story["a"], 10.0, story.now)
    story.resume("a")
    assert not preemption.aged(story["a"], 10.0, story.now)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_one_parked_protect_after_times_is_passed_over_while_another_exists(after):
    story = Story(protect_after=after)
    for name, prompt in (("a", 20), ("b", 9), ("c", 7)):
        story.submit(name, prompt)
    story.step()
    story["c"].pressure_parks = after
    story["b"].pressure_parks = after - 1
    story.until(lambda: story.actions(Reserve))
    assert story.actions(Reserve)[0].request_id == "b"


def test_protect_after_is_what_was_set():
    story = Story(protect_after=5)
    for name, prompt in (("a", 20), ("b", 9), ("c", 7)):
        story.submit(name, prompt)
    story.step()
    story["c"].pressure_parks = 4
    story.until(lambda: story.actions(Reserve))
    assert story.actions(Reserve)[0].request_id == "c"


def test_a_recompute_without_progress_is_ended_with_a_clear_error_and_counted():
    story = Story()
    story.submit("a", 10)
    story.submit("b", 4)
    story.until(lambda: story["a"].generated == 2)
    for _ in range(preemption.STALLED_AFTER):
        plan = story.plan()
        story.handle(StepDone([story.result(row, {}) for row in plan.rows if row.request_id == "b"], plan.epoch))
    assert story.state("a") == "running"
    plan = story.plan()
    story.handle(StepDone([story.result(row, {}) for row in plan.rows if row.request_id == "b"], plan.epoch))
    ending = story.ending("a")
    assert (ending.reason, ending.code) == ("error", "recompute_stalled")
    assert "12 tokens" in ending.error and "33 times" in ending.error and "--ctx" in ending.error
    assert story.scheduler.book.stalled == 1
    assert story.state("b") == "running"


def test_one_that_stalled_while_it_was_parked_is_ended_instead_of_resumed():
    story = Story()
    story.submit("a", 10)
    story.step()
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story["a"].restarts = preemption.STALLED_AFTER + 1
    story.resume("a")
    story.step()
    assert story.ending("a").code == "recompute_stalled"


def test_a_new_token_is_progress():
    story = Story()
    story.submit("a", 10)
    story.step()
    story["a"].restarts = preemption.STALLED_AFTER
    story.step()
    assert story["a"].restarts == 0


def test_an_operator_may_park_one_as_often_as_he_likes():
    story = Story(saves="denied", reuse=False)
    story.submit("a", 10, max_tokens=1000)
    story.step()
    for _ in range(2 * preemption.STALLED_AFTER):
        story.park("a")
        story.until(lambda: story.state("a") == "parked")
        story.resume("a")
        story.plan()
    assert story.state("a") == "running"
    assert story["a"].parks == 2 * preemption.STALLED_AFTER
    assert story["a"].restarts == 0 == story["a"].pressure_parks


@pytest.mark.parametrize(("bound", "state"), [(2, "parked"), (3, "running")])
def test_a_plan_looks_at_a_bounded_number_of_parked_ones(bound, state, monkeypatch):
    """What a plan costs must not grow with all that is parked: behind so many that do not fit, it stops."""
    monkeypatch.setattr(preemption, "PASSED_AT_ONCE", bound)
    story = Story()
    story.submit("a", 3, max_tokens=70)
    story.step()
    names = ["large", "larger", "small"]
    for name, prompt in zip(names, (30, 34, 2)):
        story.submit(name, prompt, max_tokens=40)
        story.step()
        story.park(name)
        story.until(lambda name=name: story.state(name) == "parked")
    story.until(lambda: len(story["a"].blocks) == 6)
    for name in names:
        story.resume(name)
    story.step()
    assert story.states(*names) == ["parked", "parked", state]
