"""The router's shell: sockets in, the ledger's actions out, the clock, status. It decides nothing about requests."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace
from zmq.utils.monitor import recv_monitor_message

from router.actions import Action, ToClient, ToWorker
from router.door import EVENTS, OTHER_DESCRIPTORS, Door
from router.gate import Gate, guest_of, may_say
from router.holds import unknown
from router.hostcache_link import HostCacheLink
from router.keys import NO_LIMITS, KeyLimits
from router.ledger import Ledger
from router.metrics import Metrics
from router.outlet import Outlet
from router.status import status_of
from wire import failpoints, sockets
from wire.codec import Decoder, ProtocolError, bundles, pack, unbundle
from wire.config import ConfigError
from wire.messages import (
    Accepted,
    ClientToRouter,
    Finished,
    Generate,
    GetStatus,
    Park,
    Rejected,
    Resume,
    Submit,
    Tokens,
    WorkerToRouter,
)
from wire.service import file_limit, log, notify, passed_sockets

TICK_S = 0.05
RETRY_S = 0.01  # while some peer is full
PROBE_DELAY_S = 0.02  # after a disconnect: by then the socket knows it too
WATCHDOG_S = 2.0
BATCH = 256  # messages taken in from one socket before the other has its turn
MAX_BAD_FRAMES = 100  # of one client, that answer to no request; from then on nothing it says is read
MAX_QUESTIONS = 1000  # unanswered GetStatus; more are dropped, and asked again
MAX_BAD_PEERS = 1000
_FAILPOINTS = {Accepted: "accept", Submit: "submit", Tokens: "tokens", Finished: "finish"}
_CLIENTS: Decoder[ClientToRouter] = Decoder(ClientToRouter)
_WORKERS: Decoder[WorkerToRouter] = Decoder(WorkerToRouter)


class Server:
    """Owns both ROUTER sockets and the ledger. `run` returns when a drain is done."""

    def __init__(
        self, run_dir: str | Path, max_queued: int, drain_s: float, limits: KeyLimits = NO_LIMITS, gate: Gate | None = None
    ) -> None:
        self.ledger = Ledger(max_queued, lambda: secrets.randbits(63), limits)
        self._gate = gate
        self._run_dir = Path(run_dir)
        self._drain_s = drain_s
        self._metrics = Metrics(self.ledger)
        self._hostcache = HostCacheLink(sockets.hostcache_path(run_dir))
        self._bad = {"client": Counter[bytes](), "worker": Counter[bytes]()}
        self._questions: list[tuple[bytes, GetStatus, str]] = []  # with the name of the guest
        self._asked = asyncio.Event()
        self._turn_due = self._probe_due = self._retry_due = self._closed = False
        self._watchdog_at = 0.0

    def open(self) -> None:
        """Bind the sockets. zmq.ZMQError or ValueError if the run directory does not do."""
        context = zmq.Context.instance()
        self._passed = {f"ipc://{passed.getsockname()}": passed.detach() for passed in passed_sockets()}
        self._clients, self._workers = (
            sockets.router_socket(context, address, self._passed.get(address), handover)
            for address, handover in (
                (sockets.client_address(self._run_dir), False),  # a client must not be able to take another's place
                (sockets.worker_address(self._run_dir), True),
            )
        )
        self._door = Door(file_limit() - OTHER_DESCRIPTORS)
        self._monitors = [self._clients.get_monitor_socket(EVENTS), self._workers.get_monitor_socket(zmq.EVENT_DISCONNECTED)]
        self._to_clients, self._to_workers = Outlet(self._clients), Outlet(self._workers)

    def open_gate(self) -> None:
        """Let clients come in by TCP, too. zmq.ZMQError if the address is not to be had."""
        if self._gate is not None:
            self._gate.open(zmq.Context.instance(), self._clients)

    def read_again(self) -> None:
        """Take the list of clients as it is now."""
        if self._gate is None:
            return
        try:
            self._gate.reload()
        except ConfigError as error:
            log.error("the list of clients from before stays in force: %s", error)
        else:
            log.info("the list of clients was read again: %d keys", len(self._gate))

    async def run(self) -> None:
        """Serve on the open sockets until a drain has ended. Whatever goes wrong in a callback is raised here: a bug ends
        the process, and whoever started it starts it again."""
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self._loop.set_exception_handler(self._failed)
        readers = [(self._clients, self._turn), (self._workers, self._turn), *((m, self._watch) for m in self._monitors)]
        if self._gate is not None:
            readers.append((self._gate.asked, self._gate.answer))
        for socket, callback in readers:
            self._loop.add_reader(socket.getsockopt(zmq.FD), callback)
        self._watch()  # a monitor's FD is silent until the first look finds nothing
        if self._gate is not None:
            self._gate.answer()
        tasks = [asyncio.create_task(self._answer_questions()), asyncio.create_task(self._tick())]
        notify("READY=1\nSTATUS=serving")
        try:
            await asyncio.wait([self._done, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for ended in (task for task in (self._done, *tasks) if task.done()):
                ended.result()
        finally:
            self._closed = True
            for task in tasks:
                task.cancel()
            for socket, _ in readers:
                self._loop.remove_reader(socket.getsockopt(zmq.FD))
            self._close()

    def stop(self) -> None:
        """First: drain. Again: end every stream now."""
        if self._closed:
            return
        now = time.monotonic()
        if not self.ledger.draining:
            log.info("draining: %d requests have %g s to end", len(self.ledger.requests), self._drain_s)
            notify("STOPPING=1\nSTATUS=draining")
            self._act(self.ledger.drain(now, self._drain_s), now)
        else:
            self._act(self.ledger.abort(now), now)
        self._turn_soon()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), Exception):
            self._closed = True  # what it had still to tell is gone, and a word after that would leave a gap in a stream
            if not self._done.done():
                self._done.set_exception(error)

    def _close(self) -> None:
        self._hostcache.close()
        self._door.close()
        if self._gate is not None:
            self._gate.close()
        for socket, monitor, name in zip(
            (self._clients, self._workers), self._monitors, ("client.sock", "worker.sock"), strict=True
        ):
            socket.disable_monitor()  # first: the I/O thread would wait for ever to tell a closed monitor
            monitor.close(linger=0)
            socket.close()  # lingers for what was sent last
            if not self._passed:  # else they are systemd's, and the next life's
                (self._run_dir / name).unlink(missing_ok=True)

    # in ---------------------------------------------------------------------------------------------------------------
    def _turn_soon(self) -> None:
        """Look at the sockets once more. Each send may swallow the edge of a socket's FD, which only tells of changes."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Take in a bounded batch of each socket, in order; again, until a turn finds nothing."""
        self._turn_due = False
        if self._closed:
            return
        now = time.monotonic()
        heard = self._drain_workers(now) + self._drain_clients(now)
        if heard:
            self._turn_soon()
        drained = self.ledger.draining and not self.ledger.requests and not self._to_clients.full
        if drained and not self._done.done():
            self._done.set_result(None)

    def _drain_workers(self, now: float) -> int:
        """All of it first, then what follows from it: the more has piled up, the more goes to each client together."""
        count = 0
        actions: list[Action] = []
        while count < BATCH:
            try:
                identity, *parts = self._workers.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            count += 1
            for message in self._said_by(identity, parts):
                count += 1
                actions += self.ledger.from_worker(identity, message, now)
        self._act(actions, now)
        return count

    def _said_by(self, worker: bytes, parts: list[bytes]) -> Iterator[WorkerToRouter]:
        """The messages of a worker's frame. What is none is counted and passed over."""
        try:
            payloads = unbundle(parts)
        except ProtocolError as error:
            self._bad_message("worker", worker, error)
            return
        for payload in payloads:
            try:
                message = _WORKERS.unpack(payload)
            except ProtocolError as error:
                self._bad_message("worker", worker, error)
            else:
                yield message

    def _drain_clients(self, now: float) -> int:
        for count in range(BATCH):
            try:
                frames = self._clients.recv_multipart(zmq.NOBLOCK, copy=self._gate is None and not self._door.watching)
            except zmq.Again:
                return count
            guest = guest_of(frames) if self._gate is not None else ""
            if self._door.watching:
                self._door.spoke(frames[-1])
            if isinstance(frames[-1], zmq.Frame):
                frames = [frame.bytes for frame in frames]
            identity, *parts = frames
            if self._bad["client"].get(identity, 0) >= MAX_BAD_FRAMES:
                continue
            try:
                message = _CLIENTS.decode(parts)
            except ProtocolError as error:
                self._bad_message("client", identity, error)
                self._refuse(identity, error, parts, now)
                continue
            if isinstance(message, GetStatus):
                if len(self._questions) < MAX_QUESTIONS:
                    self._questions.append((identity, message, guest))
                self._asked.set()
            elif guest and not may_say(identity, message, self.ledger.requests):
                if isinstance(message, Park | Resume):
                    self._to_client(identity, pack(unknown(message)), now)
            else:
                if guest and isinstance(message, Generate):
                    message = replace(message, key=guest)
                self._act(self.ledger.from_client(identity, message, now), now)
        return BATCH

    def _bad_message(self, sender: str, identity: bytes, error: ProtocolError) -> None:
        self.ledger.totals.bad_messages[sender] += 1
        if error.request_id:
            return  # its sender is told; the HTTP adapter is one client for many people
        bad = self._bad[sender]
        if identity not in bad and len(bad) >= MAX_BAD_PEERS:
            del bad[next(iter(bad))]
        bad[identity] += 1
        if bad[identity] in (1, MAX_BAD_FRAMES):
            log.warning("bad message number %d of %s %s: %.200s", bad[identity], sender, identity.hex()[:16], error)

    def _refuse(self, client: bytes, error: ProtocolError, parts: list[bytes], now: float) -> None:
        """Tell who can be told. A living stream of that id is not meant."""
        request_id = error.request_id or _id_in(parts)
        if request_id and request_id not in self.ledger.requests:
            self.ledger.totals.rejected["bad_request"] += 1
            self._to_client(client, pack(Rejected(request_id, "bad_request", str(error)[:500])), now)

    def _watch(self) -> None:
        """Somebody came, or a connection broke: find out whose."""
        for monitor in self._monitors:
            try:
                while True:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)
                    if (monitor is not self._monitors[0] or self._door.heard(event)) and not self._probe_due:
                        self._probe_due = True
                        self._loop.call_later(PROBE_DELAY_S, self._probe)
            except zmq.Again:
                continue

    # out --------------------------------------------------------------------------------------------------------------
    def _act(self, actions: list[Action], now: float) -> None:
        """Do what the ledger wants. A peer that turns out to be gone is an event of its own, handled after the others. What fails
        in the middle is the end of everything: see `_failed`."""
        try:
            while actions and not self._closed:
                if failpoints.armed:
                    for action in actions:
                        if not action.probe and (name := _FAILPOINTS.get(type(action.message))) is not None:
                            failpoints.hit(name)
                lost_workers = self._tell_workers([action for action in actions if isinstance(action, ToWorker)], now)
                lost_clients = self._tell_clients([action for action in actions if isinstance(action, ToClient)], now)
                actions = [
                    *(more for worker in lost_workers for more in self.ledger.worker_lost(worker, now)),
                    *(more for client in lost_clients for more in self.ledger.client_lost(client, now)),
                ]
        except Exception:  # of a task, too, of whose end nobody hears before the next turn
            self._closed = True
            raise
        if (self._to_clients.full or self._to_workers.full) and not self._retry_due:
            self._retry_due = True
            self._loop.call_later(RETRY_S, self._retry)

    def _tell_workers(self, actions: list[ToWorker], now: float) -> set[bytes]:
        """One by one, in order; who cannot be reached."""
        lost = set[bytes]()
        for action in actions:
            if action.worker not in lost and not self._to_workers.send(action.worker, pack(action.message), now, action.probe):
                lost.add(action.worker)
        return lost

    def _tell_clients(self, actions: list[ToClient], now: float) -> set[bytes]:
        """To each together what it gets, in order, then the probes; who cannot be reached."""
        told: dict[bytes, list[bytes]] = {}
        for action in actions:
            if not action.probe:
                told.setdefault(action.client, []).append(action.payload)
        lost = {
            client
            for client, payloads in told.items()
            if not all(self._to_clients.send(client, payload, now) for payload in bundles(payloads))
        }
        for action in actions:
            if action.probe and not self._to_clients.send(action.client, action.payload, now, probe=True):
                lost.add(action.client)
        return lost

    def _retry(self) -> None:
        self._retry_due = False
        if self._closed:
            return
        now = time.monotonic()
        actions = [
            *(action for worker in self._to_workers.retry(now) for action in self.ledger.worker_lost(worker, now)),
            *(action for client in self._to_clients.retry(now) for action in self.ledger.client_lost(client, now)),
        ]
        self._act(actions, now)
        self._turn_soon()

    def _to_client(self, client: bytes, payload: bytes, now: float) -> None:
        if not self._to_clients.send(client, payload, now):
            self._act(self.ledger.client_lost(client, now), now)

    # time -------------------------------------------------------------------------------------------------------------
    def _probe(self) -> None:
        self._probe_due = False
        if self._closed:
            return
        now = time.monotonic()
        self._act(self.ledger.probe(now), now)
        self._turn_soon()

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            self._act(self.ledger.tick(now), now)
            if cut := self._door.look():
                self.ledger.totals.bad_messages["client"] += cut
                log.warning("cut off %d connections of clients: their messages never ended", cut)
            self._turn_soon()
            if now - self._watchdog_at >= WATCHDOG_S:
                self._watchdog_at = now
                notify("WATCHDOG=1")
            await asyncio.sleep(TICK_S)

    async def _answer_questions(self) -> None:
        """Each answer is made after its question has come, from a host cache asked after it, too. Many questions share one."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            questions, self._questions = self._questions, []
            budget = await self._hostcache.budget()
            now = time.monotonic()
            status = status_of(self.ledger, budget, self._metrics.text(budget, now), now)
            for client, question, guest in questions:
                answer = status(question.request_id)
                self._to_client(client, pack(replace(answer, slots=[]) if guest else answer), now)
            self._turn_soon()


def _id_in(parts: list[bytes]) -> str:
    """The request id of a message of another protocol version, if it can be read."""
    if len(parts) != 2:
        return ""
    try:
        return _CLIENTS.unpack(parts[1]).request_id
    except ProtocolError as error:
        return error.request_id
