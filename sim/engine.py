"""Engine: a trace through the real scheduler in virtual time, with the worker's loop, a host cache and the costs of its work.

    figures = simulate(trace, limits_of(costs, ctx=8192, slots=8, policy="watermark"), costs, park_ram_bytes=1 << 30)

It decides nothing. The loop is that of gpu_worker/worker.py: a plan, its actions, one step, a bounded piece of copying. Requests
wait at the router before they are sent, see sim/dispatch.py. Text is made up so that two requests have a beginning in common
exactly where one comes after the other.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpu_worker.policy.events import (
    Action,
    Emit,
    Event,
    Finish,
    LeaseDenied,
    Load,
    Notify,
    Plan,
    ReleaseLease,
    Reserve,
    RowResult,
    Save,
    StepDone,
    Submitted,
)
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.scheduler import Scheduler
from sim.copying import HostCache
from sim.costs import CostModel, work_of
from sim.dispatch import Dispatch, Live, Text
from sim.figures import Figures
from sim.jumps import ONE, Jump, longest_jump
from sim.meter import Meter
from sim.timeline import Moment, Timeline
from sim.trace import Request
from wire.messages import Generate, Sampling, Submit, Usage

STUCK_AFTER_TURNS = 1000  # of the loop, without time going on

_GREEDY = Sampling(temperature=0.0, seed=0)
_NOTHING: list[int] = []


class End(Struct, frozen=True):
    """How one request has ended."""

    request_id: str
    at_s: float
    reason: str
    code: str
    tokens: int
    usage: Usage


def limits_of(costs: CostModel, *, ctx: int, slots: int, max_context: int | None = None, **settings: Any) -> Limits:
    """Limits as `parkade serve` makes them, for the model of these costs. `settings`: further fields of Limits."""
    recurrent = costs.state_bytes > 0
    return Limits(
        num_blocks=max(1, ctx // costs.block_size),
        block_size=costs.block_size,
        slots=slots,
        max_context=max_context or ctx,
        reuse=settings.pop("reuse", not recurrent),
        state_slots=slots + 2 if recurrent else None,
        block_bytes=costs.block_bytes,
        state_bytes=costs.state_bytes,
        **settings,
    )


def simulate(
    trace: Iterable[Request],
    limits: Limits,
    costs: CostModel,
    park_ram_bytes: int,
    *,
    jump: bool = True,
    on_end: Callable[[End], None] | None = None,
    timeline: Timeline | None = None,
) -> Figures:
    """Play the trace to its end. `park_ram_bytes`: the budget of the host cache. `jump` False plays each step by itself, which
    changes nothing but the time it takes. Limits with drafts are not simulated: ValueError."""
    return Engine(trace, limits, costs, park_ram_bytes, jump, on_end, timeline).run()


class Engine:
    """One run. `now` is virtual seconds."""

    def __init__(
        self,
        trace: Iterable[Request],
        limits: Limits,
        costs: CostModel,
        park_ram_bytes: int,
        jump: bool = True,
        on_end: Callable[[End], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if limits.draft_max:
            raise ValueError("drafts are not simulated: draft_max must be 0")
        if limits.block_size != costs.block_size:
            raise ValueError(f"the costs are those of blocks of {costs.block_size} cells, not {limits.block_size}")
        self.limits = limits
        self.costs = costs
        self.scheduler = Scheduler(limits)
        self.cache = HostCache(costs, park_ram_bytes)
        self.now = 0.0
        self._jumps = jump
        self._on_end = on_end
        self._timeline = timeline

        requests = list(trace)
        # when, number in the trace, itself, the text that its prompt begins with
        self._to_come: list[tuple[float, int, Request, Text]] = [
            (request.arrival_s, number, request, ()) for number, request in enumerate(requests) if not request.after
        ]
        heapq.heapify(self._to_come)
        self._after: dict[str, list[tuple[int, Request]]] = {}
        for number, request in enumerate(requests):
            if request.after:
                self._after.setdefault(request.after, []).append((number, request))
        self._arrivals = 0
        self._live: dict[str, Live] = {}
        self._router = Dispatch(limits.slots, min((request.priority for request in requests), default=0))
        self._inbox: list[Event] = []  # answers that the next turn hears

        self._began_s = min((at for at, *_ in self._to_come), default=0.0)
        self._meter = Meter()
        self._drawn_s = (0.0, 0.0)  # when the first and the last step of the last jump ended

    # the loop -------------------------------------------------------------------------------------------------------------
    def run(self) -> Figures:
        """Until every request has ended. RuntimeError if the scheduler leaves somebody behind for ever: that would be its bug."""
        self.now = self._began_s
        still = 0
        while True:
            before = self.now
            self._arrive()
            jump = self._longest_jump() if self._jumps else ONE
            used = self.scheduler.book.pool.used
            plan = self.scheduler.plan(self.now) if jump is ONE else self._plan(jump)
            for action in plan.actions:
                self._act(action)
            if self._timeline is not None and self._timeline.due(self.now):
                self._timeline.add(self._moment())
            step_s = self._step(plan, jump, used) if plan.rows else None
            if self.cache.copying:
                self._copy(step_s)
            elif step_s is None and not plan.actions and not self._sleep():
                break
            still = still + 1 if self.now == before else 0
            if still > STUCK_AFTER_TURNS:
                raise RuntimeError(f"stuck at {self.now:.3f} s: {self._unfinished()}")
        if self._live:
            raise RuntimeError(f"left behind at {self.now:.3f} s: {self._unfinished()}")
        return self._meter.figures(self._began_s, self.scheduler, self.cache)

    def _sleep(self) -> bool:
        """Until the next arrival or deadline. False: there is none."""
        if self._inbox:
            return True
        wait_s = self._wait_s()
        if self._to_come:
            wait_s = min(wait_s, max(0.0, self._to_come[0][0] - self.now))
        if wait_s == inf:
            return False
        self._advance(wait_s)
        return True

    def _wait_s(self) -> float:
        """Until a deadline of the scheduler or the router; inf: they have none."""
        wait_s = self.scheduler.wait_s(self.now)
        return min(self._router.wait_s(self.now), inf if wait_s is None else wait_s)

    def _unfinished(self) -> str:
        states = Counter(seq.state.value for seq in self.scheduler.sequences.values())
        return f"{len(self._live)} requests, {dict(states)}"

    # in -------------------------------------------------------------------------------------------------------------------
    def _arrive(self) -> None:
        """Answers of the host cache, requests whose time has come, and what the router sends of them."""
        if self._inbox:
            inbox, self._inbox = self._inbox, []
            for event in inbox:
                self.scheduler.handle(event, self.now)
        while self._to_come and self._to_come[0][0] <= self.now:
            at, number, request, text = heapq.heappop(self._to_come)
            own = request.prompt_tokens - sum(length for _, length in text)
            text = (*text, (number + 1, own))
            live = Live(request, self._arrivals, at, text)
            self._arrivals += 1
            self._live[request.id] = live
            self._router.add(live)
        while (live := self._router.next(self.now)) is not None:
            self._submit(live)

    def _submit(self, live: Live) -> None:
        request = live.request
        prompt: list[int] = []
        for marker, length in live.text:
            prompt.append(marker)
            prompt += [0] * min(length - 1, self.limits.sequence_cells)  # a longer one is refused, however long it is
        generate = Generate(
            request.id, prompt, request.output_tokens, sampling=_GREEDY, ignore_eos=True, priority=request.priority
        )
        self.scheduler.handle(Submitted(Submit(generate, live.number)), self.now)

    # out ------------------------------------------------------------------------------------------------------------------
    def _act(self, action: Action) -> None:
        kind = type(action)
        if kind is Emit:
            self._emit(action)
        elif kind is Finish:
            self._finish(action)
        elif kind is Notify:
            self._notify(action)
        elif kind is Reserve:
            self._note_park(action.request_id)
            self._inbox.append(self.cache.answer(action))
            self._meter.denials += type(self._inbox[-1]) is LeaseDenied
        elif kind is ReleaseLease:
            self.cache.release(action.lease)
        elif kind is Save or kind is Load:
            self.cache.start(action)

    def _emit(self, emit: Emit) -> None:
        """Tokens leave. Those of a jump have left one by one meanwhile."""
        live = self._live[emit.request_id]
        count = len(emit.tokens)
        if emit.offset != live.tokens:
            raise RuntimeError(f"{emit.request_id}: token {emit.offset} comes after token {live.tokens}")
        first_s, last_s = self._drawn_s if count > 1 else (self.now, self.now)
        if live.tokens:
            self._meter.gaps.add(first_s - live.last_token_s)
        else:
            self._meter.of(live.request.priority).ttft.append(first_s - live.arrival_s)
        live.tokens += count
        live.last_token_s = last_s

    def _notify(self, notice: Notify) -> None:
        live = self._live[notice.request_id]
        if notice.event == "parked":
            self._note_park(notice.request_id)
            self._router.parked(live)
        else:
            self._end_wait(live)

    def _note_park(self, request_id: str) -> None:
        """It has left the batch: with the first word of its park."""
        live = self._live[request_id]
        if live.parked_since is None:
            live.parked_since = self.now

    def _end_wait(self, live: Live) -> None:
        """It runs again, or is over."""
        self._router.runs_again(live)
        if live.parked_since is not None:
            self._meter.of(live.request.priority).waits.append(self.now - live.parked_since)
            live.parked_since = None

    def _finish(self, finish: Finish) -> None:
        live = self._live.pop(finish.request_id)
        request = live.request
        self._end_wait(live)
        self._router.ended(live)
        self._meter.ended(request, live.tokens, finish, self.now)
        for number, follower in self._after.pop(request.id, ()):
            at = max(follower.arrival_s, self.now + follower.think_s)
            heapq.heappush(self._to_come, (at, number, follower, _grown(live.text, live.tokens)))
        if self._on_end is not None:
            self._on_end(End(request.id, self.now, finish.reason, finish.code, live.tokens, finish.usage))

    # steps and copies -----------------------------------------------------------------------------------------------------
    def _longest_jump(self) -> Jump:
        """As many steps as can be played as one."""
        if any(type(action) is Finish for action in self.scheduler.book.actions):
            return ONE  # a refusal that is not told yet: it frees a seat, and others may come after it
        until_s = self._wait_s()
        if self._to_come and not self._router.full:
            until_s = min(until_s, self._to_come[0][0] - self.now)
        return longest_jump(self.scheduler, self.costs, until_s)

    def _plan(self, jump: Jump) -> Plan:
        """The plan of all steps of a jump: each decode has as many drafts, and prompts as many chunks."""
        scheduler, limits = self.scheduler, self.limits
        for seq in scheduler.book.running.values():
            if len(seq.tokens) - seq.computed == 1:
                seq.draft = jump.steps - 1
        scheduler.limits = replace(limits, step_tokens=jump.steps * limits.step_budget)
        plan = scheduler.plan(self.now)
        scheduler.limits = limits
        fed = sorted((row.count, row.draft) for row in plan.rows)
        if fed != [(1, jump.steps - 1)] * jump.decodes + [(jump.steps * jump.chunk, 0)] * (jump.chunk > 0):
            raise RuntimeError(f"{jump} became a step of rows and drafts {fed}")
        return plan

    def _step(self, plan: Plan, jump: Jump, used_before: int) -> float:
        """Run the rows; seconds that it took."""
        costs, steps = self.costs, jump.steps
        if steps == 1:
            work = work_of(plan.rows)
            step_s = costs.step_s(work.decodes, work.prefill_tokens, work.decode_cells, work.prefill_cells)
        else:
            step_s = jump.seconds(costs, steps)
            first_s = jump.seconds(costs, 1)
            last_s = step_s - jump.seconds(costs, steps - 1)
            second_s = first_s + (last_s - first_s) / (steps - 1)
            self._meter.gaps.add_run(second_s, last_s, steps - 1, jump.decodes)
            self._drawn_s = (self.now + first_s, self.now + step_s)
        tokens = [0] * steps
        results = [RowResult(row.request_id, tokens if row.samples else _NOTHING) for row in plan.rows]
        self._meter.steps += steps
        self._meter.plans += 1
        used = self.scheduler.book.pool.used
        self._advance(step_s, used_before + (used - used_before) / steps, used)
        self.scheduler.handle(StepDone(results, plan.epoch, step_s / steps), self.now)
        return step_s

    def _copy(self, step_s: float | None) -> None:
        took_s, ended = self.cache.copy(step_s)
        self._advance(took_s)
        for event in ended:
            self.scheduler.handle(event, self.now)

    def _advance(self, seconds: float, used_first: float | None = None, used_last: float | None = None) -> None:
        """Let time go on, and note how full the pool was meanwhile (blocks, growing evenly), and from when on somebody waited for
        cells or a seat."""
        book = self.scheduler.book
        if used_first is None:
            used_first = used_last = book.pool.used
        if book.parked or book.parking or book.resuming or len(book.waiting) or self._router.waiting:
            pressed_s = seconds
        else:
            pressed_s = max(0.0, self.now + seconds - self._to_come[0][0]) if self._to_come else 0.0
        if seconds:
            used = (used_first + used_last) / 2
            used_then = used_last - (used_last - used_first) * pressed_s / seconds / 2  # in the pressed part, which is the last
            size, blocks = self.limits.block_size, self.limits.num_blocks
            self._meter.passed(seconds, used * size, pressed_s, (blocks - used_then) * size)
        self.now += seconds

    def _moment(self) -> Moment:
        book = self.scheduler.book
        return Moment(
            at_s=self.now,
            used_cells=book.pool.used * self.limits.block_size,
            parked_cells=sum(len(seq.tokens) for seq in book.parked.values()),
            running=len(book.running) + len(book.resuming),
            parked=len(book.parked) + len(book.parking),
            waiting=len(book.waiting) + self._router.waiting,
        )


def _grown(text: Text, output: int) -> Text:
    """The text with its answer."""
    *before, (marker, length) = text
    return (*before, (marker, length + output))
