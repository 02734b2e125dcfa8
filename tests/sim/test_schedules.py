"""Random schedules with shadow cells: every request ends, its text is the reference's, and nothing is lost or owned twice."""

import pytest

from gpu_worker.policy import policies, preemption
from sim.__main__ import sweep
from sim.case import draw_case
from sim.world import World

FAST = 200
LONG = 2500
CHUNK = 50


@pytest.mark.parametrize("first", range(1, FAST, CHUNK))
def test_schedules_hold(first):
    total = sweep(first, CHUNK)
    parks = ("pressure parks", "forced parks", "denials", "loads", "recomputed", "cache crashes", "worker crashes", "cached")
    for seen in (*parks, "states saved", "states loaded", "drafts", "drafts that agreed"):
        assert total[seen] > 0, f"the schedules never see {seen}: they prove nothing about it"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(10_001, 10_001 + LONG, 500))
def test_many_schedules_hold(first):
    total = sweep(first, 500)
    for state in ("waiting", "running", "parking", "parked", "resuming"):
        assert total[f"cancels while {state}"] > 0
    for seen in ("explicit parks", "parks to let somebody in", "came in by waiting too long"):
        assert total[seen] > 0
    assert total["pressure parks, off"] == 0


@pytest.mark.parametrize("bound", [1, 2])
def test_schedules_hold_when_pressure_may_park_only_a_few_times(bound, monkeypatch):
    """The rule for a sequence that pressure may not park again, far more often than it would come to it by itself."""
    monkeypatch.setattr(preemption, "EXHAUSTED_AFTER", bound)
    assert sweep(20_001, CHUNK)["pressure parks"] > 0


@pytest.mark.parametrize("steps", [2, 8])
def test_schedules_hold_when_those_that_come_in_leave_a_small_gap(steps, monkeypatch):
    """The pools of the schedules hold few more than 64 steps; with less of a gap they are short of cells far more often."""
    monkeypatch.setattr(policies, "ENTER_AHEAD", steps)
    total = sweep(30_001, CHUNK)
    for policy in ("lookahead", "ondemand"):
        assert total[f"pressure parks, {policy}"] > 10


def test_a_seed_is_a_schedule():
    assert World(draw_case(11)).run() == World(draw_case(11)).run()
    assert draw_case(11) != draw_case(12)


def test_a_failing_schedule_says_how_to_repeat_it(monkeypatch):
    monkeypatch.setattr(preemption, "enough", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        sweep(1, CHUNK)
    assert caught.value.__notes__[0].startswith("repeat it with: python -m sim --schedules 1 --seed ")
