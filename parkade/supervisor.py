"""Starts programs as children, restarts what dies, gathers what they say on stderr, and stops them wave by wave."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wire.service import USER_ERROR, log, log_raw

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
HEALTHY_S = 10.0  # a child that lived this long starts again without the delays of its past
STOP_S = 10.0  # for a child that has nothing left to finish
HURRY_S = 3.0  # after a second signal
MAX_LINE_BYTES = 8192
READ_BYTES = 65536
READS_PER_WAKE = 16  # a child that floods stderr must not keep the loop from its other work
ERROR_MARK = "error: "  # how a process says what the user must change; see wire.service.run

_TIDY = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [A-Z] ")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Program:
    """What to run. Programs of a lower `wave` are stopped first, and have ended before the next wave is told."""

    name: str
    command: tuple[str, ...]
    environ: dict[str, str]
    wave: int = 0


@dataclass(frozen=True)
class Failure:
    """A program ended before everything was ready: its name, exit status and last word."""

    name: str
    status: int
    line: str


@dataclass
class Child:
    """One program and the process that runs it now, if any."""

    program: Program
    process: subprocess.Popen | None = None
    started_at: float = 0.0
    delay_s: float = 0.0
    refusal: str = ""  # why the system does not let it start, as told
    stopping: bool = False
    last_line: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # no process, and none will come
    pending: asyncio.TimerHandle | None = None


def next_delay_s(previous_s: float, lived_s: float, status: int) -> float:
    """Seconds until a dead child starts again: 0.1, doubling up to 2, from the start again after a healthy life."""
    if status == USER_ERROR:
        return MAX_DELAY_S
    if lived_s >= HEALTHY_S:
        return FIRST_DELAY_S
    return min(max(2 * previous_s, FIRST_DELAY_S), MAX_DELAY_S)


def ended_how(status: int) -> str:
    """`status` of subprocess in words."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Supervisor:
    """Runs `programs` until `stop`. Until `settled` is set, one that ends by itself sets `failed` instead of starting again."""

    def __init__(self, programs: list[Program]) -> None:
        self.children = [Child(program) for program in programs]
        self.settled = False
        self.failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._stopping_any = False

    def start(self) -> None:
        """Start every program."""
        for child in self.children:
            self._start(child)

    async def stop(self, finish_s: float, hurry: asyncio.Event) -> None:
        """End everything, wave by wave. The first gets `finish_s` to finish what it has; `hurry` cuts that short."""
        self._stopping_any = True
        for wave in sorted({child.program.wave for child in self.children}):
            members = [child for child in self.children if child.program.wave == wave]
            for child in members:
                child.stopping = True
                self._signal(child, signal.SIGTERM)
            gone = asyncio.gather(*(child.gone.wait() for child in members))
            limit_s = STOP_S + (finish_s if wave == 0 else 0)
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait({gone, hurried}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not gone.done() and hurry.is_set():
                for child in members:
                    self._signal(child, signal.SIGTERM)
                await asyncio.wait({gone}, timeout=HURRY_S)
            for child in members:
                if not child.gone.is_set():
                    log.warning("%s does not end; killed", child.program.name)
                    self._signal(child, signal.SIGKILL)
            await gone

    def tell(self, name: str, number: int) -> None:
        """A signal to the program of this name, if it runs now."""
        for child in self.children:
            if child.program.name == name and child.process is not None:
                child.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL to everything that still runs."""
        for child in self.children:
            child.stopping = True
            self._signal(child, signal.SIGKILL)
        await asyncio.gather(*(child.gone.wait() for child in self.children))

    # one child ------------------------------------------------------------------------------------------------------------
    def _start(self, child: Child) -> None:
        child.pending = None
        child.started_at = time.monotonic()
        try:
            child.process, read_end, pidfd = _spawn(child.program)
        except (OSError, subprocess.SubprocessError) as error:
            self._refused(child, error)
            return
        child.refusal = ""
        os.set_blocking(read_end, False)
        loop = asyncio.get_running_loop()
        lines = _Lines(lambda line: self._line(child, line))
        loop.add_reader(read_end, self._read, read_end, lines)
        loop.add_reader(pidfd, self._reap, child, pidfd, read_end, lines)

    def _read(self, read_end: int, lines: "_Lines", most: int = READS_PER_WAKE) -> None:
        for _ in range(most):
            try:
                data = os.read(read_end, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(read_end)
                return
            lines.feed(data)

    def _reap(self, child: Child, pidfd: int, read_end: int, lines: "_Lines") -> None:
        loop = asyncio.get_running_loop()
        status = child.process.wait()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        self._read(read_end, lines)
        lines.end()
        loop.remove_reader(read_end)
        os.close(read_end)
        child.process = None
        self._ended(child, status)

    def _ended(self, child: Child, status: int) -> None:
        """Decide what follows the end of a child's process."""
        name, last_line = child.program.name, child.last_line
        child.last_line = ""
        if child.stopping or (self._stopping_any and status == 0):  # a worker that was drained ends by itself
            child.gone.set()
            return
        if not self.settled and status >= 0:
            child.gone.set()
            if not self.failed.done():
                self.failed.set_result(Failure(name, status, last_line))
            return
        self._start_later(child, status)
        said = f": {last_line}" if status > 0 and last_line else ""
        log.warning("%s %s%s; starts again in %.1f s", name, ended_how(status), said, child.delay_s)

    def _refused(self, child: Child, error: OSError | subprocess.SubprocessError) -> None:
        """The system has no descriptor, process or memory for it. Said once, tried until it has."""
        if not self.settled:
            child.last_line = str(error)
            self._ended(child, 127)
            return
        why = getattr(error, "strerror", None) or str(error)
        if child.refusal != why:
            log.warning("%s cannot be started: %s; trying until it can", child.program.name, why)
        child.refusal = why
        self._start_later(child, 127)

    def _start_later(self, child: Child, status: int) -> None:
        child.delay_s = next_delay_s(child.delay_s, time.monotonic() - child.started_at, status)
        child.pending = asyncio.get_running_loop().call_later(child.delay_s, self._start, child)

    def _signal(self, child: Child, number: int) -> None:
        if child.pending is not None:
            child.pending.cancel()
            child.pending = None
            child.gone.set()
        elif child.process is not None:
            child.process.send_signal(number)
        else:
            child.gone.set()

    def _line(self, child: Child, line: str) -> None:
        if line.startswith(ERROR_MARK):
            child.last_line = line.removeprefix(ERROR_MARK)  # said once, with the end of the process
        elif _TIDY.match(line):
            log_raw(line)
        elif line.strip():
            child.last_line = line.strip()
            now = time.time()
            log_raw(
                f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03} - {child.program.name:<10} {line}"
            )


def _spawn(program: Program) -> tuple[subprocess.Popen, int, int]:
    """The process, the end of the pipe that it writes to, and the descriptor that tells of its end. OSError or
    subprocess.SubprocessError if it cannot be started or not be watched; nothing is left then."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            program.command,
            env=program.environ,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            process_group=0,  # same session, own group: a Ctrl-C in the terminal is for us alone, we tell the children
            umask=0o077,  # sockets are for this user, whatever the mode of a given folder
            preexec_fn=die_with(os.getpid()),
        )
    except (OSError, subprocess.SubprocessError):
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    try:
        return process, read_end, os.pidfd_open(process.pid)
    except OSError:
        os.close(read_end)
        process.kill()
        process.wait()
        raise


class _Lines:
    """Cuts bytes into lines of bounded length."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take in what was read; pass on the lines that are complete or too long to wait for their end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self.end()

    def end(self) -> None:
        """Pass on what has no end of line yet."""
        if self._rest:
            self._pass_on(self._rest)
        self._rest = b""

    def _pass_on(self, line: bytes) -> None:
        for start in range(0, len(line), MAX_LINE_BYTES):
            self._take(line[start : start + MAX_LINE_BYTES].decode(errors="replace"))


def die_with(parent: int) -> Callable[[], None]:
    """Run in the child before exec: it gets SIGKILL when its parent dies, also when that has already happened."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)

    return prepare
