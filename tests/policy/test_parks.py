"""One park from the decision to the return, with everything the host cache can answer, and whatever it can lose."""

import pytest

from gpu_worker.policy.events import (
    HostCacheLost,
    LeaseDenied,
    LeaseGranted,
    Load,
    Loaded,
    Notify,
    ReleaseLease,
    Reserve,
    Save,
    Saved,
)
from tests.policy.story import Story


def asked(**limits) -> Story:
    """a, 14 tokens and 13 cells, is PARKING and has asked for a lease (ask 1); b runs. Nothing can be found by hash."""
    story = Story(**{"saves": "by hand", "reuse": False, **limits})
    story.submit("a", 10)
    story.submit("b", 3)
    story.until(lambda: len(story["a"].tokens) == 14)
    story.park("a")
    story.plan()
    return story


def saving() -> Story:
    story = asked()
    story.handle(LeaseGranted(1, 7))
    story.plan()
    assert story["a"].copying
    return story


def saved() -> Story:
    story = saving()
    story.handle(Saved("a", True))
    story.plan()
    return story


def loading() -> Story:
    story = saved()
    story.resume("a")
    story.plan()
    assert story.state("a") == "resuming"
    return story


def told(story: Story) -> list[tuple[str, str]]:
    return [(n.event, n.mode) for n in story.actions(Notify, "a")]


def test_a_whole_park_through_the_host_cache():
    story = asked()
    assert story.actions(Reserve) == [Reserve(1, "a", 4)]
    assert story.state("a") == "parking"
    blocks = tuple(story["a"].blocks)
    story.handle(LeaseGranted(1, 7))
    assert story.plan().actions == [Save("a", 7, blocks, 13)]
    assert told(story) == [], "it has not left the device yet"
    story.handle(Saved("a", True))
    assert story.state("a") == "parked"
    assert story["a"].blocks == []
    story.plan()
    assert told(story) == [("parked", "save")]
    story.resume("a")
    story.plan()
    (load,) = story.actions(Load)
    assert (load.lease, load.first, len(load.blocks)) == (7, 0, 4)
    assert load.blocks == tuple(story["a"].blocks[:4])
    assert story.row(story.plan(), "a") is None, "no row before its image is verified"
    story.handle(Loaded("a", True))
    row = story.row(story.step(), "a")
    assert (row.start, row.count, row.samples) == (13, 1, True)
    assert told(story) == [("parked", "save"), ("resumed", "save")]
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]
    assert story["a"].recomputed == 0


def test_a_denied_park_leaves_at_once_and_is_recomputed():
    story = asked()
    story.handle(LeaseDenied(1, "full"))
    story.plan()
    assert told(story) == [("parked", "recompute")]
    assert story["a"].blocks == []
    story.resume("a")
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (0, 14)
    assert told(story)[-1] == ("resumed", "recompute")
    assert story["a"].recomputed == 13, "the fourteenth token had no cell before"
    assert story.scheduler.load().counters.denied == {"full": 1}


def test_without_saves_nobody_asks_the_host_cache():
    story = asked(park_mode="recompute")
    story.resume("a")
    story.step()
    assert not story.actions(Reserve)
    assert told(story) == [("parked", "recompute"), ("resumed", "recompute")]


def test_with_reuse_a_denied_park_recomputes_only_what_cannot_be_found():
    story = asked(reuse=True)
    story.handle(LeaseDenied(1, "full"))
    story.resume("a")
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (12, 2)
    assert story["a"].recomputed == 1


def test_a_prompt_that_has_computed_nothing_has_nothing_to_save():
    story = Story(saves="by hand", step_tokens=4)
    story.submit("a", 8)
    story.submit("b", 8)
    story.step()
    story.park("b")
    story.plan()
    assert not story.actions(Reserve)
    assert story.state("b") == "parked"


def test_a_save_that_failed_is_a_recompute_and_the_lease_goes_back():
    story = saving()
    story.handle(Saved("a", False))
    story.plan()
    assert told(story) == [("parked", "recompute")]
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]


def test_an_image_that_does_not_verify_is_a_recompute():
    story = loading()
    story.handle(Loaded("a", False))
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (0, 14)
    assert told(story)[-1] == ("resumed", "recompute")
    assert story.actions(ReleaseLease) == [ReleaseLease(7)]


def test_what_was_found_stays_when_the_rest_does_not_verify():
    story = Story(saves="granted")
    story.submit("a", 10)
    story.submit("b", 3)
    story.until(lambda: len(story["a"].tokens) == 14)
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.saves = "by hand"
    story.resume("a")
    story.plan()
    story.handle(Loaded("a", False))
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (12, 2)


def test_unverified_cells_cannot_be_found():
    story = Story()
    story.submit("a", list(range(10)))
    story.until(lambda: len(story["a"].tokens) == 14)
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.submit("thief", 79, max_tokens=1)  # takes the blocks that could be found
    story.until(lambda: story.state("thief") == "gone")
    story.saves = "by hand"
    story.resume("a")
    story.plan()
    assert story.state("a") == "resuming"
    story.submit("same", list(range(10)))
    story.plan()
    assert story["same"].computed == 0, "the image is not verified yet"
    story.handle(Loaded("a", True))
    story.submit("later", list(range(10)))
    story.plan()
    assert story["later"].computed == 8


# answers that come too late ------------------------------------------------------------------------------------------
def test_a_grant_that_nobody_waits_for_goes_straight_back():
    story = asked()
    story.handle(LeaseDenied(1, "timeout"))
    story.handle(LeaseGranted(1, 9))
    story.handle(LeaseGranted(55, 10))
    story.plan()
    assert story.actions(ReleaseLease) == [ReleaseLease(9), ReleaseLease(10)]
    assert not story.actions(Save)


def test_a_late_grant_is_not_taken_for_the_next_park():
    story = asked()
    story.handle(LeaseDenied(1, "timeout"))
    story.resume("a")
    story.steps(2)
    story.park("a")
    story.plan()
    assert story.actions(Reserve)[-1].ask == 2
    story.handle(LeaseGranted(1, 9))
    story.plan()
    assert story.actions(ReleaseLease) == [ReleaseLease(9)]
    assert not story["a"].copying


def test_a_late_denial_changes_nothing():
    story = saving()
    story.handle(LeaseDenied(1, "timeout"))
    assert story["a"].copying
    assert story.scheduler.load().counters.denied == {}


@pytest.mark.parametrize("event", [Saved("a", True), Loaded("a", True), Saved("nobody", True), Loaded("nobody", False)])
def test_the_end_of_a_copy_that_nobody_made_is_ignored(event):
    story = Story()
    story.submit("a", 5)
    story.step()
    story.handle(event)
    assert story.state("a") == "running"


# the host cache dies --------------------------------------------------------------------------------------------------
def test_the_host_cache_dies_before_it_answers():
    story = asked()
    story.handle(HostCacheLost())
    story.plan()
    assert story.state("a") == "parked"
    assert told(story) == [("parked", "recompute")]
    story.handle(LeaseGranted(1, 9))
    story.plan()
    assert story.actions(ReleaseLease) == [ReleaseLease(9)]


def test_the_host_cache_dies_during_the_save():
    story = saving()
    story.handle(HostCacheLost())
    assert story.state("a") == "parking", "the copy still touches its blocks"
    assert story["a"].blocks
    story.handle(Saved("a", False))
    story.plan()
    assert told(story) == [("parked", "recompute")]
    assert not story.actions(ReleaseLease), "the lease died with its owner"


def test_a_save_that_ends_well_after_the_host_cache_died_is_worth_nothing():
    story = saving()
    story.handle(HostCacheLost())
    story.handle(Saved("a", True))
    story.resume("a")
    assert story.row(story.step(), "a").start == 0


def test_the_host_cache_dies_while_it_is_parked():
    story = saved()
    story.handle(HostCacheLost())
    story.resume("a")
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (0, 14)
    assert not story.actions(Load)
    assert not story.actions(ReleaseLease)


def test_the_host_cache_dies_during_the_load():
    story = loading()
    story.handle(HostCacheLost())
    assert story.row(story.plan(), "a") is None
    story.handle(Loaded("a", False))
    assert story.row(story.step(), "a").start == 0
    assert not story.actions(ReleaseLease)


# parks that nobody needs ----------------------------------------------------------------------------------------------
def test_a_lone_sequence_is_parked_by_force_and_goes_on():
    story = Story(park_every=5)
    story.submit("a", 6, max_tokens=17)
    story.until(lambda: story.state("a") == "gone")
    assert story.parked("forced") == ["a"] * 3, "at tokens 5, 10 and 15"
    offsets = [n.usage.completion_tokens for n in story.actions(Notify) if n.event == "parked"]
    assert offsets == [5, 10, 15]
    usage = story.ending("a").usage
    assert (usage.completion_tokens, usage.parks, usage.recomputed_tokens) == (17, 3, 0)


def test_a_forced_park_waits_for_the_boundary_at_or_after_its_token_and_clips_no_draft():
    story = Story(park_every=5, draft_max=3)
    story.submit("a", 6, max_tokens=20)
    story.step()
    plan = story.step(tokens={"a": [1, 2, 3]})
    assert story.row(plan, "a").draft == 3
    plan = story.step(tokens={"a": [1, 2, 3, 4]})
    assert story.row(plan, "a").draft == 3, "across the token at which it will be parked"
    story.until(story.parked)
    assert story.actions(Notify)[0].usage.completion_tokens == 8


def test_an_end_wins_over_a_forced_park():
    story = Story(park_every=5)
    story.submit("a", 6, max_tokens=5)
    story.until(lambda: story.scheduler.idle)
    assert story.ending("a").usage.parks == 0
    assert not story.actions(Reserve)


def test_a_forced_park_in_a_recompute_only_world_keeps_everything_whole():
    story = Story(park_every=4, park_mode="recompute", reuse=False, step_tokens=3, slots=1)
    story.submit("a", 9, max_tokens=10)
    story.until(lambda: story.state("a") == "gone")
    usage = story.ending("a").usage
    assert story.said["a"] == [7] * 10
    assert (usage.recomputed_tokens, usage.prompt_tokens) == ((9 + 3) + (9 + 7), 9)


def test_explicit_parks_take_the_largest_and_the_only_one():
    story = Story()
    story.submit("a", 20)
    story.step()
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    assert story.used == 0
    assert story.scheduler.load().counters.preempt == {"pressure": 0, "forced": 0, "explicit": 1}
    story.resume("a")
    story.steps(2)
    assert story.state("a") == "running"


def test_a_park_that_is_taken_back_before_the_boundary_never_happens():
    story = Story()
    story.submit("a", 20)
    story.step()
    story.park("a")
    story.resume("a")
    story.step()
    assert story.state("a") == "running"


def test_a_held_one_that_waits_is_set_aside_and_comes_in_when_it_is_let_go():
    story = Story(slots=1)
    story.submit("x", 3, max_tokens=3)
    story.submit("held", 3)
    story.submit("next", 3, max_tokens=3)
    story.park("held")
    story.until(lambda: story.state("next") == "gone")
    assert story.state("held") == "waiting"
    assert not story.parked()
    story.resume("held")
    story.step()
    assert story.state("held") == "running"


def test_held_while_resuming_it_is_parked_again_when_the_copy_has_ended():
    story = loading()
    story.park("a")
    story.plan()
    assert story.state("a") == "resuming"
    story.handle(Loaded("a", True))
    story.plan()
    assert story.state("a") == "parking"


def test_parked_and_resumed_five_hundred_times_nothing_grows():
    story = Story(park_every=1)
    story.submit("a", 5, max_tokens=70)
    story.until(lambda: story.state("a") == "gone", most=2000)
    assert story.ending("a").usage.parks == 69
    story = Story(num_blocks=200, park_every=1)
    story.submit("a", 5, max_tokens=600)
    story.until(lambda: len(story.parked()) >= 500, most=5000)
    assert story.scheduler.book._asks == {}
    assert len(story["a"].digests) <= len(story["a"].tokens) // 4
