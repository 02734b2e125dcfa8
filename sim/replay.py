"""Replay: a journal of a real run through a fresh scheduler, which must make the same plans."""

from pathlib import Path

from msgspec import Struct

from gpu_worker.policy.events import Plan
from gpu_worker.policy.recording import Header, Heard, JournalError, Planned, planned, read
from gpu_worker.policy.scheduler import Scheduler

__all__ = ["JournalError", "Replayed", "replay"]


class Replayed(Struct):
    """What a replay has met. `difference` is empty where all plans are the same; else it tells of the first that is not."""

    header: Header
    events: int = 0
    plans: int = 0
    steps: int = 0  # plans with rows
    rows: int = 0
    parks: dict[str, int] = {}  # by kind
    seconds: float = 0.0  # of the real run, from its first record to its last
    difference: str = ""


def replay(path: Path) -> Replayed:
    """Play it to its end, to its tear, or to the first plan that differs. OSError, or JournalError for a file that is none."""
    with path.open("rb") as file:
        records = read(file)
        header = next(records)
        assert isinstance(header, Header)
        replayed = Replayed(header)
        scheduler = Scheduler(header.limits)
        began = None
        for record in records:
            began = record.now if began is None else began
            replayed.seconds = record.now - began
            if isinstance(record, Heard):
                replayed.events += 1
                scheduler.handle(record.event, record.now)
                continue
            plan = scheduler.plan(record.now)
            replayed.plans += 1
            replayed.steps += bool(record.rows)
            replayed.rows += len(record.rows)
            if (mine := planned(plan, record.now)) != record:
                replayed.difference = _difference(replayed.plans, record, mine, plan)
                break
        replayed.parks = dict(scheduler.book.preempted)
        return replayed


def _difference(number: int, theirs: Planned, mine: Planned, plan: Plan) -> str:
    """One line on where two plans part."""
    at = f"plan {number} at {theirs.now:.6f} s"
    for index in range(max(len(theirs.rows), len(mine.rows))):
        was = theirs.rows[index] if index < len(theirs.rows) else None
        now = mine.rows[index] if index < len(mine.rows) else None
        if was != now:
            return f"{at}: row {index} was {was}, now it is {now}"
    if (theirs.actions, theirs.copies) != (mine.actions, mine.copies):
        names = ", ".join(type(action).__name__ for action in plan.actions) or "none"
        return f"{at}: it had {theirs.actions} actions, {theirs.copies} of them copies; now they are: {names}"
    return f"{at}: the same rows, but their blocks or the actions differ"
