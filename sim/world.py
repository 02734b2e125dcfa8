"""World: the real scheduler, a fake device, a fake host cache, a fake router and a virtual clock, in one random schedule."""

import random
from collections import Counter

from msgspec.structs import replace

from gpu_worker.policy import events
from gpu_worker.policy.events import Action, Event, Plan, StepDone, Submitted
from gpu_worker.policy.scheduler import Scheduler
from sim.case import Case
from sim.device import Device
from sim.drafts import Drafts
from sim.hostcache import BLOCK_BYTES, STATE_BYTES, HostCache
from sim.invariants import check, check_plan, check_report
from sim.ledger import Stream
from sim.watch import Watch
from wire.messages import Usage

STUCK_AFTER_TICKS = 30_000
HOLD_TICKS = 60


class World:
    """`run()` plays the schedule to its end. Whatever is wrong is an AssertionError."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = random.Random(case.seed + 1)
        self._costs = random.Random(case.seed + 2)  # of its own, so that what is measured draws no other schedule
        self.tick = 0
        self.cache = HostCache(case.budget_bytes, case.limits.block_size, case.limits.state_slots is not None)
        self.streams: dict[str, Stream] = {}
        self.arrivals = list(reversed(case.arrivals))
        self.counts: Counter[str] = Counter()
        self._holds: list[tuple[int, str, str]] = []  # (release tick, id, reason)
        self._stale_step: StepDone | None = None
        self._boot()

    @property
    def now(self) -> float:
        return self.tick * self.case.tick_s

    def _boot(self) -> None:
        """A new life of the worker: an empty pool, poisoned memory, nothing on its way."""
        limits = self.case.limits
        self.scheduler = Scheduler(limits)
        self._watch = Watch(self.scheduler)
        self.device = Device(limits.num_blocks, limits.block_size, limits.draft_max, self.rng, limits.state_slots)
        self._drafts = Drafts(limits.draft_max)
        self._inbox: list[tuple[int, Event]] = []  # (due tick, event)
        self._saves: dict[str, events.Save] = {}
        self._loads: dict[str, events.Load] = {}
        self._stale_step = None

    # the loop -------------------------------------------------------------------------------------------------------------
    def run(self) -> Counter[str]:
        """Until every request has ended and every copy and answer is in; then nothing may be left anywhere."""
        while self.arrivals or self.scheduler.sequences or self._inbox:
            self.tick += 1
            assert self.tick < STUCK_AFTER_TICKS, f"stuck: {self._unfinished()}"
            self._arrive()
            self._disturb()
            self._deliver()
            self._step()
        self._act(self.scheduler.plan(self.now))
        assert not self.cache.leases, f"leases are left: {self.cache.leases}"
        assert self.scheduler.book.pool.used == 0, "blocks are left"
        for stream in self.streams.values():
            stream.check(self.case.limits, self.case.limits.policy == "off")
        self.counts["ticks"] = self.tick
        self.counts["parks to let somebody in"] = self._watch.displaced
        self.counts["came in by waiting too long"] = self._watch.came_aged
        self.counts["requests"] = len(self.streams)
        return self.counts

    def _unfinished(self) -> dict[str, str]:
        return {request_id: seq.state.value for request_id, seq in self.scheduler.sequences.items()}

    def _handle(self, event: Event) -> None:
        self.scheduler.handle(event, self.now)
        check(self.scheduler, self.cache)

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[-1][0] <= self.tick:
            _, generate = self.arrivals.pop()
            stream = Stream(generate, len(self.streams))
            self.streams[generate.request_id] = stream
            self._handle(Submitted(stream.submit()))

    def _step(self) -> None:
        """Plan, act, and run the rows; now and then events arrive while the step runs, or its result is lost."""
        plan = self.scheduler.plan(self.now)
        check(self.scheduler, self.cache)
        check_plan(self.scheduler, plan)
        self._act(plan)
        if not plan.rows:
            return
        results = []
        for row in plan.rows:
            self._check_writes(row)
            results.append(self.device.run(row))
        self.counts["steps"] += 1
        done = StepDone(results, plan.epoch, self._took())
        if self.rng.random() < self.case.late_events:
            self._deliver()
            if self.rng.random() < self.case.cancels:
                self._cancel_somebody()
        if self._stale_step is not None:
            self._handle(self._stale_step)
            self._stale_step = None
        if self.rng.random() < self.case.lost_steps:
            self._stale_step = done  # comes after the next plan, when nobody wants it any more
            self.counts["lost steps"] += 1
        else:
            going_on = {request_id for request_id, seq in self.scheduler.sequences.items() if not seq.cancelled}
            self._handle(done)
            self._drafts.count(plan.rows, results, going_on, self.scheduler.book.actions)
            self._drafts.check(self.scheduler)
            self.counts["drafts"] += sum(row.draft for row in plan.rows)
            self.counts["drafts that agreed"] += sum(len(result.tokens) - 1 for result in results if result.tokens)
            check_report(self.scheduler)

    def _check_writes(self, row: events.Row) -> None:
        """A row may only write into blocks that are its own alone and that no copy touches, and the same for its state."""
        pool = self.scheduler.book.pool
        copied = {block for copy in (*self._saves.values(), *self._loads.values()) for block in copy.blocks}
        size = pool.block_size
        for index in range(row.start // size, -(-(row.start + row.count + row.draft) // size)):
            assert pool.refs(row.blocks[index]) == 1, f"{row.request_id} writes into a shared block"
            assert row.blocks[index] not in copied, f"{row.request_id} writes into a block under a copy"
        states = {copy.state_slot for copy in (*self._saves.values(), *self._loads.values())}
        assert row.state_slot == -1 or row.state_slot not in states, f"{row.request_id} writes into a state under a copy"

    # actions out ----------------------------------------------------------------------------------------------------------
    def _act(self, plan: Plan) -> None:
        for action in plan.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case events.Reserve():
                self._reserve(action)
            case events.Save(request_id):
                self.cache.save_half(action, self.device, first=True)
                self._saves[request_id] = action
                self._later(events.Saved(request_id, True, self._image_bytes(action), self._took()), self.case.copy_delay)
                self.counts["saves"] += 1
                self.counts["states saved"] += action.state_slot >= 0
            case events.Load(request_id):
                self.cache.load_half(action, self.device, first=True)
                self._loads[request_id] = action
                self._later(events.Loaded(request_id, True, self._image_bytes(action), self._took()), self.case.copy_delay)
                self.counts["loads"] += 1
                self.counts["states loaded"] += action.state_slot >= 0
            case events.ReleaseLease(lease):
                self.cache.release(lease)
            case events.Emit(request_id):
                self.streams[request_id].emit(action)
                self.counts["tokens"] += len(action.tokens)
            case events.Notify(request_id, event, kind):
                self.streams[request_id].notify(action)
                if event == "parked":
                    self.counts[f"{kind} parks"] += 1
                    if kind == "pressure":
                        self.counts[f"pressure parks, {self.case.limits.policy}"] += 1
                    self.counts[f"cells: {action.mode} {action.choice.reason}"] += 1
            case events.Finish(request_id):
                stream = self.streams[request_id]
                assert stream.finish is None, f"{request_id} ends twice"
                stream.finish = action
                self.counts[f"ended: {action.reason}"] += 1
                self.counts["recomputed"] += action.usage.recomputed_tokens
                self.counts["cached"] += action.usage.cached_tokens
                self.counts[f"requests parked {_bucket(action.usage.parks)} times"] += 1

    def _reserve(self, action: events.Reserve) -> None:
        lease = self.cache.reserve(action)
        budget_bytes = self.cache.budget_bytes
        fill = self.cache.used_bytes / budget_bytes if budget_bytes else 1.0
        if lease is None:
            self.counts["denials"] += 1
            self._later(events.LeaseDenied(action.ask, "full", fill, budget_bytes), self.case.answer_delay)
        else:
            self._later(events.LeaseGranted(action.ask, lease, fill, budget_bytes), self.case.answer_delay)

    def _took(self) -> float:
        """Seconds of a step or a copy: anything, for the choice between saving and recomputing must hurt nobody."""
        return self._costs.choice([0.0, 0.001, 0.01, 0.01, 0.1])

    def _image_bytes(self, action: events.Save | events.Load) -> int:
        return len(action.blocks) * BLOCK_BYTES + (STATE_BYTES if action.state_slot >= 0 else 0)

    def _later(self, event: Event, delay: int) -> None:
        self._inbox.append((self.tick + self.rng.randint(0, delay), event))

    # events in ------------------------------------------------------------------------------------------------------------
    def _deliver(self) -> None:
        """What is due, in the order in which it was sent. The second half of a copy happens just before its event."""
        due = [event for tick, event in self._inbox if tick <= self.tick]
        self._inbox = [(tick, event) for tick, event in self._inbox if tick > self.tick]
        for event in due:
            match event:
                case events.Saved(request_id, ok, nbytes, seconds):
                    done = self.cache.save_half(self._saves.pop(request_id), self.device, first=False)
                    event = events.Saved(request_id, ok and done, nbytes, seconds)
                case events.Loaded(request_id, ok, nbytes, seconds):
                    done = self.cache.load_half(self._loads.pop(request_id), self.device, first=False)
                    if self.rng.random() < self.case.corrupt_loads:
                        done = False
                        self.counts["corrupt loads"] += 1
                    event = events.Loaded(request_id, ok and done, nbytes, seconds)
            self._handle(event)

    # disturbances ---------------------------------------------------------------------------------------------------------
    def _disturb(self) -> None:
        rng, case = self.rng, self.case
        if rng.random() < case.cache_crashes:
            self._crash_cache()
        if rng.random() < case.worker_crashes:
            self._crash_worker()
        if rng.random() < case.cancels:
            self._cancel_somebody()
        if rng.random() < case.holds and self.scheduler.sequences:
            self._hold_somebody()
        for release in [hold for hold in self._holds if hold[0] <= self.tick]:
            self._holds.remove(release)
            self._handle(events.ResumeRequested(release[1], release[2]))

    def _crash_cache(self) -> None:
        """Leases are gone; answers on their way are lost, but now and then a grant comes too late."""
        self.counts["cache crashes"] += 1
        on_their_way = {action.lease for action in self.scheduler.book.actions if isinstance(action, events.ReleaseLease)}
        self.cache.crash(on_their_way)
        late = []
        for tick, event in self._inbox:
            if not isinstance(event, events.LeaseGranted | events.LeaseDenied):
                late.append((tick, event))
            elif self.rng.random() < 0.3 and (lease := self.cache.reserve(events.Reserve(event.ask, "nobody", 1))):
                late.append((tick + 1, events.LeaseGranted(event.ask, lease)))
        self._inbox = late
        self._handle(events.HostCacheLost())

    def _crash_worker(self) -> None:
        """Its leases die with it; what its streams have not delivered is replayed, in the old order, with what they have."""
        self.counts["worker crashes"] += 1
        for lease in list(self.cache.leases):
            self.cache.release(lease)
        self._boot()
        for stream in self.streams.values():
            if stream.finish is not None:
                continue
            stream.away = False
            stream.replayed = True
            if stream.cancel_asked:  # the router ends those itself
                stream.finish = events.Finish(stream.generate.request_id, "cancelled", _usage_now(stream))
            else:
                self._handle(Submitted(stream.submit()))
        for _, request_id, reason in self._holds:
            self._handle(events.ParkRequested(request_id, reason))

    def _cancel_somebody(self) -> None:
        if self.scheduler.sequences:
            request_id = self.rng.choice(list(self.scheduler.sequences))
            self.streams[request_id].cancel_asked = True
            self.counts[f"cancels while {self.scheduler.sequences[request_id].state.value}"] += 1
            self._handle(events.CancelRequested(request_id))

    def _hold_somebody(self) -> None:
        request_id = self.rng.choice(list(self.scheduler.sequences))
        reason = self.rng.choice(["explicit", "credit"])
        deadline = self.rng.choice([HOLD_TICKS, HOLD_TICKS, 10 * HOLD_TICKS])
        self._holds.append((self.tick + self.rng.randint(1, deadline), request_id, reason))
        self.counts["holds"] += 1
        self._handle(events.ParkRequested(request_id, reason))


def _bucket(parks: int) -> str:
    return "0" if parks == 0 else "1 to 3" if parks < 4 else "4 to 16" if parks < 17 else "more than 16"


def _usage_now(stream: Stream) -> Usage:
    """What the router knows of a stream that it ends itself."""
    prompt_len = len(stream.generate.prompt_token_ids)
    return replace(stream.usage, prompt_tokens=prompt_len, completion_tokens=len(stream.delivered))
