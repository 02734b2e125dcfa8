"""The ledger: every request, its tokens, the queue, and who may have what next. PURE: events in, actions out.

Each public method is one event; it returns what is to be done, in order. `now` is a monotonic time in seconds.
"""

from collections.abc import Callable

from msgspec.structs import replace

from router.actions import Action, ToWorker
from router.admission import refusal, too_long, unwanted
from router.delivery import Delivery
from router.fleet import Fleet, Worker
from router.holds import Holds
from router.keys import NO_LIMITS, KeyLimits, Keys
from router.queue import Queue
from router.request import Request
from router.totals import Totals
from wire import messages

PING_S = 0.25
CREDIT_PARK_S = 2.0  # without credit: the stream is parked
CREDIT_LOST_S = 60.0  # without credit: it ends
MAX_REPLAYS = 8  # without a new token in between
STALL_S = 1.0  # a tick that comes so late means that we stood still, not the others

OfStream = messages.Tokens | messages.Notice | messages.Finished


class Ledger:
    """One queue, one entry for each request, one exit for each: `_end`. `draw_seed` returns a random 63-bit number."""

    def __init__(self, max_queued: int, draw_seed: Callable[[], int], limits: KeyLimits = NO_LIMITS) -> None:
        self.max_queued = max_queued
        self.fleet = Fleet()
        self.totals = Totals()
        self.requests: dict[str, Request] = {}
        self.draining = False
        self._draw_seed = draw_seed
        self._out: list[Action] = []
        self._queue = Queue()
        self._delivery = Delivery(self._out)
        self._holds = Holds(self.requests, self.fleet, self._out)
        self._keys = Keys(limits, self.requests, self.fleet, self._out)
        self._arrivals = 0
        self._drain_until = 0.0
        self._pinged_at = self._ticked_at = float("-inf")

    # state ------------------------------------------------------------------------------------------------------------
    @property
    def queued(self) -> int:
        """Requests that wait for a step, here or in a worker, and are not parked."""
        return sum(request.parked_at is None for request in self._queue) + self.fleet.waiting

    @property
    def parked(self) -> int:
        return sum(request.parked_at is not None for request in self.requests.values())

    # events -----------------------------------------------------------------------------------------------------------
    def from_client(self, client: bytes, message: messages.ClientToRouter, now: float) -> list[Action]:
        """What a client says. GetStatus is answered by the shell."""
        match message:
            case messages.Generate():
                self._generate(client, message, now)
            case messages.Credit(request_id, consumed_bytes):
                request = self.requests.get(request_id)
                if request is not None and request.client == client and self._delivery.credit(request, consumed_bytes, now):
                    self._credited(request, now)
            case messages.Cancel(request_id):
                if (request := self.requests.get(request_id)) is not None:
                    self._cancel(request, now)
            case messages.Park() | messages.Resume():
                self._holds.heard(client, message, now)
                self._dispatch(now)
        return self._take()

    def from_worker(self, identity: bytes, message: messages.WorkerToRouter, now: float) -> list[Action]:
        """What a worker says. A former life, a lost worker and a request that is not its own change nothing."""
        worker = self.fleet.workers.get(identity)
        match message:
            case messages.Tokens() | messages.Notice() | messages.Finished() if worker is not None:  # first: they are the most
                request = worker.assigned.get(message.request_id)
                if request is not None:
                    self._of_stream(worker, request, message, now)
                elif isinstance(message, messages.Finished) and worker.stale.pop(message.request_id, None) is not None:
                    self._dispatch(now)
            case messages.Hello():
                self._hello(identity, message, now)
            case messages.Load() if worker is not None:
                self._load(worker, message, now)
            case messages.Goodbye() if worker is not None:
                self._end_life(worker, now)
                self._dispatch(now)
        return self._take()

    def client_lost(self, client: bytes, now: float) -> list[Action]:
        """The client cannot be reached: nobody waits for its streams any more."""
        for request in self._delivery.of_client(client):
            self.totals.finished["client_lost"] += 1
            self._remove(request, now)
        self._dispatch(now)
        return self._take()

    def worker_lost(self, identity: bytes, now: float) -> list[Action]:
        """The worker cannot be reached."""
        worker = self.fleet.workers.get(identity)
        if worker is not None and not worker.lost:
            self._lose(worker, now)
            self._dispatch(now)
        return self._take()

    def drain(self, now: float, drain_s: float) -> list[Action]:
        """Accept nothing new. What was accepted, queued requests too, has `drain_s` to end by itself."""
        if not self.draining:
            self.draining, self._drain_until = True, now + drain_s
            self._holds.close()
            self._dispatch(now)
        return self._take()

    def abort(self, now: float) -> list[Action]:
        """End every stream now."""
        self.draining = True
        self._end_all("the server was stopped before the stream ended", now)
        return self._take()

    def probe(self, now: float) -> list[Action]:
        """A connection broke and nobody says whose: say something to everybody, so that sends to the gone ones fail."""
        self._ping(now)
        self._delivery.probe_all(now)
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """Everything that is a matter of time. Call it some times a second."""
        stall_s = now - self._ticked_at
        self._ticked_at = now
        if STALL_S < stall_s < float("inf"):
            self.fleet.forgive(stall_s)
            self._delivery.forgive(stall_s)
        if now - self._pinged_at >= PING_S:
            self._ping(now)
        for worker in list(self.fleet.workers.values()):
            if not worker.lost and not worker.is_alive(now):
                self._lose(worker, now)
        for request in list(self._delivery.blocked.values()):
            self._check_credit(request, now)
        for request in self._holds.overdue(now):
            self._holds.release(request)
        self._delivery.probe_quiet(now)
        self._queue.age(now, self.requests.values())
        if self.draining and now >= self._drain_until:
            self._end_all("the server is stopping and the stream took too long", now)
        self._dispatch(now)
        return self._take()

    # requests ---------------------------------------------------------------------------------------------------------
    def _generate(self, client: bytes, generate: messages.Generate, now: float) -> None:
        if (rejected := self._refused(generate, now)) is not None:
            self.totals.rejected[rejected.code] += 1
            self._delivery.reject(client, rejected)
            return
        if generate.sampling.seed is None:
            generate = replace(generate, sampling=replace(generate.sampling, seed=self._draw_seed()))
        self._arrivals += 1
        request = Request(generate, client, self._arrivals, now)
        self.requests[request.request_id] = request
        self._delivery.add(request)
        self.totals.accepted += 1
        self.totals.prompt_tokens += request.prompt_tokens
        self._delivery.send(request, messages.Accepted(request.request_id, generate.sampling.seed), now)
        self._queue.add(request)
        self._dispatch(now)

    def _refused(self, generate: messages.Generate, now: float) -> messages.Rejected | None:
        may_start = not self._queue.has_before(generate.priority) and bool(self.fleet.takers(generate.priority, now))
        never = unwanted(generate, self.requests, self.draining)
        return never or refusal(generate, self.fleet, self._queue, self.max_queued, self._keys, may_start)

    def _cancel(self, request: Request, now: float) -> None:
        """The worker's Finished ends it, so that usage is true; without a worker we end it."""
        if request.worker is None:
            self._end_with(request, "cancelled", now)
        elif not request.cancelled:
            request.cancelled = True
            self._to_worker(request, messages.Cancel(request.request_id))

    def _end_with(self, request: Request, reason: str, now: float, error: str = "", code: str = "") -> None:
        """End it by our own word, wherever it is."""
        self._leave_worker(request, now)
        usage = replace(request.usage, completion_tokens=len(request.tokens))
        self._end(request, messages.Finished(request.request_id, reason, usage, error, code), now, at_once=True)

    def _end(self, request: Request, finished: messages.Finished, now: float, at_once: bool) -> None:
        """The last word; if not `at_once`, behind the tokens that still wait for credit."""
        self._queue.discard(request)
        if request.parked_at is not None:
            self.totals.parked_s.observe(now - request.parked_at)
            request.parked_at = None
        request.finished = finished
        self._holds.ended(request)
        if self._delivery.flush(request, now) or at_once:
            self._send_last(request, now)

    def _send_last(self, request: Request, now: float) -> None:
        finished = request.finished
        assert finished is not None
        self.totals.finished[finished.reason] += 1
        self._delivery.send(request, finished, now)
        self._remove(request, now)

    def _remove(self, request: Request, now: float) -> None:
        """Out of every book."""
        self._queue.discard(request)
        self._holds.ended(request)
        self._leave_worker(request, now)
        self._delivery.remove(request)
        del self.requests[request.request_id]

    def _end_all(self, why: str, now: float) -> None:
        for request in list(self.requests.values()):
            self._end_with(request, "error", now, why, "drain_timeout")

    # streams ----------------------------------------------------------------------------------------------------------
    def _of_stream(self, worker: Worker, request: Request, message: OfStream, now: float) -> None:
        request.begun = True
        match message:
            case messages.Tokens():
                new = request.append(message)
                if new < 0:  # something was lost on the way, or the worker is wrong
                    self._take_away(request, now)
                    return
                if new:
                    self.totals.tokens(new, now - (request.token_at or request.arrived_at), first=request.token_at is None)
                    request.token_at = now
                    request.replays = 0
                self._delivery.flush(request, now)
            case messages.Notice(event=event, kind=kind, parked_ms=parked_ms, usage=usage):
                request.usage = usage
                if event == "parked":
                    request.parked_at = now
                    request.park_kind = kind
                    self._holds.left_batch(request)
                else:
                    request.parked_at = None
                    self.totals.parked_s.observe(parked_ms / 1000)
                if request.has_credit:  # the totals are told again by the next one and by Finished
                    self._delivery.send(request, message, now)
                self._dispatch(now)
            case messages.Finished(reason=reason, usage=usage):
                worker.drop(request)
                took_us_for_gone = reason == "cancelled" and not request.cancelled
                lost_tokens = reason in ("stop", "length") and usage.completion_tokens > len(request.tokens)
                if took_us_for_gone or lost_tokens:
                    self._replay(request, now)
                else:
                    request.usage = usage
                    if request.cancelled and not self._delivery.flush(request, now):
                        # it had ended before it heard of the cancel; who has cancelled gives no credit for the rest
                        message = messages.Finished(request.request_id, "cancelled", usage)
                    self._end(request, message, now, at_once=message.reason == "cancelled")
                self._dispatch(now)

    def _credited(self, request: Request, now: float) -> None:
        if self._delivery.flush(request, now) and request.finished is not None:
            self._send_last(request, now)
        elif request.credit_held and request.has_credit:
            request.credit_held = False
            self._to_worker(request, messages.Resume(request.request_id, "credit"))
            self._dispatch(now)

    def _check_credit(self, request: Request, now: float) -> None:
        assert request.blocked_at is not None
        if now - request.blocked_at >= CREDIT_LOST_S:
            self._end_with(request, "error", now, f"the client took in nothing for {CREDIT_LOST_S:.0f} s", "slow_client")
        elif now - request.blocked_at >= CREDIT_PARK_S and not request.credit_held:
            request.credit_held = True
            self._to_worker(request, messages.Park(request.request_id, "credit"))

    # queue ------------------------------------------------------------------------------------------------------------
    def _dispatch(self, now: float) -> None:
        """Hand out the queue, in order, as far as there are seats. Who fits nobody with a seat lets the others pass."""
        self._keys.share()
        takers: list[Worker] = []
        rank = None
        for request in self._queue:
            if request.is_paused:
                continue
            if request.rank != rank:
                rank = request.rank
                takers = self.fleet.takers(rank, now)
            if not takers and not request.started:
                break  # who comes behind it is of no better class
            worker = self.fleet.choose(request, takers)
            if worker is not None:
                self._submit(worker, request, now)
                takers = self.fleet.takers(rank, now)
            elif request.is_suspect:
                break  # it needs a worker alone; who passed it would keep them all busy

    def _submit(self, worker: Worker, request: Request, now: float) -> None:
        self._queue.discard(request)
        request.started = True
        worker.take(request)
        if request.parked_at is not None:  # its worker was lost meanwhile
            notice = request.resume_elsewhere(now)
            self.totals.parked_s.observe(notice.parked_ms / 1000)
            self._delivery.send(request, notice, now)
        self._to_worker(request, messages.Submit(request.generate, request.arrival, request.tokens[:], request.usage))

    # workers ----------------------------------------------------------------------------------------------------------
    def _hello(self, identity: bytes, hello: messages.Hello, now: float) -> None:
        worker = self.fleet.hello(identity, hello, now)
        if worker is None:
            return
        if (former := self.fleet.former_life(worker)) is not None:
            self._end_life(former, now)
        if worker.lost:
            self._return(worker, now)
        self._refuse_too_long(now)
        self._dispatch(now)

    def _refuse_too_long(self, now: float) -> None:
        """Those that were accepted while nobody knew the limit."""
        for request in self._queue:
            if why := too_long(request.prompt_tokens, self.fleet.context_limit()):
                self._end_with(request, "error", now, why, "context_length_exceeded")

    def _load(self, worker: Worker, load: messages.Load, now: float) -> None:
        self.totals.heard(worker.identity, load.counters)
        if worker.lost:
            self._return(worker, now)
        for request_id in worker.heard(load, now):
            worker.stale[request_id] = now
            self._out.append(ToWorker(worker.identity, messages.Cancel(request_id)))
        for request in worker.vanished(now):
            self._take_away(request, now)
        self._dispatch(now)

    def _return(self, worker: Worker, now: float) -> None:
        """A worker that was given up speaks again; what it still runs is no longer its."""
        worker.lost = False
        for request_id in worker.stale:
            worker.stale[request_id] = now
            self._out.append(ToWorker(worker.identity, messages.Cancel(request_id)))

    def _lose(self, worker: Worker, now: float) -> None:
        """Its requests go to the front of the queue, with what they have."""
        self.totals.workers_lost += not worker.lost
        worker.lost = True
        for request in list(worker.assigned.values()):
            worker.drop(request)
            worker.stale[request.request_id] = now
            self._replay(request, now)

    def _end_life(self, worker: Worker, now: float) -> None:
        self._lose(worker, now)
        self.totals.ended(worker.identity)
        self.fleet.forget(worker)

    def _take_away(self, request: Request, now: float) -> None:
        """The worker's idea of this request is not ours: start again from what we have."""
        self._leave_worker(request, now)
        self._replay(request, now)
        self._dispatch(now)

    def _leave_worker(self, request: Request, now: float) -> None:
        """Whatever the worker still says about it is void, until its Finished."""
        worker = self.fleet.worker_of(request)
        if worker is None:
            return
        if not request.cancelled:
            self._to_worker(request, messages.Cancel(request.request_id))
        worker.drop(request)
        worker.stale[request.request_id] = now

    def _replay(self, request: Request, now: float) -> None:
        self.totals.replays += 1
        request.replays += 1
        if request.cancelled:
            self._end_with(request, "cancelled", now)
        elif request.replays > MAX_REPLAYS:
            why = f"its worker was lost {request.replays} times without a new token"
            self._end_with(request, "error", now, why, "worker_lost")
        else:
            self._queue.add(request)
            self._holds.left_batch(request)

    def _ping(self, now: float) -> None:
        self._pinged_at = now
        self._out += [ToWorker(identity, messages.Ping(), probe=True) for identity in self.fleet.workers]

    def _to_worker(self, request: Request, message: messages.RouterToWorker) -> None:
        if request.worker is not None:
            self._out.append(ToWorker(request.worker, message))

    def _take(self) -> list[Action]:
        out = self._out[:]
        self._out.clear()  # the list itself is shared with the delivery
        return out
