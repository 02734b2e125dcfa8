"""What the worker says about drafts, counted a second time from the rows of each step and from what was delivered."""

from collections.abc import Collection, Iterable

from gpu_worker.policy.events import Action, Emit, Row, RowResult
from gpu_worker.policy.scheduler import Scheduler


class Drafts:
    """Of one life of the worker, by position."""

    def __init__(self, draft_max: int) -> None:
        self.drafted = [0] * draft_max
        self.accepted = [0] * draft_max

    def count(
        self, rows: Iterable[Row], results: Iterable[RowResult], going_on: Collection[str], actions: Iterable[Action]
    ) -> None:
        """Take in a step after its results were handled. `going_on`: those whose results count; `actions`: what came of it."""
        delivered = {action.request_id: len(action.tokens) for action in actions if isinstance(action, Emit)}
        for row, result in zip(rows, results, strict=True):
            if row.request_id not in going_on:
                continue
            agreed = min(len(result.tokens) - 1, delivered.get(row.request_id, 0))
            for position in range(row.draft):
                self.drafted[position] += 1
                self.accepted[position] += position < agreed

    def check(self, scheduler: Scheduler) -> None:
        """AssertionError if the totals differ, or if anything of a draft has outlived its step."""
        counters = scheduler.load().counters
        assert counters.drafted == self.drafted, f"drafted {counters.drafted}, not {self.drafted}"
        assert counters.accepted == self.accepted, f"accepted {counters.accepted}, not {self.accepted}"
        for request_id, seq in scheduler.sequences.items():
            assert seq.draft == 0, f"{request_id} keeps drafts between steps"
            assert seq.accepted <= seq.drafted, f"{request_id} has more accepted than drafted"
