"""Does the faults of a plan to a running server, and watches who dies and who comes back."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from random import Random

import psutil

from tests.system.nemesis.history import History
from tests.system.nemesis.plan import PROCESSES, Fault
from wire import arena
from wire.codec import Decoder, pack
from wire.messages import Attach, Attached, Denied, FromHostCache, Reclaim, Reclaimed, Reserve
from wire.sockets import hostcache_path

LOOK_S = 0.05
BITS = 40  # turned at a time
_DECODER: Decoder[FromHostCache] = Decoder(FromHostCache)


class Lives:
    """The processes of a server: born, died, stopped. Who was stopped by a failpoint goes on after its time."""

    def __init__(self, serve_pid: int) -> None:
        self.serve = psutil.Process(serve_pid)
        self.history: History | None = None
        self.pids: dict[int, str] = {}  # of those alive, their module
        self.stopped: set[int] = set()  # by a fault that lets them go on itself
        self.go_on_s = 0.5
        self._fds: dict[int, int] = {}
        self._tasks: set[asyncio.Task] = set()

    def pid_of(self, module: str, number: int = 0) -> int | None:
        found = sorted(pid for pid, name in self.pids.items() if name == module)
        return found[number % len(found)] if found else None

    async def watch(self) -> None:
        """For ever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        for child in self.serve.children():
            with contextlib.suppress(psutil.Error, OSError):
                if child.pid not in self.pids:
                    self._born(child)
                elif child.pid not in self.stopped and child.status() == psutil.STATUS_STOPPED:
                    self.stopped.add(child.pid)
                    self._record("stopped", child.pid)
                    self.soon(self._go_on(child.pid, self.go_on_s))

    async def _go_on(self, pid: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        send(pid, signal.SIGCONT)
        self.stopped.discard(pid)

    def stop(self, pid: int, for_s: float) -> None:
        self.stopped.add(pid)
        send(pid, signal.SIGSTOP)
        self.soon(self._go_on(pid, for_s))

    async def all_go_on(self) -> None:
        """Wait for those that go on by themselves."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def soon(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _born(self, child: psutil.Process) -> None:
        command = child.cmdline()
        module = command[-1] if command[1:2] == ["-m"] and command[-1] in PROCESSES else ""
        if not module or child.status() == psutil.STATUS_ZOMBIE:
            return
        fd = os.pidfd_open(child.pid)
        self.pids[child.pid], self._fds[child.pid] = module, fd
        asyncio.get_running_loop().add_reader(fd, self._died, child.pid)
        self._record("born", child.pid)

    def _died(self, pid: int) -> None:
        self._record("died", pid)
        self._forget(pid)

    def _forget(self, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(self._fds[pid])
        os.close(self._fds.pop(pid))
        del self.pids[pid]
        self.stopped.discard(pid)

    def close(self) -> None:
        for pid in list(self.pids):
            self._forget(pid)

    def _record(self, event: str, pid: int) -> None:
        if self.history:
            self.history.record(event, process=self.pids[pid], pid=pid)


class Nemesis:
    """Does one plan's faults."""

    def __init__(self, lives: Lives, history: History, run_dir: Path, failpoints: Path) -> None:
        self.lives, self.history, self.run_dir, self.failpoints = lives, history, run_dir, failpoints
        self.armed: list[str] = []  # names of failpoints

    async def run(self, faults: list[Fault], seconds: float) -> None:
        """Those that can be done before `seconds` have passed."""
        last = late = 0.0
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s + late - self.history.now))
            while fault.calm and self.history.token_at <= last and self.history.now < seconds:
                await asyncio.sleep(LOOK_S)
            late = max(late, self.history.now - fault.at_s)
            if self.history.now > seconds:
                return
            self._do(fault)
            last = self.history.now

    async def end(self) -> None:
        """Nobody is stopped, nothing armed any more."""
        for path in self.failpoints.iterdir():
            if path.name in self.armed:  # else a process has just taken it, or died of it
                self.armed.remove(path.name)
            path.unlink(missing_ok=True)
        self.history.record("failed_at", names=self.armed)
        await self.lives.all_go_on()
        self.history.record("faults_over")

    def _do(self, fault: Fault) -> None:
        pid = done = self.lives.pid_of(fault.target, fault.seed)
        match fault.kind:
            case "kill" if pid:
                send(pid, signal.SIGKILL)
            case "term" if pid:
                send(pid, signal.SIGTERM)
            case "stop" if pid:
                self.lives.stop(pid, fault.for_s)
            case "failpoint":
                self.lives.go_on_s = fault.for_s or 0.5
                new = self.failpoints.with_name("arming")
                new.write_text(fault.action)
                if not (self.failpoints / fault.target).exists():
                    self.armed.append(fault.target)
                new.rename(self.failpoints / fault.target)
            case "deny":
                self.lives.soon(self._deny(fault.for_s))
            case "corrupt" if pid:
                self.lives.soon(self._corrupt(pid, fault))
        self.history.record("fault", kind=fault.kind, target=fault.target, action=fault.action, for_s=fault.for_s, done=done)

    async def _corrupt(self, pid: int, fault: Fault) -> None:
        random, turned = Random(fault.seed), 0
        until = self.history.now + fault.for_s
        while self.history.now < until:
            turned += corrupt(pid, random)
            await asyncio.sleep(0.01)
        self.history.record("corrupted", bits=turned)

    async def _deny(self, for_s: float) -> None:
        """Another worker takes all that is left of the budget, for some time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + for_s
        with (
            contextlib.suppress(OSError, TimeoutError),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock,
        ):
            sock.connect(hostcache_path(self.run_dir))
            sock.send(pack(Attach("nemesis-1-1", arena.PAGE_BYTES)))
            ask, taken = 0, 64 << 20
            while (left := until - loop.time()) > 0:
                data = await asyncio.wait_for(loop.sock_recv(sock, arena.MAX_DATAGRAM_BYTES), left)
                if not data:
                    return
                match _DECODER.unpack(data):
                    case Reclaim(slab=slab):
                        sock.send(pack(Reclaimed(slab)))
                        continue
                    case Denied():
                        taken //= 2
                    case Attached(arena_bytes=nbytes):
                        taken = nbytes
                if taken >= arena.PAGE_BYTES:
                    ask += 1
                    sock.send(pack(Reserve(ask, "nemesis", taken // arena.PAGE_BYTES * arena.PAGE_BYTES)))


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def corrupt(pid: int, random: Random) -> int:
    """Turn one bit in each of some pages of the arena that hold something; how many."""
    try:
        fds = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "parkade-arena" in os.readlink(fd)]
        fd = os.open(fds[0], os.O_RDWR)
    except (OSError, IndexError):
        return 0
    try:
        pages = [at for at in range(0, os.fstat(fd).st_size, arena.PAGE_BYTES) if any(os.pread(fd, 64, at))]
        pages = random.sample(pages, min(len(pages), BITS))
        for page in pages:
            at = page + random.randrange(arena.PAGE_BYTES)
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ 1 << random.randrange(8)]), at)
        return len(pages)
    finally:
        os.close(fd)
