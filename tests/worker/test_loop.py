"""The worker's loop beside its parts: what it measures of a step, and what it says of a park."""

from types import SimpleNamespace

import pytest
import zmq

from gpu_worker import worker as module
from gpu_worker.policy.events import Choice, Notify, Plan, RowResult, StepDone, Submitted
from gpu_worker.policy.scheduler import Limits, Scheduler
from gpu_worker.worker import Worker, told
from wire.codec import Decoder, unbundle
from wire.messages import Generate, Hello, Notice, Submit, Usage, WorkerToRouter

HELLO = Hello("w", 1, "m", "cpu", "f32", 64, 16, 1, 64, True)


class Silence:
    """A router that says nothing and hears everything."""

    def __init__(self) -> None:
        self.heard: list = []
        self._decoder: Decoder[WorkerToRouter] = Decoder(WorkerToRouter)

    def recv_multipart(self, _flags: int) -> list[bytes]:
        raise zmq.Again

    def send_multipart(self, parts: tuple[bytes, bytes], _flags: int) -> None:
        self.heard += map(self._decoder.unpack, unbundle(parts))

    def poll(self, *_: object) -> int:
        return 0

    def close(self) -> None:
        pass


class NoParking:
    copying = connected = False
    damaged = 0

    def poll(self, _now: float) -> list:
        return []

    def close(self) -> None:
        pass


class Listening(Scheduler):
    """Keeps what it is told."""

    def handle(self, event, now: float) -> None:
        self.events = [*getattr(self, "events", []), event]
        super().handle(event, now)


def new_worker(runner) -> Worker:
    limits = Limits(num_blocks=4, block_size=16, slots=1, max_context=64)
    return Worker(HELLO, Silence(), Listening(limits), runner, NoParking())


def test_a_step_is_measured_from_its_start_to_its_end(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Runner:
        def step(self, plan: Plan) -> StepDone:
            clock.now += 0.25
            return StepDone([RowResult(row.request_id, [7]) for row in plan.rows], plan.epoch)

    worker = new_worker(Runner())
    worker.draining = True
    worker.scheduler.handle(Submitted(Submit(Generate("a", [1, 2, 3], max_tokens=2), 1)), clock.now)
    worker.run()
    assert [event.seconds for event in worker.scheduler.events if isinstance(event, StepDone)] == [0.25, 0.25]


def test_a_step_that_fails_leaves_nothing_open():
    class Runner:
        def step(self, _plan: Plan) -> StepDone:
            raise RuntimeError("the card is gone")

    worker, closed = new_worker(Runner()), []
    worker.parking.close = lambda: closed.append("parking")
    worker.socket.close = lambda: closed.append("socket")
    worker.scheduler.handle(Submitted(Submit(Generate("a", [1, 2, 3], max_tokens=2), 1)), 0.0)
    with pytest.raises(RuntimeError, match="the card is gone"):
        worker.run()
    assert closed == ["parking", "socket"]


def test_a_park_is_told_with_its_reason_and_its_numbers_are_one_line_of_the_log(caplog):
    worker = new_worker(None)
    choice = Choice("recompute", "budget_dear", 1200, 3 << 20, 0.004, 0.5, 2.5, 0.75, 3.0, 4.0)
    with caplog.at_level("INFO", "parkade"):
        worker._act([Notify("chat-1", "parked", "pressure", "recompute", 0, Usage(), choice)], 0.0)
        worker._act([Notify("chat-1", "resumed", "pressure", "recompute", 70, Usage())], 0.0)
    notices = [message for message in worker.socket.heard if isinstance(message, Notice)]
    assert [(notice.event, notice.mode, notice.reason) for notice in notices] == [
        ("parked", "recompute", "budget_dear"),
        ("resumed", "recompute", ""),
    ]
    assert caplog.messages == [
        "parked chat-1 (pressure): 1200 cells, recompute, budget_dear: 3.0 MiB, copies 4.0 ms, computing 500.0 ms, stays 2.50 s, "
        "budget 75% full, worth 0.75 of the price",
        "resumed chat-1 after 70 ms: recompute",
    ]


def test_the_failpoint_of_a_park_comes_when_the_router_has_been_told(monkeypatch):
    worker = new_worker(None)
    told_by_then = []
    monkeypatch.setattr(module.failpoints, "armed", True)
    monkeypatch.setattr(module.failpoints, "hit", lambda name: told_by_then.append((name, type(worker.socket.heard[-1]))))
    worker._act([Notify("chat-1", "parked", "pressure", "save", 0, Usage(), Choice("save", "asked", 12))], 0.0)
    worker._act([Notify("chat-1", "resumed", "pressure", "save", 70, Usage())], 0.0)
    assert told_by_then == [("parked", Notice)]


def test_a_choice_without_numbers_is_short():
    assert told(Choice("save", "asked", 12)) == "12 cells, save, asked"
    free = Choice("save", "cheaper", 12, 1 << 20, 0.001, 0.002, 1.0, 0.1, 5.0, 0.0)
    assert told(free).endswith("budget 10% full")
