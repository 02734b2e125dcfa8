"""A journal replays to the same plans, up to its tear, and a scheduler that decides otherwise is found out."""

from pathlib import Path

import pytest

import sim.world
from gpu_worker.journal import Journal, JournaledScheduler
from gpu_worker.policy import preemption
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.recording import MAGIC, Header, JournalError
from sim.case import draw_case
from sim.replay import replay


def record(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The journals of one random schedule: one for each life of its worker."""
    made: list[JournaledScheduler] = []

    def journaled(limits: Limits) -> JournaledScheduler:
        made.append(JournaledScheduler(limits, Journal(folder / f"{seed}-{len(made)}", Header(limits))))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(sim.world, "Scheduler", journaled)
        sim.world.World(draw_case(seed)).run()
    for scheduler in made:
        scheduler.journal.close()
    return [scheduler.journal.path for scheduler in made]


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal with several parks by pressure in it."""
    for seed in range(1, 100):
        for path in record(tmp_path, seed, monkeypatch):
            if replay(path).parks.get("pressure", 0) >= 5:
                return path
    raise AssertionError("no schedule with parks by pressure")


def test_random_schedules_replay_to_the_same_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = parks = 0
    for seed in range(100, 116):
        for path in record(tmp_path, seed, monkeypatch):
            replayed = replay(path)
            assert not replayed.difference, f"seed {seed}: {replayed.difference}"
            plans += replayed.plans
            parks += sum(replayed.parks.values())
    assert plans > 500 and parks > 20, "the schedules show nothing"


def test_a_torn_journal_replays_up_to_the_tear(busy: Path) -> None:
    whole, data = replay(busy), busy.read_bytes()
    for lost in (1, 3, 7, 50, len(data) // 2):
        busy.write_bytes(data[:-lost])
        torn = replay(busy)
        assert not torn.difference
        assert (torn.events, torn.plans) != (whole.events, whole.plans)
    assert torn.plans > 10


def test_another_choice_of_victims_is_found(busy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victims = preemption.victims
    monkeypatch.setattr(preemption, "victims", lambda *args: victims(*args)[1:])
    assert replay(busy).difference.startswith("plan ")


def test_a_changed_limit_is_found(busy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference names the plan and what was planned."""
    monkeypatch.setattr(Limits, "step_budget", property(lambda self: 1))
    difference = replay(busy).difference
    assert " row 0 was RowSummary(" in difference and "\n" not in difference


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no journal"),
        (b"PK", "no journal"),
        (b'{"a": 1}', "no journal"),
        (MAGIC, "before its header"),
        (MAGIC + b"\xff\xff\xff\xff", "damaged"),
        (MAGIC + b"\x01\x00\x00\x00\xc0", "damaged"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(data)
    with pytest.raises(JournalError, match=says):
        replay(path)


def test_damage_in_the_middle_is_no_tear(busy: Path) -> None:
    data = bytearray(busy.read_bytes())
    end = len(MAGIC) + 4 + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    data[end + 4] ^= 0xFF  # the first byte of the second record's body
    busy.write_bytes(data)
    with pytest.raises(JournalError, match="damaged"):
        replay(busy)
