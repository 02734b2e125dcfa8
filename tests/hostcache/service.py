"""Runs the real `python -m hostcache` for a test, with a stand-in for systemd, and speaks to it."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpu_worker.parking import Parking
from gpu_worker.policy.events import Event
from wire import arena
from wire.codec import Decoder, pack
from wire.messages import Attach, Attached, Budget, FromHostCache, GetBudget, ToHostCache
from wire.sockets import hostcache_path

TIMEOUT_S = 30.0
EXEC = """
import os, sys
for number, fd in enumerate(sys.argv[1].split(","), 3):
    os.dup2(int(fd), number)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""  # as systemd starts a service with stored descriptors: they are 3, 4, ...
DECODER: Decoder[FromHostCache] = Decoder(FromHostCache)


class HostCache:
    """One running host cache. `store=True`: the arena is kept as systemd would, and `restart` hands it back."""

    def __init__(self, run_dir: Path, park_ram: str = "16MiB", store: bool = False) -> None:
        self.run_dir, self.park_ram, self.store = run_dir, park_ram, store
        run_dir.mkdir(exist_ok=True)
        self.path = hostcache_path(run_dir)
        self.kept: dict[str, int] = {}  # the descriptor store: name -> fd
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        (run_dir / "notify").unlink(missing_ok=True)
        self.systemd.bind(str(run_dir / "notify"))
        self.systemd.settimeout(TIMEOUT_S)
        self._observer: socket.socket | None = None
        self.start()

    def __enter__(self) -> "HostCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        for fd in self.kept.values():
            os.close(fd)
        self.systemd.close()
        if self._observer:
            self._observer.close()

    def start(self) -> None:
        """Start it and wait until it says READY=1."""
        environ = os.environ | {"NOTIFY_SOCKET": str(self.run_dir / "notify"), "FDSTORE": "8" if self.store else "0"}
        command = [sys.executable, "-m", "hostcache", "--run-dir", str(self.run_dir), "--park-ram", self.park_ram]
        if self.kept:
            environ |= {"LISTEN_FDS": str(len(self.kept)), "LISTEN_FDNAMES": ":".join(self.kept)}
            command = [sys.executable, "-c", EXEC, ",".join(map(str, self.kept.values())), *command]
        self.process = subprocess.Popen(command, env=environ, pass_fds=tuple(self.kept.values()))
        while not self._heard_ready():
            pass

    def _heard_ready(self) -> bool:
        text, rights, _, _ = self.systemd.recvmsg(4096, socket.CMSG_SPACE(4))
        fields = dict(line.split("=", 1) for line in text.decode().splitlines())
        if "FDSTORE" in fields:
            (fd,) = array("i", rights[0][2])
            self.kept[fields["FDNAME"]] = fd
        if "FDSTOREREMOVE" in fields:
            os.close(self.kept.pop(fields["FDNAME"]))
        return "READY" in fields

    def signal(self, number: int) -> None:
        """Send a signal to it (no error if it has ended)."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._observer = None

    def connect(self) -> socket.socket:
        """A new connection that waits up to TIMEOUT_S."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(TIMEOUT_S)
        sock.connect(self.path)
        return sock

    def attach(self, unit_bytes: int = 4096) -> tuple[socket.socket, Attached, int]:
        """A bare worker: its connection, what it was told, and the arena's descriptor."""
        sock = self.connect()
        sock.send(pack(Attach(worker="bare-1-1", unit_bytes=unit_bytes)))
        payload, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        return sock, DECODER.unpack(payload), fds[0]

    def budget(self) -> Budget:
        """The figures, as the router asks for them."""
        if self._observer is None:
            self._observer = self.connect()
        return ask(self._observer, GetBudget())

    def until(self, condition: Callable[[Budget], bool]) -> Budget:
        """The first figures that fulfil `condition`."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(figures := self.budget()):
            assert time.monotonic() < deadline, figures
            select.select([self._observer], [], [], 0.02)
        return figures


def ask(sock: socket.socket, message: ToHostCache) -> FromHostCache:
    """Send `message` and wait for the next answer."""
    sock.send(pack(message))
    return DECODER.unpack(sock.recv(arena.MAX_DATAGRAM_BYTES))


class Pool:
    """A pool of random blocks and states, with what is needed of one."""

    def __init__(self, num_blocks: int, block_bytes: int = 100_000, seed: int = 0, state_bytes: int = 0) -> None:
        self.block_bytes, self.state_bytes = block_bytes, state_bytes
        draw = np.random.default_rng(seed).integers
        self.cells = draw(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        self.states = draw(0, 256, (4 if state_bytes else 0, state_bytes), dtype=np.uint8)

    def block(self, i: int) -> np.ndarray:
        return self.cells[i]

    def state(self, i: int) -> np.ndarray:
        if i < 0:
            raise IndexError(i)
        return self.states[i]


def new_parking(cache: HostCache, pool: Pool, name: str = "cpu0-1-1") -> Parking:
    """A Parking that has attached."""
    parking = Parking(pool, cache.path, name, time.monotonic)
    wait(parking, lambda: parking.connected)
    return parking


def wait(parking: Parking, done: Callable[[], bool] | type[Event]) -> list[Event]:
    """Drive `parking` until `done()`, or until an event of the type `done` has come; the events of that time."""
    events: list[Event] = []
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        events += parking.poll(time.monotonic())
        if parking.copying:
            events += parking.copy(64 << 10)
        if any(isinstance(event, done) for event in events) if isinstance(done, type) else done():
            return events
        assert time.monotonic() < deadline, events
        waits = [0.0 if parking.copying else 1.0, parking.wait_s(time.monotonic())]
        readable = [parking.fileno()] if parking.fileno() is not None else []
        select.select(readable, [], [], min(wait_s for wait_s in waits if wait_s is not None))
