"""Save or recompute, through the scheduler: each park tells its mode and reason once, and what it is decided on is measured."""

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
    Save,
    Saved,
    StepDone,
)
from sim.case import draw_case
from sim.hostcache import BLOCK_BYTES
from sim.world import World
from tests.policy.story import Story


# each park, told once -------------------------------------------------------------------------------------------------
def parked(story: Story, name: str) -> list[tuple[str, str]]:
    return [(a.mode, a.choice.reason) for a in story.actions(Notify, name) if a.event == "parked"]


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
    assert [a.choice for a in story.actions(Notify, "a") if a.event == "resumed"] == [None, None]


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
