"""Save or recompute: what is measured, what is chosen on it and why, and that each park tells its mode and reason once."""

from collections import Counter

import pytest
from msgspec.structs import replace

from gpu_worker.policy import park_cost
from gpu_worker.policy.events import (
    HostCacheLost,
    LeaseDenied,
    LeaseGranted,
    Load,
    Loaded,
    Notify,
    ReleaseLease,
    Reserve,
    Row,
    Save,
    Saved,
    StepDone,
)
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.park_cost import PREFILL_TOKENS, ParkCost
from sim.case import draw_case
from sim.hostcache import BLOCK_BYTES
from sim.world import World
from tests.policy.story import Story
from wire.messages import Sampling

BLOCK = 1000  # bytes
LIMITS = Limits(num_blocks=1000, block_size=10, slots=8, max_context=10_000, park_mode="auto", block_bytes=BLOCK)


def row(start: int, count: int) -> Row:
    return Row("r", [], start, count, [], True, Sampling(), 1)


def measured(cell_s: float = 0.001, byte_s: float = 0.000001, **limits) -> ParkCost:
    """Cells of any depth take `cell_s` to compute, bytes `byte_s` to save and as long to load. A cell has 100 bytes."""
    cost = ParkCost(replace(LIMITS, **limits))
    for start in (0, 300, 600, 1200, 2500, 5000):
        cost.stepped([row(start, 100)], 100 * cell_s)
    cost.saved(1000, 1000 * byte_s)
    cost.loaded(1000, 1000 * byte_s)
    return cost


def choose(cost: ParkCost, cells: int = 1000, kind: str = "pressure"):
    return cost.choose(kind, cells, -(-cells // 10))


def told(cost: ParkCost, cells: int = 1000, kind: str = "pressure") -> tuple[str, str]:
    choice = choose(cost, cells, kind)
    return choice.mode, choice.reason


# what is measured -----------------------------------------------------------------------------------------------------
def test_before_anything_is_measured_it_saves():
    cost = ParkCost(LIMITS)
    assert told(cost) == ("save", "unmeasured")
    cost.saved(1000, 0.001)
    assert told(cost) == ("save", "unmeasured"), "nothing is known of computing"
    cost.stepped([row(0, 100)], 0.1)
    assert told(cost) == ("save", "cheaper"), "a load is taken to be like a save"


def test_what_takes_longer_is_not_done():
    assert told(measured(cell_s=0.001, byte_s=0.000004)) == ("save", "cheaper")  # 100 bytes each: .8 of a cell, out and in
    assert told(measured(cell_s=0.001, byte_s=0.000006)) == ("recompute", "copy_dearer")
    choice = choose(measured(cell_s=0.001, byte_s=0.000004))
    assert (choice.cells, choice.nbytes) == (1000, 100_000)
    assert choice.copy_s == pytest.approx(0.8) and choice.recompute_s == pytest.approx(1.0)


@pytest.mark.parametrize("which", ["saved", "loaded"])
def test_copies_that_become_slow_and_fast_again_are_followed(which):
    cost = measured(byte_s=0.000001)
    for _ in range(8):
        getattr(cost, which)(1000, 0.020)
    assert told(cost) == ("recompute", "copy_dearer")
    for _ in range(30):
        getattr(cost, which)(1000, 0.001)
    assert told(cost) == ("save", "cheaper")


def test_copies_count_by_their_bytes():
    cost = measured(byte_s=0.000001)
    cost.saved(10, 0.001)  # a tiny one, with all that it costs to begin
    assert told(cost) == ("save", "cheaper")


def test_what_was_not_measured_says_nothing():
    cost = measured()
    before = choose(cost)
    cost.saved(0, 0.0)
    cost.loaded(5000, 0.0)
    cost.stepped([row(0, PREFILL_TOKENS - 1)], 9.0)
    assert choose(cost) == before


def test_decodes_beside_a_prefill_are_not_its_cost():
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.001)
    cost.stepped([row(0, 100), row(50, 1)], 5.0)
    assert choose(cost).reason == "unmeasured", "what the decode took is not known yet"
    cost.stepped([row(50, 1), row(70, 1)], 0.5)
    cost.stepped([row(0, 100), row(51, 1), row(71, 1)], 0.6)
    assert choose(cost).recompute_s == pytest.approx(1.0)
    cost.stepped([row(0, 100), row(51, 1), row(71, 1)], 0.4)  # a quick one takes no negative time
    assert 0.0 < choose(cost).recompute_s < 1.0


def test_deep_cells_cost_what_deep_cells_took():
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.001)
    cost.stepped([row(0, 100)], 0.1)
    assert choose(cost, 4000).recompute_s == pytest.approx(4.0), "the nearest that was measured stands for the rest"
    cost.stepped([row(3000, 100)], 0.5)  # positions 2048 to 4095
    assert choose(cost, 1000).recompute_s == pytest.approx(1.0)
    assert choose(cost, 4096).recompute_s == pytest.approx(1024 * 0.001 + 3072 * 0.005)  # nearer to the deep ones from 1024 on


def test_a_chunk_says_something_of_the_depth_in_its_middle():
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.001)
    cost.stepped([row(0, 100)], 0.1)
    cost.stepped([row(0, 1000)], 2.0)  # position 500
    assert choose(cost, 256).recompute_s == pytest.approx(0.256)
    assert choose(cost, 512).recompute_s == pytest.approx(0.256 + 256 * 0.002)


def test_what_is_found_by_hash_is_neither_loaded_nor_computed():
    cost = measured()
    for cells in range(1000, 1100):
        cost.found("pressure", cells, cells * 9 // 10)
    choice = choose(cost)
    assert choice.recompute_s == pytest.approx(0.1, rel=0.01)
    assert choice.copy_s == pytest.approx(0.1 + 0.01, rel=0.01), "it is saved in full"
    assert choice.reason == "copy_dearer"
    assert choose(cost, kind="explicit").recompute_s == pytest.approx(1.0), "those find less, or more: it is known by kind"


def test_the_state_of_a_hybrid_is_worth_its_copy_only_for_a_long_text():
    def cost():
        return measured(cell_s=0.001, byte_s=0.000001, state_bytes=500_000, state_slots=2, reuse=False)

    assert told(cost(), 300) == ("recompute", "copy_dearer")  # a second for the state, .3 for the cells
    assert told(cost(), 3000) == ("save", "cheaper")


def test_the_state_is_loaded_whatever_is_found():
    cost = measured(state_bytes=500_000, state_slots=2, reuse=False)
    for _ in range(100):
        cost.found("pressure", 1000, 1000)
    assert choose(cost).copy_s == pytest.approx(0.6 + 0.5, rel=0.01)


def test_what_is_dear_is_tried_again_the_later_the_dearer_it_is():
    def parks_until_it_saves(byte_s: float) -> int:
        cost = measured(byte_s=byte_s)
        for count in range(1000):
            if told(cost)[0] == "save":
                return count
        raise AssertionError("never again")

    little, much = parks_until_it_saves(0.000006), parks_until_it_saves(0.00006)
    assert 0 < little < 20 and 10 * little < much < 300


# the budget -----------------------------------------------------------------------------------------------------------
def filled(share: float, budget_bytes: int = 10_000_000, **limits) -> ParkCost:
    cost = measured(**limits)
    cost.asked(1, 100_000)
    cost.answered(1, share, budget_bytes)
    return cost


def test_the_fill_is_the_last_answer_and_what_this_worker_did_since():
    cost = measured()
    assert cost.fill(500) == 0.0, "nothing is known of the budget"
    cost.asked(1, 100)
    cost.asked(2, 300)
    cost.answered(1, 0.5, 1000)
    assert cost.fill() == pytest.approx(0.8), "ask 2 is on its way"
    cost.released(200)
    assert (cost.fill(), cost.fill(400)) == (pytest.approx(0.6), pytest.approx(1.0))
    cost.answered(2, 0.8, 1000)  # the answer did not know of the release
    assert cost.fill() == pytest.approx(0.6)
    cost.asked(3, 100)
    cost.answered(3, 0.9, 1000)  # another worker has taken .2; the release is in it
    assert cost.fill() == pytest.approx(0.9)
    cost.asked(4, 100)
    cost.answered(4, 0.0, 0)  # a timeout, which says nothing
    assert cost.fill() == pytest.approx(0.9)
    cost.asked(5, 100)
    cost.lost()
    assert cost.fill() == 0.0


def test_below_half_the_budget_has_no_price():
    cost = filled(0.4)
    choice = choose(cost)
    assert (choice.reason, choice.price) == ("cheaper", 0.0)
    assert told(cost, 20, "explicit") == ("save", "cheaper")


def test_a_long_stay_is_dear_where_the_budget_is_nearly_full():
    cost = filled(0.8)
    for _ in range(4):
        cost.came_back("pressure", 2.0)
        assert told(cost) == ("save", "cheaper"), "equals are kept as long as there is room"
    assert told(cost, kind="explicit") == ("recompute", "budget_dear")
    for _ in range(20):
        cost.came_back("explicit", 0.5)
    assert told(cost, kind="explicit") == ("save", "cheaper")


def test_the_price_is_a_quarter_of_the_mean_worth_where_the_budget_is_full():
    cost = filled(0.89)
    for _ in range(30):
        choice = choose(cost, 10_000)  # 1 MB: .99 full with it
    assert choice.price == pytest.approx(0.25 * 0.98 * choice.worth) and choice.mode == "save"


def test_what_is_worth_little_gives_way_to_what_is_worth_much():
    """Deep cells take long to compute and as many bytes as others."""
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.000001)
    cost.stepped([row(0, 100)], 0.1)
    cost.stepped([row(5000, 100)], 2.0)
    cost.asked(1, 100_000)
    cost.answered(1, 0.9, 10_000_000)
    for _ in range(5):
        assert told(cost, 6000) == ("save", "cheaper")
    assert told(cost, 200) == ("recompute", "budget_dear")
    cost.released(9_000_000)
    assert told(cost, 200) == ("save", "cheaper"), "there is room again"


# each park, told once -------------------------------------------------------------------------------------------------
def parked(story: Story, name: str) -> list[tuple[str, str]]:
    return [(a.mode, a.reason) for a in story.actions(Notify, name) if a.event == "parked"]


def one(saves: str = "granted", **limits) -> Story:
    """a has 14 cells, and is asked to leave."""
    story = Story(saves, reuse=False, **limits)
    story.submit("a", 14)
    story.steps(2)
    story.park("a")
    story.plan()
    return story


@pytest.mark.parametrize(
    ("saves", "limits", "mode", "reason"),
    [
        ("granted", {}, "save", "asked"),
        ("granted", {"park_mode": "recompute"}, "recompute", "asked"),
        ("granted", {"park_mode": "auto"}, "save", "unmeasured"),
        ("denied", {}, "recompute", "denied_full"),
        ("denied", {"park_mode": "auto"}, "recompute", "denied_full"),
    ],
)
def test_a_park_tells_how_its_cells_are_kept_and_why(saves, limits, mode, reason):
    story = one(saves, **limits)
    story.plan()
    assert parked(story, "a") == [(mode, reason)]
    assert story.scheduler.load().counters.parks == {f"{mode} {reason}": 1}
    assert bool(story.actions(Reserve)) == (limits.get("park_mode") != "recompute")


def test_a_copy_that_fails_and_a_host_cache_that_is_lost():
    story = one("by hand")
    story.handle(LeaseGranted(1, 7))
    story.plan()
    assert story.scheduler.load().counters.parks == {}, "it is not decided yet"
    story.handle(Saved("a", False))
    story.plan()
    assert parked(story, "a") == [("recompute", "copy_failed")]
    story = one("by hand")
    story.handle(HostCacheLost())
    story.plan()
    assert parked(story, "a") == [("recompute", "denied_lost")]
    story = one("by hand")
    story.handle(LeaseGranted(1, 7))
    story.plan()
    story.handle(HostCacheLost())
    story.handle(Saved("a", False))
    story.plan()
    assert parked(story, "a") == [("recompute", "copy_failed")]


def test_one_that_has_computed_nothing_yet_asks_for_nothing():
    story = Story(step_tokens=20)
    story.submit("a", 30)
    story.submit("b", 10)
    story.step()
    assert story.states("a", "b") == ["running", "running"] and story["b"].computed == 0
    story.park("b")
    story.plan()
    assert parked(story, "b") == [("recompute", "nothing_computed")]
    assert story.actions(Reserve) == []


def test_each_park_counts_once_and_a_resume_not_at_all():
    story = one()
    for _ in range(2):
        story.resume("a")
        story.steps(2)
        story.park("a")
        story.steps(2)
    counters = story.scheduler.load().counters
    assert counters.parks == {"save asked": 3} and counters.resumed == 2
    assert [a.reason for a in story.actions(Notify, "a") if a.event == "resumed"] == ["", ""]


# through the scheduler ------------------------------------------------------------------------------------------------
class Timed(Story):
    """Steps and copies take virtual time: `cell_s` for each fed token, `byte_s` for each byte saved and `load_s` (or as long) for
    each byte loaded. A block has 1000 bytes, the host cache has a budget of 100,000 and nobody else in it."""

    def __init__(self, cell_s: float = 0.01, byte_s: float = 0.00001, load_s: float = 0.0, **limits) -> None:
        super().__init__("granted", **{"reuse": False, "park_mode": "auto", "block_bytes": 1000, "num_blocks": 100, **limits})
        self.cell_s, self.byte_s, self.load_s = cell_s, byte_s, load_s or byte_s
        self.in_use: dict[int, int] = {}

    def handle(self, event) -> None:
        match event:
            case LeaseGranted():
                event = replace(event, fill=sum(self.in_use.values()) / 100_000, budget_bytes=100_000)
            case StepDone():
                event = replace(event, seconds=sum(row.count for row in self.plans[-1].rows) * self.cell_s)
        super().handle(event)

    def _answer(self, action) -> None:
        match action:
            case Reserve():
                self.in_use[self._lease + 1] = action.num_blocks * 1000
                super()._answer(action)
            case ReleaseLease(lease):
                del self.in_use[lease]
            case Save():
                nbytes = len(action.blocks) * 1000
                self.handle(Saved(action.request_id, True, nbytes, nbytes * self.byte_s))
            case Load():
                nbytes = len(action.blocks) * 1000
                self.handle(Loaded(action.request_id, True, nbytes, nbytes * self.load_s))


def park_and_return(story: Timed, name: str) -> None:
    story.park(name)
    story.steps(2)
    story.resume(name)
    story.steps(3)


def test_the_scheduler_measures_and_then_chooses():
    for byte_s, later in ((0.00001, ("save", "cheaper")), (0.01, ("recompute", "copy_dearer"))):
        story = Timed(cell_s=0.01, byte_s=byte_s)
        story.submit("a", 60)
        story.steps(2)
        for _ in range(3):
            park_and_return(story, "a")
        assert parked(story, "a") == [("save", "unmeasured"), later, later]
        assert len(story.actions(Reserve)) == (3 if later[0] == "save" else 1)
        choice = [a for a in story.actions(Notify, "a") if a.event == "parked"][1].choice
        assert choice.recompute_s == pytest.approx(choice.cells * 0.01)
        assert choice.copy_s == pytest.approx(2 * choice.nbytes * byte_s)


def test_the_scheduler_knows_how_full_the_budget_is():
    story = Timed()
    story.submit("a", 14)
    story.submit("b", 14)
    story.steps(2)
    cost = story.scheduler.book.park_cost
    story.park("a")
    story.park("b")
    story.steps(2)
    assert cost.fill() == pytest.approx(sum(story.in_use.values()) / 100_000) and len(story.in_use) == 2
    story.resume("a")
    story.steps(2)
    assert cost.fill() == pytest.approx(sum(story.in_use.values()) / 100_000) and len(story.in_use) == 1
    story.cancel("b")
    story.plan()
    assert cost.fill() == pytest.approx(0.0) and not story.in_use


def test_how_long_it_stayed_away_is_noticed_by_kind():
    story = Timed()
    story.submit("a", 40)
    story.steps(2)
    story.park("a")
    story.step()
    story.now += 7.0
    story.resume("a")
    story.steps(2)
    story.park("a")
    story.steps(2)
    assert story.actions(Notify, "a")[-1].choice.stay_s == pytest.approx(7.0)


def second_choice(story: Timed):
    """What is decided on when it is parked for the second time."""
    story.submit("a", 40)
    story.steps(2)
    park_and_return(story, "a")
    story.park("a")
    story.steps(2)
    return story.actions(Notify, "a")[-1].choice


def test_saves_and_loads_are_measured_apart():
    choice = second_choice(Timed(byte_s=0.00001, load_s=0.00003))
    assert choice.copy_s == pytest.approx(choice.nbytes * (0.00001 + 0.00003))


def test_what_was_found_again_is_noticed():
    choice = second_choice(Timed(reuse=True))
    assert choice.recompute_s < 0.6 * choice.cells * 0.01, "it found all but the last of its cells, once"


def test_a_grant_that_nobody_waits_for_and_a_lost_host_cache_take_nothing():
    story = Timed()
    story._answer = lambda action: None
    story.submit("a", 40)
    story.submit("b", 8)
    story.steps(2)
    cost = story.scheduler.book.park_cost
    story.park("a")
    (ask,) = (action.ask for action in story.plan().actions if isinstance(action, Reserve))
    story.cancel("a")
    story.in_use[7] = 11_000
    story.handle(LeaseGranted(ask, 7))
    assert cost.fill() == pytest.approx(0.0)
    story.park("b")
    (ask,) = (action.ask for action in story.plan().actions if isinstance(action, Reserve))
    story.handle(LeaseGranted(ask, 8))
    assert cost.fill() > 0.0
    story.handle(HostCacheLost())
    assert cost.fill() == 0.0


def test_a_denial_is_a_recompute_that_auto_survives():
    story = Timed()
    story.submit("a", 40)
    story.steps(2)
    park_and_return(story, "a")
    story.saves = "by hand"
    story._answer = lambda action: None
    story.park("a")
    story.plan()
    story.handle(LeaseDenied(story.actions(Reserve)[-1].ask, "full", 1.0, 100_000))
    story.plan()
    assert parked(story, "a")[-1] == ("recompute", "denied_full")
    assert story.actions(Notify, "a")[-1].choice.copy_s > 0, "the numbers it was decided on are told all the same"


# random schedules -----------------------------------------------------------------------------------------------------
def test_after_any_schedule_everything_that_was_reserved_is_given_back(monkeypatch):
    monkeypatch.setattr(park_cost, "PREFILL_TOKENS", 2)  # their prompts are short
    seen = Counter()
    for seed in range(1, 80):
        case = draw_case(seed)
        if case.cache_crashes or case.worker_crashes or case.limits.policy == "off":
            continue
        limits = replace(case.limits, park_mode="auto")
        world = World(replace(case, limits=limits, budget_bytes=max(case.budget_bytes, 25 * BLOCK_BYTES)))
        seen.update({name: count for name, count in world.run().items() if name.startswith("cells")})
        assert world.scheduler.book.park_cost.fill() == pytest.approx(0.0, abs=1e-9), seed
        assert sum(world.scheduler.book.parks.values()) <= sum(world.scheduler.book.preempted.values())
    assert {"cells: save unmeasured", "cells: save cheaper", "cells: recompute copy_dearer"} <= seen.keys(), seen
