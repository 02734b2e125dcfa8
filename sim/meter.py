"""Meter: counts what happens in a simulated run and makes figures of it at the end."""

from array import array
from collections import Counter

from gpu_worker.policy.events import Finish
from gpu_worker.policy.scheduler import Scheduler
from sim.copying import HostCache
from sim.figures import ClassFigures, Figures, Histogram, percentile
from sim.trace import Request


class Tally:
    """What is counted of one class, or of all."""

    def __init__(self) -> None:
        self.requests = 0
        self.requests_parked = 0
        self.ttft = array("d")
        self.waits = array("d")

    def add(self, other: "Tally") -> None:
        self.requests += other.requests
        self.requests_parked += other.requests_parked
        self.ttft.extend(other.ttft)
        self.waits.extend(other.waits)

    def figures(self) -> ClassFigures:
        return ClassFigures(
            requests=self.requests,
            requests_parked=self.requests_parked,
            ttft_p50_s=percentile(self.ttft, 50),
            ttft_p99_s=percentile(self.ttft, 99),
            longest_wait_s=max(self.waits, default=0.0),
        )


class Meter:
    """Of one run."""

    def __init__(self) -> None:
        self.gaps = Histogram()
        self.denials = 0
        self.steps = 0
        self.plans = 0
        self._classes: dict[int, Tally] = {}
        self._ended_s = 0.0
        self._output_tokens = self._tokens_found = self._cut_short = 0
        self._errors: Counter[str] = Counter()
        self._idle_cell_s = self._used_cell_s = self._pressed_s = 0.0

    def of(self, priority: int) -> Tally:
        """That of a class."""
        tally = self._classes.get(priority)
        if tally is None:
            tally = self._classes[priority] = Tally()
        return tally

    def passed(self, seconds: float, used_cells: float, pressed_s: float, idle_cells: float) -> None:
        """Time has gone on, in the last `pressed_s` of which somebody waited or was parked and so many cells were idle."""
        self._used_cell_s += seconds * used_cells
        self._idle_cell_s += pressed_s * idle_cells
        self._pressed_s += pressed_s

    def ended(self, request: Request, tokens: int, finish: Finish, now: float) -> None:
        """A request is over, with so many output tokens."""
        self._ended_s = now
        tally = self.of(request.priority)
        tally.requests += 1
        tally.requests_parked += finish.usage.parks > 0
        self._output_tokens += tokens
        self._tokens_found += finish.usage.cached_tokens
        if finish.reason == "error":
            self._errors[finish.code] += 1
        elif tokens < request.output_tokens:
            self._cut_short += 1

    def figures(self, began_s: float, scheduler: Scheduler, cache: HostCache) -> Figures:
        """Of everything so far."""
        book, total = scheduler.book, Tally()
        for tally in self._classes.values():
            total.add(tally)
        span_s = max(0.0, self._ended_s - began_s)
        return Figures(
            makespan_s=span_s,
            requests=total.requests,
            failed=sum(self._errors.values()),
            cut_short=self._cut_short,
            output_tokens=self._output_tokens,
            tokens_per_s=self._output_tokens / span_s if span_s else 0.0,
            ttft_p50_s=percentile(total.ttft, 50),
            ttft_p99_s=percentile(total.ttft, 99),
            longest_wait_s=max(total.waits, default=0.0),
            p99_wait_s=percentile(total.waits, 99),
            mean_wait_s=sum(total.waits) / len(total.waits) if total.waits else 0.0,
            p99_gap_s=self.gaps.percentile(99),
            longest_gap_s=self.gaps.most,
            parks=dict(book.preempted),
            park_reasons=dict(book.parks),
            requests_parked=total.requests_parked,
            bytes_saved=cache.saved_bytes,
            bytes_loaded=cache.loaded_bytes,
            cache_most_bytes=cache.most_used_bytes,
            tokens_recomputed=scheduler.totals.recomputed_tokens,
            tokens_found=self._tokens_found,
            denials=self.denials,
            stalled=book.stalled,
            idle_cells=self._idle_cell_s / self._pressed_s if self._pressed_s else 0.0,
            pressed_s=self._pressed_s,
            busy_cells=self._used_cell_s / span_s if span_s else 0.0,
            steps=self.steps,
            plans=self.plans,
            errors=dict(self._errors),
            classes={str(priority): self._classes[priority].figures() for priority in sorted(self._classes)},
        )
