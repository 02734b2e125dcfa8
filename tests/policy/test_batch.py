"""What goes into a step, who is let in, and what the worker says about itself."""

from gpu_worker.policy.events import Emit
from tests.policy.story import Story
from wire.messages import PoolCells, Slot


def rows(plan) -> dict[str, tuple[int, int, bool]]:
    return {row.request_id: (row.start, row.count, row.samples) for row in plan.rows}


def test_a_prompt_is_fed_in_chunks_and_samples_only_at_its_end():
    story = Story(step_tokens=8)
    story.submit("a", 20)
    assert rows(story.step()) == {"a": (0, 8, False)}
    assert rows(story.step()) == {"a": (8, 8, False)}
    assert not story.actions(Emit)
    assert rows(story.step()) == {"a": (16, 4, True)}
    assert rows(story.step()) == {"a": (20, 1, True)}


def test_decodes_come_first_and_prefills_share_the_rest_in_order_of_arrival():
    story = Story(step_tokens=8)
    story.submit("a", 3)
    story.submit("b", 3)
    story.step()
    story.submit("long", 14)
    story.submit("late", 3)
    assert rows(story.step()) == {"a": (3, 1, True), "b": (3, 1, True), "long": (0, 6, False)}
    assert rows(story.step()) == {"a": (4, 1, True), "b": (4, 1, True), "long": (6, 6, False)}
    assert rows(story.step()) == {"a": (5, 1, True), "b": (5, 1, True), "long": (12, 2, True), "late": (0, 3, True)}


def test_a_decode_is_never_left_out_for_a_prefill_however_small_the_step():
    story = Story(step_tokens=1, slots=4)
    for name in ("a", "b", "c"):
        story.submit(name, 2)
    story.until(lambda: len(story.said) == 3)
    story.submit("long", 12)
    for _ in range(10):
        fed = rows(story.step())
        assert {"a", "b", "c"} <= fed.keys()
        assert "long" in fed, "and the prefill goes on"


def test_a_decode_goes_before_a_prefill_that_came_in_earlier():
    story = Story(step_tokens=5, slots=2)
    story.submit("a", 3)
    story.step()
    story.submit("long", 30)
    story.step()
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.resume("a")
    story.until(lambda: story.state("a") == "running")
    fed = rows(story.step())
    assert fed["a"][1] == 1
    assert fed["long"][1] == 4


# siblings --------------------------------------------------------------------------------------------------------------
def test_siblings_wait_for_the_firsts_prompt_and_then_find_it():
    story = Story(step_tokens=4)
    prompt = list(range(10))
    story.submit("first", prompt)
    story.submit("second", prompt, sibling_of="first")
    story.submit("stranger", 3)
    story.steps(2)
    assert story.states("first", "second", "stranger") == ["running", "waiting", "running"]
    story.until(lambda: story.state("second") == "running")
    assert story["first"].generated >= 1
    assert story["second"].cached == 8


def test_siblings_of_one_that_is_gone_or_unknown_do_not_wait():
    story = Story(slots=1)
    story.submit("x", 3, max_tokens=2)
    story.submit("first", 8)
    story.submit("second", 8, sibling_of="first", max_tokens=1)
    story.submit("third", 8, sibling_of="nobody", max_tokens=1)
    story.submit("self", 8, sibling_of="self", max_tokens=1)
    story.cancel("first")
    story.until(lambda: story.scheduler.idle)
    assert story.ending("second").reason == story.ending("third").reason == story.ending("self").reason == "length"


def test_siblings_of_one_that_is_held_do_not_wait():
    story = Story(slots=1)
    story.submit("x", 3, max_tokens=2)
    story.submit("first", 8)
    story.submit("second", 8, sibling_of="first", max_tokens=1)
    story.park("first")
    story.until(lambda: story.state("second") == "gone")
    assert story.state("first") == "waiting"


def test_a_sibling_that_waits_can_be_cancelled():
    story = Story(slots=1)
    story.submit("x", 3)
    story.submit("first", 8)
    story.submit("second", 8, sibling_of="first")
    story.cancel("second")
    assert story.ending("second").reason == "cancelled"
    story.cancel("x")
    story.until(lambda: "first" in story.said)


# admission -------------------------------------------------------------------------------------------------------------
def test_waiting_ones_come_in_by_arrival_and_up_to_low_only():
    story = Story(slots=8)
    for name in ("a", "b", "c", "d"):
        story.submit(name, 14)  # 4 blocks each; LOW is 12
    story.step()
    assert story.states("a", "b", "c", "d") == ["running", "running", "running", "waiting"]


def test_one_larger_than_low_is_let_in_alone():
    story = Story()
    story.submit("a", 3, max_tokens=3)
    story.submit("giant", 60, max_tokens=2)
    story.submit("b", 3, max_tokens=3)
    story.step()
    assert story.states("a", "giant", "b") == ["running", "waiting", "waiting"], "nobody passes it"
    story.until(lambda: story.state("giant") == "running")
    assert story.state("a") == "gone"
    story.until(lambda: story.scheduler.idle)


def test_a_shared_prompt_costs_the_newcomer_only_what_it_adds():
    story = Story()
    prompt = list(range(33))
    story.submit("a", prompt)
    story.step()
    assert story.used == 9
    story.submit("b", prompt)
    story.step()
    assert story.state("b") == "running"
    assert story.used == 10


# what it says about itself ---------------------------------------------------------------------------------------------
def test_a_seat_is_for_life_and_a_parked_one_keeps_it():
    story = Story(slots=2)
    story.submit("a", 3, max_tokens=60)
    story.submit("b", 3, max_tokens=60)
    story.step()
    story.park("a")
    story.until(lambda: story.state("a") == "parked")
    story.submit("c", 3)
    story.step()
    slots = story.scheduler.load().slots
    assert [(slot.id, slot.request_id, slot.state) for slot in slots] == [
        (0, "a", "parked"),
        (1, "b", "running"),
        (2, "c", "running"),
    ]
    assert [slot.is_preempted for slot in slots] == [True, False, False]
    story.cancel("b")
    assert story.scheduler.load().slots[1] == Slot(1)
    story.resume("a")
    story.steps(2)
    assert story["a"].seat == 0
    story.submit("d", 3)
    story.cancel("c")
    story.step()
    assert story["d"].seat == 1, "the smallest free number"


def test_cells_add_up_by_who_holds_them():
    story = Story(saves="by hand")
    story.submit("old", 8, max_tokens=1)
    story.until(lambda: story.scheduler.idle)
    story.submit("a", 10)
    story.submit("b", 6)
    story.step()
    assert story.scheduler.load().cells == PoolCells(active=20, reusable=8, free=52)
    story.park("b")
    story.plan()
    assert story.scheduler.load().cells == PoolCells(active=12, reusable=8, parking=8, free=52)


def test_counts_and_totals():
    story = Story(saves="denied")
    story.submit("a", 10, max_tokens=4)
    story.submit("b", 40)
    story.submit("c", 60)
    story.steps(2)
    load = story.scheduler.load()
    assert (load.waiting, load.running, load.parked) == (2, 1, 0), "b does not fit below LOW beside a"
    assert load.counters.steps == 2
    story.until(lambda: story.scheduler.idle)
    assert story.scheduler.load().counters.prefill_tokens == 9 + 39 + 59
    assert story.scheduler.load().counters.preempt == {"pressure": 0, "forced": 0, "explicit": 0}


def test_there_is_a_reason_to_plan_again_exactly_when_something_may_come_in():
    story = Story()
    assert story.scheduler.wait_s(0.0) is None
    story.submit("a", 3)
    assert story.scheduler.wait_s(0.0) == 0.0
    story.steps(2)
    assert story.scheduler.wait_s(0.0) is None
