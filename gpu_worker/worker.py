"""The worker's loop: messages in, a plan, its actions, one step, a bounded piece of copying. It decides nothing."""

import time

import zmq
from msgspec.structs import replace

from gpu_worker.engine import StepRunner
from gpu_worker.parking import Parking
from gpu_worker.policy import events
from gpu_worker.policy.scheduler import Scheduler
from wire import failpoints, messages
from wire.codec import Decoder, ProtocolError, bundles, pack
from wire.service import log, notify

COPY_BYTES_PER_STEP = 4 << 20  # about 1 ms with its checksum: what neighbours wait for a park or a resume
COPY_BYTES_IDLE = 64 << 20  # when no row runs; still bounded, so that messages are heard
HEARTBEAT_S = 0.2
ROUTER_SILENT_S = 10.0  # the router pings four times a second; after this long its requests are orphans
HELLO_AGAIN_S = 1.0
WATCHDOG_S = 2.0
_DECODER: Decoder[messages.RouterToWorker] = Decoder(messages.RouterToWorker)


def told(choice: events.Choice) -> str:
    """The choice of a park for the log: cells, mode and reason, and the numbers it was decided on."""
    text = f"{choice.cells} cells, {choice.mode}, {choice.reason}"
    if not choice.copy_s:
        return text
    worth = f", worth {choice.worth / choice.price:.2f} of the price" if choice.price else ""
    return (
        f"{text}: {choice.nbytes / 2**20:.1f} MiB, copies {choice.copy_s * 1000:.1f} ms, "
        f"computing {choice.recompute_s * 1000:.1f} ms, stays {choice.stay_s:.2f} s, budget {choice.fill:.0%} full{worth}"
    )


class Worker:
    """Owns the scheduler, the runner, the socket to the router and the parking of one device."""

    def __init__(
        self, hello: messages.Hello, socket: zmq.Socket, scheduler: Scheduler, runner: StepRunner, parking: Parking
    ) -> None:
        self.hello = hello
        self.socket = socket
        self.scheduler = scheduler
        self.runner = runner
        self.parking = parking
        self.step = 0
        self.draining = False
        self.stopping = False  # set by SIGTERM
        self._loaded_at = 0.0
        self._heard_at = time.monotonic()
        self._hello_at = 0.0
        self._watchdog_at = 0.0

    def run(self) -> None:
        """Until SIGTERM, or until drained. Says Goodbye at the end, so that the router need not find out. However it ends, the
        parking and the socket are closed."""
        try:
            self._serve()
        finally:
            self.parking.close()
            self.socket.close()

    def _serve(self) -> None:
        self._say_hello(time.monotonic())
        wait_s: float | None = 0.0
        while not self.stopping and not (self.draining and self.scheduler.idle):
            self._receive(wait_s)
            now = time.monotonic()
            plan = self.scheduler.plan(now)
            self._act(plan.actions, now)
            if plan.rows:
                self.step += 1
                if failpoints.armed:
                    failpoints.hit("prefill" if any(row.count > 1 for row in plan.rows) else "decode")
                started = time.monotonic()
                done = self.runner.step(plan)
                self._handle(replace(done, seconds=time.monotonic() - started))
            if self.parking.copying:
                for event in self.parking.copy(COPY_BYTES_PER_STEP if plan.rows else COPY_BYTES_IDLE):
                    self._handle(event)
            now = time.monotonic()
            self._tend(now)
            copying = self.parking.copying and not self.parking.waiting
            wait_s = 0.0 if plan.rows or plan.actions or copying else self._wait_s(now)
        self._act(self.scheduler.plan(time.monotonic()).actions, time.monotonic())
        self._send(messages.Goodbye("drained" if self.draining else "stopped"))

    # in -------------------------------------------------------------------------------------------------------------------
    def _receive(self, wait_s: float | None) -> None:
        """Hand everything that has arrived to the scheduler; wait up to `wait_s` for the first of it."""
        if wait_s:
            poller = zmq.Poller()
            poller.register(self.socket, zmq.POLLIN)
            if (fd := self.parking.fileno()) is not None:
                poller.register(fd, zmq.POLLIN)
            poller.poll(wait_s * 1000)
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._hear(parts)
        for event in self.parking.poll(time.monotonic()):
            self._handle(event)

    def _hear(self, parts: list[bytes]) -> None:
        try:
            message = _DECODER.decode(parts)
        except ProtocolError as error:
            log.warning("dropped a message of the router: %s", error)
            return
        self._heard_at = time.monotonic()
        match message:
            case messages.Submit():
                failpoints.hit("admit")
                self._handle(events.Submitted(message))
            case messages.Cancel(request_id):
                self._handle(events.CancelRequested(request_id))
            case messages.Park(request_id, reason):
                self._handle(events.ParkRequested(request_id, reason))
            case messages.Resume(request_id, reason):
                self._handle(events.ResumeRequested(request_id, reason))
            case messages.Ping():
                self._send(self._load(self._heard_at))
            case messages.Drain():
                self.draining = True

    def _handle(self, event: events.Event) -> None:
        self.scheduler.handle(event, time.monotonic())

    # out ------------------------------------------------------------------------------------------------------------------
    def _act(self, actions: list[events.Action], now: float) -> None:
        """Parking first, then a Load, then the streams: who sees a stream's end also sees the state after it."""
        for action in actions:
            if isinstance(action, events.Reserve | events.Save | events.Load | events.ReleaseLease):
                self.parking.act(action, now)
        news: list[messages.Message] = []
        if any(isinstance(action, events.Finish | events.Notify) for action in actions):
            news.append(self._load(now))
        for action in actions:
            match action:
                case events.Emit(request_id, offset, tokens, logprobs, prompt_offset, prompt_logprobs):
                    news.append(messages.Tokens(request_id, offset, tokens, logprobs, prompt_offset, prompt_logprobs))
                case events.Notify(request_id, event, kind, mode, parked_ms, usage, choice):
                    reason = choice.reason if choice is not None else ""
                    news.append(messages.Notice(request_id, event, kind, mode, parked_ms, usage, reason))
                    if choice is not None:
                        log.info("parked %s (%s): %s", request_id, kind, told(choice))
                    elif event == "resumed":
                        log.info("resumed %s after %d ms: %s", request_id, parked_ms, mode)
                case events.Finish(request_id, reason, usage, error, code):
                    failpoints.hit("finishing")
                    news.append(messages.Finished(request_id, reason, usage, error, code))
        self._send(*news)
        if failpoints.armed:
            for action in actions:
                if isinstance(action, events.Notify) and action.choice is not None:
                    failpoints.hit("parked")

    def _send(self, *news: messages.Message) -> None:
        """To the router, together. A full pipe means that it has been stuck or gone for some hundred steps: waiting a little lets
        fewer be lost, and what is lost is asked for again from its ledger. What a pipe holds is bounded by ROUTER_SILENT_S: who
        hears nothing for so long ends everything that runs."""
        for payload in bundles(map(pack, news)):
            try:
                self.socket.send_multipart((messages.PROTOCOL, payload), zmq.NOBLOCK)
            except zmq.Again:
                if self.socket.poll(1000, zmq.POLLOUT):
                    self.socket.send_multipart((messages.PROTOCOL, payload), zmq.NOBLOCK)
                else:
                    log.warning("the router takes nothing; dropped %d bytes of messages", len(payload))

    def _load(self, now: float) -> messages.Load:
        """The newest picture, which is about to be sent."""
        self._loaded_at = now
        load = self.scheduler.load()
        counters = replace(load.counters, damaged=self.parking.damaged)
        return messages.Load(
            self.step, load.cells, load.waiting, load.running, load.parked, load.slots, counters, self.parking.connected
        )

    def _say_hello(self, now: float) -> None:
        self._hello_at = now
        self._send(self.hello, self._load(now))

    # time -----------------------------------------------------------------------------------------------------------------
    def _tend(self, now: float) -> None:
        """Heartbeat, watchdog, and the router's silence."""
        if now - self._loaded_at >= HEARTBEAT_S and not self.scheduler.idle:
            self._send(self._load(now))
        if now - self._watchdog_at >= WATCHDOG_S:
            self._watchdog_at = now
            notify("WATCHDOG=1")
        silent_s = now - self._heard_at
        if silent_s >= HELLO_AGAIN_S and self.socket.poll(0):
            return  # a long step: what the router said meanwhile is still to be read
        if silent_s >= HELLO_AGAIN_S and now - self._hello_at >= HELLO_AGAIN_S:
            self._say_hello(now)  # a restarted router does not know us
        if silent_s >= ROUTER_SILENT_S and not self.scheduler.idle:
            count = len(self.scheduler.sequences)
            log.warning("nothing heard from the router for %.0f s; ending its %d sequences", silent_s, count)
            for request_id in list(self.scheduler.sequences):
                self._handle(events.CancelRequested(request_id))
            self._heard_at = now

    def _wait_s(self, now: float) -> float:
        """Until the nearest deadline of anybody."""
        waits = [HEARTBEAT_S, self.scheduler.wait_s(now), self.parking.wait_s(now)]
        return max(0.001, min(wait for wait in waits if wait is not None))
