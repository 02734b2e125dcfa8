"""Who comes back, when, and who has to wait for it. Pool: 20 blocks of 4 cells, HIGH 18, LOW 12."""

from gpu_worker.policy import preemption
from gpu_worker.policy.events import LeaseGranted, Load, Loaded, Notify, ReleaseLease, Save, Saved
from gpu_worker.policy.policies import high_line, low_line
from gpu_worker.policy.scheduler import Limits
from tests.policy.story import Story


def away(story: Story, *names: str) -> None:
    """Park these by request, one after another, a second apart, until all have left."""
    for name in names:
        story.now += 1
        story.park(name)
        story.until(lambda name=name: story.state(name) == "parked")


def back(story: Story, *names: str) -> None:
    """Let go, one after another, a second apart; nothing is planned in between."""
    for name in names:
        story.now += 1
        story.resume(name)


def test_low_is_at_least_one_block_below_high():
    limits = Limits(num_blocks=10, block_size=4, slots=1, max_context=40, high=94, low=94)
    assert (high_line(limits), low_line(limits)) == (9, 8)


def test_the_most_often_parked_comes_back_first_then_the_longest_parked():
    story = Story()
    for name in ("a", "b", "c", "d"):
        story.submit(name, 3)
    story.step()
    away(story, "b", "c", "d")
    story["d"].pressure_parks = 2
    back(story, "b", "c", "d")
    story.step()
    story.step()
    assert story.resumed() == ["d", "b", "c"]


def test_in_head_order_the_longest_parked_comes_first_however_often_the_other_was_parked():
    story = Story(resume_order="head")
    for name in ("a", "b", "c", "d"):
        story.submit(name, 3)
    story.step()
    away(story, "b", "c", "d")
    story["d"].pressure_parks = 2
    back(story, "b", "c", "d")
    story.steps(2)
    assert story.resumed() == ["b", "c", "d"]


def large_and_small_parked(**limits) -> Story:
    """x runs with 7 blocks; first large (7 blocks), then small (1 block) were parked; LOW has room for 5 more."""
    story = Story(low=65, **limits)  # LOW 13
    story.submit("small", 2)
    story.submit("large", 25)
    story.step()
    away(story, "large", "small")
    story.submit("x", 26)
    story.steps(2)
    assert story.state("x") == "running"
    back(story, "large", "small")
    story.steps(3)
    return story


def test_a_small_one_may_pass_a_large_one_that_does_not_fit():
    story = large_and_small_parked()
    assert story.states("small", "large") == ["running", "parked"]


def test_in_head_order_nobody_passes():
    story = large_and_small_parked(resume_order="head")
    assert story.states("small", "large") == ["parked", "parked"]


def test_one_larger_than_low_comes_back_when_nobody_else_is_on_the_device():
    story = Story()
    story.submit("giant", 60, max_tokens=10)  # 16 blocks, LOW is 12
    story.step()
    away(story, "giant")
    story.submit("x", 3, max_tokens=8)
    story.until(lambda: story.state("x") == "running")
    back(story, "giant")
    story.until(lambda: story.state("x") == "gone")
    assert story.resumed() == [], "not beside x"
    story.until(lambda: story.state("giant") == "gone")
    assert story.resumed() == ["giant"]
    assert story.ending("giant").usage.completion_tokens == 10


def test_the_next_step_of_everything_running_is_counted_before_a_resume():
    story = Story(reuse=False)
    story.submit("x", 28)  # 8 blocks when it runs
    story.submit("parked", 11)
    story.step()
    away(story, "parked")
    story.until(lambda: len(story["x"].tokens) == 36)  # its next token needs block 10 of LOW's 12
    assert len(story["x"].blocks) == 9
    story["parked"].tokens = story["parked"].tokens[:11]  # 12 cells: 3 blocks; 9 + 3 fit, with the next step 10 + 3 do not
    story["parked"].computed = 10
    story.steps(1)
    back(story, "parked")
    story.steps(2)
    assert story.state("parked") == "parked"


def test_a_resuming_recompute_claims_its_whole_replay_at_once():
    story = Story(saves="denied", step_tokens=4, reuse=False)
    story.submit("a", 17)
    story.until(lambda: "a" in story.said)
    away(story, "a")
    back(story, "a")
    story.plan()
    assert story.state("a") == "running"
    assert len(story["a"].blocks) == 5, "18 known tokens and the next"
    assert story["a"].computed == 0


def test_two_recomputes_are_not_promised_the_same_cells():
    story = Story(saves="denied", step_tokens=4, reuse=False)
    for name in ("a", "b", "c"):
        story.submit(name, 11)
    story.until(lambda: len(story.said) == 3)
    away(story, "b", "c")
    story.until(lambda: len(story["a"].tokens) == 29)  # 8 blocks of LOW's 12; b and c need 4 at most
    back(story, "b", "c")
    story.steps(3)
    assert sorted(story.states("b", "c")) == ["parked", "running"], "each would fit, not both"


def test_full_blocks_are_found_again_and_only_the_rest_is_loaded():
    story = Story(saves="by hand")
    story.submit("a", 10)
    story.submit("b", 3)
    story.until(lambda: len(story["a"].tokens) == 14)
    blocks = list(story["a"].blocks)
    position = story["a"].computed
    story.park("a")
    reserve = story.plan().actions[-1]
    assert reserve.num_blocks == 4
    story.handle(LeaseGranted(reserve.ask, 7))
    (save,) = (a for a in story.plan().actions if isinstance(a, Save))
    assert save == Save("a", 7, tuple(blocks), position)
    story.handle(Saved("a", True))
    story.step()
    story.resume("a")
    (load,) = (a for a in story.plan().actions if isinstance(a, Load))
    assert load.first == 3, "12 of its 13 cells are still there"
    assert len(load.blocks) == 1
    assert story["a"].blocks[:3] == blocks[:3]
    assert story.state("a") == "resuming"
    story.handle(Loaded("a", True))
    row = story.row(story.step(), "a")
    assert (row.start, row.count) == (13, 1)
    assert ReleaseLease(7) in story.log
    assert story["a"].recomputed == 0


def test_an_image_that_is_found_whole_needs_no_load():
    story = Story()
    story.submit("a", 10)
    story.until(lambda: story["a"].computed == 12)
    away(story, "a")
    back(story, "a")
    story.step()
    assert story.state("a") == "running"
    assert not story.actions(Load)
    assert story["a"].recomputed == 0
    assert story.actions(ReleaseLease)


def test_a_parked_one_comes_before_those_that_wait():
    story = Story(slots=2)
    for name in ("a", "b"):
        story.submit(name, 20, max_tokens=40)
    story.submit("waits", 2)
    story.until(lambda: story.parked())
    assert story.parked() == ["b"]
    story.steps(3)
    assert story.state("waits") == "waiting", "there is a slot and there is room, but b is parked"
    story.until(lambda: story.state("b") == "running")
    story.until(lambda: story.state("waits") == "running")


def test_one_of_a_better_class_is_let_in_beside_a_parked_one():
    story = Story()
    story.submit("b", 40, priority=1)
    story.submit("a", 3, priority=1)
    story.step()
    away(story, "b")
    story.until(lambda: story.used == 3)
    back(story, "b")  # 11 blocks and more: too large to come back beside a
    story.submit("same", 2, priority=1)
    story.submit("better", 2, priority=0)
    story.steps(2)
    assert story.states("b", "same", "better") == ["parked", "waiting", "running"]


def test_a_held_one_neither_comes_back_nor_keeps_anybody_out():
    story = Story(slots=2)
    story.submit("a", 10)
    story.step()
    away(story, "a")
    story.submit("b", 3)
    story.steps(5)
    assert story.states("a", "b") == ["parked", "running"]
    back(story, "a")
    story.step()
    story.step()
    assert story.state("a") == "running"


def test_every_reason_to_hold_has_to_go():
    story = Story()
    story.submit("a", 10)
    story.step()
    story.park("a", "credit")
    story.park("a", "explicit")
    story.until(lambda: story.state("a") == "parked")
    story.resume("a", "explicit")
    story.steps(3)
    assert story.state("a") == "parked"
    story.resume("a", "credit")
    story.steps(2)
    assert story.state("a") == "running"
    assert story.parked("explicit") == ["a"]


def test_after_a_forced_park_it_comes_back_as_soon_as_it_fits_though_above_low():
    story = Story(park_every=3)
    story.submit("x", 36)
    story.submit("a", 3)
    story.until(lambda: len(story["x"].tokens) >= 52 and story.states("x", "a") == ["running", "running"])
    assert story.used > 12
    assert story["a"].generated >= 15, "it was never kept waiting for LOW"
    assert set(story.parked("forced")) == {"x", "a"}


def test_slots_bound_the_resumes():
    story = Story(slots=2)
    story.submit("a", 3)
    story.submit("b", 3)
    story.step()
    away(story, "a", "b")
    story.submit("c", 3)
    story.submit("d", 3)
    story.steps(3)
    back(story, "a", "b")
    story.steps(3)
    assert story.states("a", "b", "c", "d") == ["parked", "parked", "running", "running"]


def test_parked_time_is_told_and_added_up():
    story = Story()
    story.submit("a", 5, max_tokens=10)
    story.step()
    story.now = 10.0
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.now = 12.5
    story.resume("a")
    story.until(lambda: story.state("a") == "gone")
    (told,) = (n for n in story.actions(Notify) if n.event == "resumed")
    assert (told.parked_ms, told.kind, told.mode) == (2500, "explicit", "save")
    assert (story.ending("a").usage.parked_ms, story.ending("a").usage.parks) == (2500, 1)


# classes ---------------------------------------------------------------------------------------------------------------
def test_a_class_is_promoted_by_parks_and_by_time_but_never_above_the_best_present():
    story = Story()
    story.submit("batch", 3, priority=4)
    seq = story["batch"]
    assert preemption.class_of(seq, 0, story.now) == 4
    assert preemption.class_of(seq, 0, story.now + preemption.PROMOTED_EACH_S) == 3
    seq.pressure_parks = preemption.PROMOTED_EACH_PARKS
    assert preemption.class_of(seq, 0, story.now) == 3
    assert preemption.class_of(seq, 0, 10_000.0) == 0
    assert preemption.class_of(seq, 4, 10_000.0) == 4, "alone among its equals it gains nothing"


def test_holding_oneself_back_earns_no_promotion():
    story = Story()
    story.submit("chat", 3, priority=0)
    story.submit("batch", 3, priority=4)
    story.step()
    story.park("batch")
    story.until(lambda: story.state("batch") == "parked")
    story.now += 100 * preemption.PROMOTED_EACH_S
    assert preemption.class_of(story["batch"], 0, story.now) == 4
    story.resume("batch")
    story.steps(2)
    assert story.state("batch") == "running"
    assert preemption.class_of(story["batch"], 0, story.now) == 4


def test_a_low_class_that_has_waited_long_enough_is_let_in_before_a_newer_high_one():
    story = Story(slots=1)
    story.submit("first", 3, max_tokens=5)
    story.step()
    story.submit("batch", 3, priority=2, max_tokens=5)
    story.now = 2 * preemption.PROMOTED_EACH_S
    story.submit("chat", 3, priority=0, max_tokens=5)
    story.until(lambda: story.state("first") == "gone")
    story.until(lambda: story.state("batch") == "running")
    assert story.state("chat") == "waiting"
    assert story["batch"].promoted == 2, "it keeps what it has gained"


def test_classes_go_in_order_when_nobody_waits_long():
    story = Story(slots=1)
    story.submit("first", 3, max_tokens=2)
    story.step()
    story.submit("batch", 3, priority=2, max_tokens=2)
    story.submit("chat", 3, priority=0, max_tokens=2)
    story.until(lambda: story.state("chat") == "running")
    assert story.state("batch") == "waiting"
