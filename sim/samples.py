"""Samples: what a journal says about time, to fit a cost model to: steps from plan to plan, and copies."""

from pathlib import Path

from msgspec import Struct

from gpu_worker.policy.events import Loaded, Saved
from gpu_worker.policy.recording import Header, Heard, JournalError, Planned, read
from sim.costs import Work, work_of

__all__ = ["JournalError", "Samples", "Step", "samples"]


class Step(Struct, frozen=True):
    """From the plan of a step to the next plan: the step itself and everything that the loop did around it."""

    work: Work
    seconds: float


class Copied(Struct, frozen=True):
    nbytes: int
    seconds: float


class Samples(Struct):
    """Of one journal. Steps beside a copy or with drafts are left out: what they took is not the step's own."""

    header: Header
    steps: list[Step] = []
    saves: list[Copied] = []
    loads: list[Copied] = []
    left_out: int = 0


def samples(path: Path) -> Samples:
    """Read a journal. OSError, or JournalError for a file that is none."""
    with path.open("rb") as file:
        records = read(file)
        header = next(records)
        assert isinstance(header, Header)
        found = Samples(header)
        step: Planned | None = None  # the plan whose step is under way
        copying = 0
        for record in records:
            if isinstance(record, Heard):
                if isinstance(record.event, Saved | Loaded):
                    copying = max(0, copying - 1)
                    _copied(found, record.event)
                continue
            if step is not None:
                found.steps.append(Step(work_of(step.rows), record.now - step.now))
            copying += record.copies
            step = record if record.rows and not copying and not any(row.draft for row in record.rows) else None
            found.left_out += bool(record.rows) and step is None
        return found


def _copied(found: Samples, event: Saved | Loaded) -> None:
    if event.ok and event.nbytes and event.seconds > 0:
        (found.saves if isinstance(event, Saved) else found.loads).append(Copied(event.nbytes, event.seconds))
