"""Times are taken from a journal as they were: from plan to plan, without steps beside copies or with drafts."""

from pathlib import Path

import pytest

from gpu_worker.policy.events import Loaded, Saved
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.recording import MAGIC, Header, Heard, Planned, RowSummary, framed
from sim.costs import Work
from sim.samples import Copied, samples

HEADER = Header(Limits(num_blocks=8, block_size=4, slots=2, max_context=32))
PREFILL = RowSummary("a", 0, 9, True, 0)
DECODE = RowSummary("a", 9, 1, True, 0)
DRAFTED = RowSummary("a", 9, 1, True, 2)


def plan(now: float, *rows: RowSummary, copies: int = 0) -> Planned:
    return Planned(now, b"", list(rows), copies, copies)


def journal(tmp_path: Path, *records) -> Path:
    path = tmp_path / "j"
    path.write_bytes(MAGIC + b"".join(framed(record) for record in (HEADER, *records)))
    return path


def test_a_step_lasts_until_the_next_plan(tmp_path: Path) -> None:
    found = samples(journal(tmp_path, plan(1.0, PREFILL), plan(1.5, DECODE), plan(1.75), plan(9.0, DECODE), plan(9.125)))
    works = [(step.work, step.seconds) for step in found.steps]
    decode = Work(decodes=1, decode_cells=10)
    assert works == [(Work(prefill_tokens=9, prefill_cells=45), 0.5), (decode, 0.25), (decode, 0.125)]


def test_steps_beside_a_copy_do_not_count(tmp_path: Path) -> None:
    records = [
        plan(1.0, DECODE, copies=2),
        Heard(1.1, Saved("b", True, 4096, 0.5)),
        plan(2.0, DECODE),
        Heard(2.1, Loaded("c", True, 8192, 0.25)),
        plan(3.0, DECODE),
        plan(4.0),
    ]
    found = samples(journal(tmp_path, *records))
    assert [step.seconds for step in found.steps] == [1.0]
    assert found.left_out == 2
    assert (found.saves, found.loads) == ([Copied(4096, 0.5)], [Copied(8192, 0.25)])


def test_steps_with_drafts_do_not_count(tmp_path: Path) -> None:
    found = samples(journal(tmp_path, plan(1.0, DRAFTED), plan(2.0, DECODE), plan(2.5)))
    assert [step.seconds for step in found.steps] == [0.5]


@pytest.mark.parametrize("event", [Saved("b", False, 4096, 0.5), Saved("b", True), Loaded("b", True, 4096, 0.0)])
def test_copies_that_were_not_measured_say_nothing(tmp_path: Path, event: Saved | Loaded) -> None:
    found = samples(journal(tmp_path, Heard(1.0, event)))
    assert not found.saves and not found.loads
