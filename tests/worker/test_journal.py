"""The journal's file: never written over, only ours to read, bounded, and no reason for a worker to die."""

import os
import stat
from pathlib import Path

import pytest

from gpu_worker.__main__ import make_scheduler
from gpu_worker.journal import Journal, JournaledScheduler, path_of
from gpu_worker.policy import recording
from gpu_worker.policy.events import CancelRequested, Plan, Submitted
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.recording import Header, Heard
from gpu_worker.policy.scheduler import Scheduler
from wire.config import Config, ConfigError
from wire.messages import Generate, Hello, Sampling, Submit

HELLO = Hello("cpu1", 1, "bard", "cpu", "bf16", 32, 4, 2, 32, True)
LIMITS = Limits(num_blocks=8, block_size=4, slots=2, max_context=32)


def records(path: Path) -> list:
    with path.open("rb") as file:
        return list(recording.read(file))


def test_it_holds_what_went_in_and_what_came_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", Header(LIMITS, worker="cpu0", model="bard"))
    scheduler = JournaledScheduler(LIMITS, journal)
    event = Submitted(Submit(Generate("a", [1, 2, 3], sampling=Sampling(seed=1)), arrival=1))
    scheduler.handle(event, 1.5)
    plan = scheduler.plan(2.5)
    journal.close()
    header, heard, planned = records(tmp_path / "j")
    assert header == Header(LIMITS, worker="cpu0", model="bard")
    assert heard == Heard(1.5, event)
    assert planned.now == 2.5 and planned.digest == recording.plan_digest(plan)
    assert [(row.request_id, row.start, row.count, row.samples) for row in planned.rows] == [("a", 0, 3, True)]


def test_the_digest_sees_blocks_and_actions(tmp_path: Path) -> None:
    scheduler = JournaledScheduler(LIMITS, Journal(tmp_path / "j", Header(LIMITS)))
    scheduler.handle(Submitted(Submit(Generate("a", [1, 2, 3]), arrival=1)), 0.0)
    plan = scheduler.plan(0.0)
    before = recording.plan_digest(plan)
    plan.rows[0].blocks[0] += 1
    assert recording.plan_digest(plan) != before
    plan.rows[0].blocks[0] -= 1
    assert recording.plan_digest(plan) == before
    plan.actions.append(recording.Load("a", 1, (2,), 0))
    assert recording.plan_digest(plan) != before
    scheduler.journal.close()


def test_an_older_journal_is_kept(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        journal = Journal(tmp_path / "j.bin", Header(LIMITS))
        names.append(journal.path.name)
        journal.close()
    assert names == ["j.bin", "j.bin.1", "j.bin.2"]


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    Journal(tmp_path / "j", Header(LIMITS)).close()
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600


def test_it_stops_at_its_size_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    most = 1000
    journal = Journal(tmp_path / "j", Header(LIMITS), most)
    scheduler = JournaledScheduler(LIMITS, journal)
    for number in range(200):
        scheduler.handle(CancelRequested(f"nobody {number}"), float(number))
    assert not journal.open
    assert (tmp_path / "j").stat().st_size <= most
    assert len(records(tmp_path / "j")) > 5, "what was written before is whole"
    assert [record.message for record in caplog.records] == [f"the journal {tmp_path / 'j'} ends here: it has reached its size"]


def test_a_full_disk_ends_the_journal_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.journal._created", lambda path: (path, os.open(path, os.O_WRONLY)))
    journal = Journal(Path("/dev/full"), Header(LIMITS))
    scheduler = JournaledScheduler(LIMITS, journal)
    for number in range(100):
        scheduler.handle(CancelRequested("nobody"), float(number))
        scheduler.plan(float(number))
    journal.close()
    assert len(caplog.records) == 1 and "No space left" in caplog.records[0].message


def test_what_was_heard_before_a_plan_is_in_the_file_with_it(tmp_path: Path) -> None:
    """A kill, which writes nothing more, loses what came after the last plan."""
    journal = Journal(tmp_path / "j", Header(LIMITS))
    journal.heard(CancelRequested("first"), 10.0)
    journal.planned(Plan([], [], 1), 10.0)
    journal.heard(CancelRequested("second"), 10.5)
    _, heard, plan = records(tmp_path / "j")
    assert heard.event.request_id == "first" and plan.now == 10.0
    journal.close()


@pytest.mark.parametrize(
    ("name", "workers", "path"),
    [("a/run.journal", 1, "a/run.journal"), ("a/run.journal", 2, "a/run-cpu1.journal"), ("run", 2, "run-cpu1")],
)
def test_each_of_several_workers_has_its_own(name: str, workers: int, path: str) -> None:
    assert path_of(name, "cpu1", workers) == Path(path)


def test_without_the_setting_the_plain_scheduler_runs() -> None:
    assert type(make_scheduler(Config(), LIMITS, HELLO)) is Scheduler


def test_the_setting_makes_a_file_for_this_worker(tmp_path: Path) -> None:
    config = Config(journal=str(tmp_path / "run.journal"), device="cpu,cpu")
    scheduler = make_scheduler(config, LIMITS, HELLO)
    assert isinstance(scheduler, JournaledScheduler)
    scheduler.journal.close()
    assert records(tmp_path / "run-cpu1.journal") == [Header(LIMITS, "cpu1", "bard", "bf16")]


def test_a_file_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--journal .*no/j: No such file or directory"):
        make_scheduler(Config(journal=str(tmp_path / "no" / "j")), LIMITS, HELLO)


@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_the_root_of_all_folders_is_no_file(device: str) -> None:
    with pytest.raises(ConfigError, match="--journal /: Is a directory"):
        make_scheduler(Config(journal="/", device=device), LIMITS, HELLO)
