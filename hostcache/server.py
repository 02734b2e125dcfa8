"""The host cache's shell: one Unix socket, one arena, one loop. The budget decides; here messages and memory move.

Whoever connects is a worker once it says Attach, and an observer (the router) otherwise.
"""

import errno
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from hostcache import store
from hostcache.budget import SLAB_BYTES, Action, Budget, Close, Punch, Send
from wire import arena, failpoints
from wire.codec import Decoder, ProtocolError, pack
from wire.config import ConfigError
from wire.memory import RESERVE_BYTES, available_bytes
from wire.messages import Attach, Attached, Commit, GetBudget, Granted, Message, Release, Reserve, ToHostCache
from wire.service import notify
from wire.sockets import check_path

MAX_PEERS = 256
MAX_OUTBOX = 1024  # messages for a peer that does not read, beside what its socket holds; then it is cut off
DEAF_S = 0.5  # without a free descriptor nobody is let in for so long
MAX_TURN = 1024  # datagrams read from one peer in a turn: more than its socket holds

_FAILPOINTS: dict[type[Message], str] = {Reserve: "reserve", Commit: "commit", Release: "release", Granted: "grant"}

log = logging.getLogger("parkade")


@dataclass
class Peer:
    """One connection."""

    number: int
    sock: socket.socket
    name: str = "observer"
    outbox: deque[tuple[bytes, int | None]] = field(default_factory=deque)


def open_arena(budget_bytes: int) -> tuple[int, int, bool, list[int]]:
    """(descriptor, generation, whether it outlives this process, slabs in memory) of the kept arena or a new one."""
    kept = store.kept_arena(os.environ, budget_bytes)
    if kept:
        fd, generation = kept
        slab_bytes = min(SLAB_BYTES, budget_bytes)
        slabs = arena.written(fd, budget_bytes, slab_bytes)
        for start in range(0, budget_bytes, slab_bytes or 1):
            if start // slab_bytes not in slabs:  # it may have been taken, but no image can be in it
                arena.give_back(fd, start, min(slab_bytes, budget_bytes - start))
        log.info("arena of generation %d is back with %d slabs in memory", generation, len(slabs))
        return fd, generation, True, slabs
    fd, generation = arena.create(budget_bytes), int.from_bytes(os.urandom(6)) + 1
    stored = store.available(os.environ)
    if stored:
        try:
            store.keep(os.environ, fd, generation)
        except OSError as error:
            log.warning("the arena is not kept through a restart: %s", error)
            stored = False
    return fd, generation, stored, []


def listen(path: str) -> socket.socket:
    """The bound socket. A dead server's leftover is removed; a living one's, or a path too long, is a ConfigError."""
    check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            code = probe.connect_ex(path)
        if code in (0, errno.EAGAIN):
            raise ConfigError(f"--run-dir: a host cache is running on {path}")
        Path(path).unlink(missing_ok=True)
    umask = os.umask(0o177)
    try:
        sock.bind(path)
    except OSError as error:
        raise ConfigError(f"--run-dir: {path}: {error.strerror}") from None
    finally:
        os.umask(umask)
    sock.listen(MAX_PEERS)
    return sock


class Server:
    """Owns the socket, its peers, the arena's descriptor and the budget."""

    def __init__(self, listener: socket.socket, arena_fd: int, generation: int, stored: bool, resident: list[int]) -> None:
        """`arena_fd`: an arena whose size is the budget; `resident`: its slabs that are in memory from a former life."""
        self.listener = listener
        self.arena_fd = arena_fd
        budget_bytes = os.fstat(arena_fd).st_size
        self.budget = Budget(budget_bytes, generation, self._take, stored=stored, resident=resident, now=time.monotonic())
        self.peers: dict[int, Peer] = {}
        self.stopping = False
        self._decoder: Decoder[ToHostCache] = Decoder(ToHostCache)
        self._askers: list[Peer] = []
        self._next_peer = 1
        self._deaf_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serve until `stop` or SIGTERM. Wakes for messages and for the budget's next deadline only."""
        wake, wakeup = socket.socketpair()
        for end in (wake, wakeup):
            end.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(wakeup.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        watchdog_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 3e6  # systemd wants a sign of life; 0: nobody does
        while not self.stopping:
            now = time.monotonic()
            deaf_s = None if self._deaf_until is None else max(0.0, self._deaf_until - now)
            waits = [s for s in (self.budget.wait_s(now), watchdog_s or None, deaf_s) if s is not None]
            self._turn(self._selector.select(min(waits, default=None)))
            if watchdog_s:
                notify("WATCHDOG=1")
        if not self.budget.workers:  # a kept arena has nobody's images: systemd shall keep it empty
            self._act([Punch(number) for number, slab in enumerate(self.budget.slabs) if slab.resident])
        for peer in list(self.peers.values()):
            peer.sock.close()
        self.listener.close()
        signal.set_wakeup_fd(-1)  # a second signal must not write to a socket that is gone

    def _stop(self, number: int, _frame: object) -> None:
        self.stopping = True

    def _turn(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, events in ready:
            if key.fileobj is self.listener:
                self._accept()
            elif isinstance(key.data, Peer) and key.data.number in self.peers:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
        if self._deaf_until is not None and time.monotonic() >= self._deaf_until:
            self._deaf_until = None
            self._selector.register(self.listener, selectors.EVENT_READ, None)
        if self._askers:
            self._answer()
        self._act(self.budget.tick(time.monotonic()))

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it would be ready again at once, for ever
                self._selector.unregister(self.listener)
                self._deaf_until = time.monotonic() + DEAF_S
            return  # else gone before it was taken
        sock.setblocking(False)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid() or len(self.peers) >= MAX_PEERS:
            log.warning("refused a connection: %s", f"uid {uid}" if uid != os.getuid() else f"{MAX_PEERS} are open")
            sock.close()
            return
        peer = self.peers[self._next_peer] = Peer(self._next_peer, sock)
        self._next_peer += 1
        self._selector.register(sock, selectors.EVENT_READ, peer)

    # reading ----------------------------------------------------------------------------------------------------------
    def _read(self, peer: Peer) -> None:
        """Handle what `peer` has sent, up to MAX_TURN datagrams."""
        for _ in range(MAX_TURN):
            if peer.number not in self.peers:
                return
            try:
                payload, _fd = arena.receive(peer.sock)
                message = self._decoder.unpack(payload) if payload else None
            except BlockingIOError:
                return
            except OSError as error:
                return self._close(peer, error.strerror or "lost")
            except (ProtocolError, ValueError) as error:
                return self._close(peer, f"bad datagram: {error}")
            if message is None:
                return self._close(peer, "")
            if isinstance(message, GetBudget):
                self._askers.append(peer)
                continue
            if isinstance(message, Attach):
                peer.name = message.worker[:64]
            if failpoints.armed:
                self._pass(message)
            self._act(self.budget.handle(peer.number, message, time.monotonic()))

    def _answer(self) -> None:
        """Tell the figures, after all that workers had sent when they were asked for: never older than a Release already sent."""
        for number in list(self.budget.workers):
            if peer := self.peers.get(number):
                self._read(peer)
        figures = self.budget.figures()
        askers, self._askers = self._askers, []
        for peer in askers:
            self._send(peer, figures)

    # acting -----------------------------------------------------------------------------------------------------------
    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer=number, message=message):
                    if peer := self.peers.get(number):
                        self._send(peer, message)
                case Punch(slab=slab):
                    arena.give_back(self.arena_fd, *self._range(slab))
                case Close(peer=number, reason=reason):
                    if peer := self.peers.get(number):
                        self._close(peer, reason)

    def _take(self, slab: int) -> None:
        """Make a slab resident; OSError if the machine has no memory for it (taking it anyway would wake the OOM killer)."""
        start, nbytes = self._range(slab)
        if available_bytes() < nbytes + RESERVE_BYTES:
            raise OSError(errno.ENOMEM, "the machine's memory is in use")
        arena.take(self.arena_fd, start, nbytes)

    def _range(self, slab: int) -> tuple[int, int]:
        return self.budget.slabs[slab].start, self.budget.slabs[slab].nbytes

    def _send(self, peer: Peer, message: Message) -> None:
        if failpoints.armed:
            self._pass(message)
        peer.outbox.append((pack(message), self.arena_fd if isinstance(message, Attached) else None))
        if len(peer.outbox) == 1:
            self._flush(peer)
        elif len(peer.outbox) > MAX_OUTBOX:
            self._close(peer, "does not read")

    def _flush(self, peer: Peer) -> None:
        try:
            while peer.outbox:
                arena.send(peer.sock, *peer.outbox[0])
                peer.outbox.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            return self._close(peer, error.strerror or "lost")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    @staticmethod
    def _pass(message: Message) -> None:
        if (name := _FAILPOINTS.get(type(message))) is not None:
            failpoints.hit(name)

    def _close(self, peer: Peer, reason: str) -> None:
        """The peer is gone, or is made so: everything that it had is free at once."""
        if self.peers.pop(peer.number, None) is None:
            return
        self._selector.unregister(peer.sock)
        peer.sock.close()
        worker = self.budget.workers.get(peer.number)
        if reason or worker:
            leases = f" with {len(worker.leases)} leases" if worker else ""
            log.info("%s left%s%s", peer.name, leases, f": {reason}" if reason else "")
        self._act(self.budget.gone(peer.number, time.monotonic()))
