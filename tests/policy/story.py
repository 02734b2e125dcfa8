"""Story: drives the real scheduler by hand, so that a test reads like what happened."""

from gpu_worker.policy import events
from gpu_worker.policy.events import Action, Plan, Row, RowResult, StepDone, Submitted
from gpu_worker.policy.scheduler import Limits, Scheduler
from gpu_worker.policy.sequence import Sequence
from sim.hostcache import HostCache
from sim.invariants import check, check_report
from sim.watch import Watch
from wire.messages import Generate, Sampling, Submit, Usage

NO_CACHE = HostCache(0, 1)
NO_USAGE = Usage()


class Story:
    """20 blocks of 4 cells, 4 slots, HIGH 18 blocks, LOW 12, drafts that cost nothing, unless told otherwise. `now` is the
    virtual clock in seconds.

    `saves`: "granted" answers each Reserve with a lease and ends each copy at once, "denied" refuses, "by hand" does neither.
    """

    def __init__(self, saves: str = "granted", **limits) -> None:
        pool = {"num_blocks": 20, "block_size": 4, "slots": 4, "max_context": 1000}
        defaults = {**pool, "step_tokens": 64, "draft_cost": (0,)}
        defaults |= {"policy": "watermark", "high": 90, "low": 60, "resume_order": "most-parked"}
        self.scheduler = Scheduler(Limits(**{**defaults, **limits}))
        self.watch = Watch(self.scheduler)
        self.saves = saves
        self.now = 0.0
        self.log: list[Action] = []
        self.plans: list[Plan] = []
        self._arrival = 0
        self._lease = 100

    # in -------------------------------------------------------------------------------------------------------------------
    def submit(self, name: str, prompt: int | list[int], delivered=(), arrival=None, usage=NO_USAGE, **generate) -> None:
        """`prompt`: tokens, or as many tokens as nobody else has."""
        self._arrival += 1
        if isinstance(prompt, int):
            prompt = [self._arrival * 1000 + index for index in range(prompt)]
        request = Generate(name, prompt, sampling=Sampling(seed=1), **generate)
        self.handle(Submitted(Submit(request, self._arrival if arrival is None else arrival, list(delivered), usage)))

    def handle(self, event: events.Event) -> None:
        self.scheduler.handle(event, self.now)
        check(self.scheduler, NO_CACHE)
        check_report(self.scheduler)

    def cancel(self, name: str) -> None:
        self.handle(events.CancelRequested(name))

    def park(self, name: str, reason: str = "explicit") -> None:
        self.handle(events.ParkRequested(name, reason))

    def resume(self, name: str, reason: str = "explicit") -> None:
        self.handle(events.ResumeRequested(name, reason))

    # steps ----------------------------------------------------------------------------------------------------------------
    def plan(self) -> Plan:
        """Plan; note the actions; answer the host cache's part unless that is done by hand."""
        plan = self.scheduler.plan(self.now)
        check(self.scheduler, NO_CACHE)
        self.plans.append(plan)
        self.log += plan.actions
        for action in plan.actions:
            self._answer(action)
        return plan

    def _answer(self, action: Action) -> None:
        match action:
            case events.Reserve(ask) if self.saves == "granted":
                self._lease += 1
                self.handle(events.LeaseGranted(ask, self._lease))
            case events.Reserve(ask) if self.saves == "denied":
                self.handle(events.LeaseDenied(ask, "full"))
            case events.Save(request_id) if self.saves == "granted":
                self.handle(events.Saved(request_id, True))
            case events.Load(request_id) if self.saves == "granted":
                self.handle(events.Loaded(request_id, True))

    def step(self, tokens: dict[str, list[int]] | None = None) -> Plan:
        """Plan and run one step. Each sampling row draws 7 and refuses its drafts, unless `tokens` says what it yields."""
        plan = self.plan()
        if plan.rows:
            self.handle(StepDone([self.result(row, tokens or {}) for row in plan.rows], plan.epoch))
        return plan

    def result(self, row: Row, tokens: dict[str, list[int]]) -> RowResult:
        """What a row yields, if `tokens` does not say otherwise."""
        return RowResult(row.request_id, tokens.get(row.request_id, [7]) if row.samples else [])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def until(self, done, most: int = 500) -> None:
        """Step until `done()`; a story that never gets there fails."""
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError("it never came to that")

    # what can be seen -----------------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Sequence:
        return self.scheduler.sequences[name]

    def state(self, name: str) -> str:
        return self[name].state.value if name in self.scheduler.sequences else "gone"

    def states(self, *names: str) -> list[str]:
        return [self.state(name) for name in names]

    @property
    def said(self) -> dict[str, list[int]]:
        """The text of each stream, by offset."""
        texts: dict[str, list[int]] = {}
        for emit in self.actions(events.Emit):
            texts.setdefault(emit.request_id, [])[emit.offset :] = emit.tokens
        return texts

    @property
    def used(self) -> int:
        return self.scheduler.book.pool.used

    def actions(self, kind: type, name: str | None = None) -> list:
        """All actions of this kind so far, those of the coming plan too; of this request if named."""
        return [
            a for a in [*self.log, *self.scheduler.book.actions] if isinstance(a, kind) and (name is None or a.request_id == name)
        ]

    def ending(self, name: str) -> events.Finish:
        """Its one last word."""
        (finish,) = self.actions(events.Finish, name)
        return finish

    def parked(self, kind: str | None = None) -> list[str]:
        """Who has been told of a park, in order."""
        return [a.request_id for a in self.actions(events.Notify) if a.event == "parked" and kind in (None, a.kind)]

    def resumed(self) -> list[str]:
        return [a.request_id for a in self.actions(events.Notify) if a.event == "resumed"]

    def row(self, plan: Plan, name: str) -> Row | None:
        return next((row for row in plan.rows if row.request_id == name), None)
