"""Room for recurrent states: who holds which slot, and when it changes hands. 20 blocks of 4 cells, 4 slots, HIGH 18, LOW 12."""

import pytest

from gpu_worker.policy.events import HostCacheLost, LeaseGranted, Load, Loaded, Reserve, Save, Saved
from tests.policy.story import Story


def recurrent(state_slots: int = 6, **limits) -> Story:
    return Story(**{"reuse": False, "state_slots": state_slots, **limits})


def slots(story: Story) -> dict[str, int]:
    return {name: seq.state_slot for name, seq in story.scheduler.sequences.items()}


def saving() -> Story:
    """`a` alone, and its image being saved."""
    story = recurrent(saves="by hand")
    story.submit("a", 6)
    story.until(lambda: "a" in story.said)
    story.park("a")
    story.handle(LeaseGranted(story.plan().actions[-1].ask, 7))
    story.plan()
    return story


def test_each_on_the_device_has_one_of_its_own_and_its_row_says_which():
    story = recurrent()
    story.submit("a", 4)
    story.submit("b", 4)
    story.submit("giant", 70)
    plan = story.step()
    assert [(row.request_id, row.state_slot) for row in plan.rows] == [("a", 0), ("b", 1)]
    assert slots(story) == {"a": 0, "b": 1, "giant": -1}
    assert [row.state_slot for row in story.step().rows] == [0, 1], "it keeps it"


def test_a_model_without_a_state_has_no_slots():
    story = Story()
    story.submit("a", 4)
    assert story.step().rows[0].state_slot == -1


def test_nobody_comes_in_without_one():
    story = recurrent(2)
    for name in ("a", "b", "c"):
        story.submit(name, 4, max_tokens=3)
    story.step()
    assert story.states("a", "b", "c") == ["running", "running", "waiting"]
    story.until(lambda: story.state("a") == "gone")
    story.step()
    assert story.state("c") == "running"
    story.until(lambda: story.scheduler.idle)


def test_it_is_held_until_the_image_is_saved_and_the_resume_gets_another():
    story = recurrent(3, saves="by hand")
    story.submit("a", 6)
    story.submit("b", 6)
    story.until(lambda: len(story.said) == 2)
    story.park("a")
    reserve = story.plan().actions[-1]
    assert isinstance(reserve, Reserve)
    story.handle(LeaseGranted(reserve.ask, 7))
    (save,) = (action for action in story.plan().actions if isinstance(action, Save))
    assert (save.state_slot, save.position) == (0, 6)
    assert slots(story)["a"] == 0, "the copy reads it"
    story.handle(Saved("a", True))
    assert slots(story)["a"] == -1
    story.resume("a")
    (load,) = (action for action in story.plan().actions if isinstance(action, Load))
    assert (load.first, len(load.blocks), load.state_slot) == (0, 2, 2), "the whole image, into another slot"
    assert story.state("a") == "resuming"
    story.handle(Loaded("a", True))
    row = story.row(story.step(), "a")
    assert (row.start, row.count, row.state_slot) == (6, 1, 2)


def test_a_park_under_way_keeps_out_who_would_need_its_slot():
    story = recurrent(2, saves="by hand")
    for name in ("a", "b", "c"):
        story.submit(name, 4)
    story.until(lambda: len(story.said) == 2)
    story.park("a")
    story.steps(3)
    assert story.states("a", "c") == ["parking", "waiting"]
    (reserve,) = story.actions(Reserve)
    story.handle(LeaseGranted(reserve.ask, 7))
    story.steps(3)
    assert story.states("a", "c") == ["parking", "waiting"]
    story.handle(Saved("a", True))
    story.step()
    assert story.states("a", "c") == ["parked", "running"]
    assert slots(story)["c"] == 0


@pytest.mark.parametrize("saves", ["denied", "granted"])
def test_what_is_refused_or_parked_in_its_prompt_gives_it_back(saves):
    story = recurrent(1, saves=saves, step_tokens=4, slots=1)
    story.submit("a", 20)
    story.step()
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    assert slots(story) == {"a": -1}
    story.submit("b", 3, max_tokens=2)
    story.until(lambda: story.state("b") == "gone")
    story.resume("a")
    story.until(lambda: "a" in story.said)
    assert story["a"].recomputed == (4 if saves == "denied" else 0)


def test_a_load_that_failed_starts_at_the_first_token():
    story = saving()
    story.handle(Saved("a", True))
    story.resume("a")
    story.plan()
    story.handle(Loaded("a", False))
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (0, 7), "a state at position 0 needs nothing that was there before"


def test_the_host_caches_death_and_a_cancel_in_the_middle_of_a_copy_give_it_back_when_the_copy_has_ended():
    story = saving()
    story.handle(HostCacheLost())
    story.cancel("a")
    assert slots(story) == {"a": 0}
    story.handle(Saved("a", False))
    assert story.state("a") == "gone"
    for name in range(6):
        story.submit(f"next{name}", 2)
    story.step()
    assert 0 not in slots(story).values(), "four run in slots 1 to 4: the longest free go first"


def test_blocks_are_not_found_by_hash():
    story = recurrent()
    prompt = list(range(12))
    for name in ("one", "two"):
        story.submit(name, prompt, max_tokens=3)
        story.until(lambda: story.scheduler.idle)
        assert story.ending(name).usage.cached_tokens == 0


@pytest.mark.parametrize("wrong", [{"state_slots": 0, "reuse": False}, {"state_slots": 2, "reuse": True}])
def test_limits_that_could_not_work_are_refused(wrong):
    with pytest.raises(ValueError, match="state"):
        Story(**wrong)
