"""The metrics, as Prometheus text. Made at the moment of asking from the ledger and the host cache's answer."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from router.ledger import Ledger
from router.totals import Histogram
from wire.messages import Budget

PARK_KINDS = ("pressure", "forced", "explicit")
DENIED_REASONS = ("full", "fragmented", "memory", "not_attached", "too_many", "timeout", "no_host_cache", "mismatch", "lost")
PARKS = (
    *(("save", reason) for reason in ("asked", "cheaper", "unmeasured")),
    *(("recompute", reason) for reason in ("asked", "copy_dearer", "budget_dear", "nothing_computed", "copy_failed")),
    *(("recompute", f"denied_{reason}") for reason in DENIED_REASONS),
)
CELL_STATES = ("active", "reusable", "parking", "resuming", "free")
FINISH_REASONS = ("stop", "length", "cancelled", "error", "client_lost")
REJECTED_CODES = ("queue_full", "key_limit", "context_length_exceeded", "bad_request", "duplicate_id", "draining")
SENDERS = ("client", "worker")


class Metrics:
    """A registry of its own. Every label value is there from the start, with 0."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._budget = Budget(0, 0, 0, 0, 0)
        self._hostcache_up = False
        self._now = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, budget: Budget | None, now: float) -> str:
        """The exposition. Without an answer of the host cache its last budget is shown, and nothing as used."""
        self._now = now
        self._hostcache_up = budget is not None
        self._budget = budget or Budget(self._budget.budget_bytes, 0, 0, 0, self._budget.generation)
        return generate_latest(self._registry).decode()

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not know the names beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        yield from self._parking()
        yield from self._requests()
        yield from self._workers()

    def _parking(self) -> Iterator[Metric]:
        workers = self._ledger.totals.workers()
        yield _counters("parkade_preempt", "Sequences taken off the device", "kind", workers.preempt, PARK_KINDS)
        yield CounterMetricFamily("parkade_resume", "Parked sequences brought back", value=workers.resumed)
        yield CounterMetricFamily(
            "parkade_recompute_tokens", "Known tokens fed again after a loss of cells", value=workers.recomputed_tokens
        )
        yield _parks(workers.parks)
        yield CounterMetricFamily(
            "parkade_recompute_stalled", "Sequences ended because their recompute made no progress", value=workers.stalled
        )
        yield _counters("parkade_park_denied", "Saves that were not granted", "reason", workers.denied, DENIED_REASONS)
        yield CounterMetricFamily(
            "parkade_images_damaged", "Parked images that were not what was saved; computed again", value=workers.damaged
        )
        yield GaugeMetricFamily("parkade_requests_preempted", "Requests that are parked now", value=self._ledger.parked)
        yield _histogram("parkade_parked_seconds", "How long a sequence was parked", self._ledger.totals.parked_s)
        yield GaugeMetricFamily("parkade_hostcache_up", "Whether the host cache answers", value=self._hostcache_up)
        for name, text, value in (
            ("budget", "Bytes the host cache may hold", self._budget.budget_bytes),
            ("used", "Bytes of live leases", self._budget.used_bytes),
            ("held", "Bytes of resident slabs", self._budget.held_bytes),
        ):
            yield GaugeMetricFamily(f"parkade_hostcache_{name}_bytes", text, value=value)

    def _requests(self) -> Iterator[Metric]:
        ledger, totals = self._ledger, self._ledger.totals
        yield CounterMetricFamily("parkade_tokens_generated", "New tokens, each once", value=totals.tokens_generated)
        yield CounterMetricFamily("parkade_prompt_tokens", "Tokens of accepted prompts", value=totals.prompt_tokens)
        yield GaugeMetricFamily("parkade_requests_running", "Requests in a batch", value=ledger.fleet.running)
        yield GaugeMetricFamily("parkade_requests_queued", "Requests that wait for their first step", value=ledger.queued)
        yield CounterMetricFamily("parkade_requests_accepted", "Accepted requests", value=totals.accepted)
        yield _counters("parkade_requests_finished", "Ended requests", "reason", totals.finished, FINISH_REASONS)
        yield _counters("parkade_requests_rejected", "Refused requests", "code", totals.rejected, REJECTED_CODES)
        yield CounterMetricFamily("parkade_requests_replayed", "Requests given to another life of a worker", value=totals.replays)
        yield _counters("parkade_bad_messages", "Messages that nobody may send", "sender", totals.bad_messages, SENDERS)
        yield _histogram("parkade_time_to_first_token_seconds", "From arrival to the first token ever", totals.first_token_s)
        yield _histogram("parkade_token_gap_seconds", "Between messages with tokens of a stream, pauses included", totals.gap_s)

    def _workers(self) -> Iterator[Metric]:
        fleet, totals = self._ledger.fleet, self._ledger.totals
        alive = [worker for worker in fleet.workers.values() if worker.is_alive(self._now)]
        cells = GaugeMetricFamily("parkade_kv_cells", "Cells of the pools by who holds them", labels=["state"])
        for state in CELL_STATES:
            cells.add_metric([state], sum(getattr(worker.cells, state) for worker in alive))
        yield cells
        yield GaugeMetricFamily("parkade_workers", "Workers that answer and make progress", value=len(alive))
        yield CounterMetricFamily("parkade_workers_lost", "Workers that died or hung", value=totals.workers_lost)
        workers = totals.workers()
        yield CounterMetricFamily("parkade_steps", "Forward passes", value=workers.steps)
        yield CounterMetricFamily("parkade_prefill_tokens", "Tokens fed that gave no new token", value=workers.prefill_tokens)
        positions = max([worker.hello.draft for worker in fleet.workers.values()], default=0)
        yield _by_position("parkade_drafted_tokens", "Tokens that the model's head drafted", workers.drafted, positions)
        yield _by_position("parkade_accepted_tokens", "Drafts that the model agreed with", workers.accepted, positions)


def _counters(name: str, text: str, label: str, values: Mapping[str, int], known: tuple[str, ...]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value in dict.fromkeys([*known, *sorted(values)]):
        family.add_metric([value], values.get(value, 0))
    return family


def _parks(parks: Mapping[str, int]) -> Metric:
    """Of Counters.parks, whose keys are "mode reason"."""
    family = CounterMetricFamily("parkade_parks", "Parks by how the cells were kept, and why", labels=["mode", "reason"])
    for key in dict.fromkeys([*map(" ".join, PARKS), *sorted(parks)]):
        family.add_metric(key.split(" ", 1), parks.get(key, 0))
    return family


def _by_position(name: str, text: str, values: list[int], positions: int) -> Metric:
    """`position` 1 is the first draft behind a sequence's newest token."""
    known = {str(position): value for position, value in enumerate(values, 1)}
    return _counters(name, text, "position", known, tuple(str(position + 1) for position in range(positions)))


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)
