"""What all four processes share at start: settings, one log format on stderr, errors of the user, word to systemd."""

import argparse
import atexit
import contextlib
import logging
import os
import queue
import resource
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from wire import config as settings
from wire import failpoints
from wire.config import FIELDS, Config, ConfigError

USER_ERROR = 78  # exit status (EX_CONFIG): restarting does not help, the last line on stderr says what to change
LOG_LINES = 1000  # held while nobody reads stderr; more are dropped and counted

log = logging.getLogger("parkade")


def run(process_name: str, main: Callable[[Config], int | None], argv: Sequence[str] | None = None) -> int:
    """The exit status of `main(config)`; a ConfigError becomes one line on stderr and status 78."""
    try:
        return main(setup(process_name, argv)) or 0
    except ConfigError as error:
        flush_log()
        with contextlib.suppress(OSError):
            write_out(2, f"error: {error}\n")
        return USER_ERROR


def setup(process_name: str, argv: Sequence[str] | None = None) -> Config:
    """The settings of `python -m PROCESS`: flags, environment, `--config FILE.toml`, defaults. Also opens the log."""
    parser = argparse.ArgumentParser(prog=f"python -m {process_name}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE.toml", help="settings as TOML; flags and PARKADE_... variables win over it")
    for field in FIELDS:
        add = parser.add_argument
        if settings.is_switch(field):
            add(settings.flag_name(field.name), action="store_true", default=None, help=settings.help_text(field))
        else:
            add(settings.flag_name(field.name), metavar=settings.metavar(field), help=settings.help_text(field))
    flags = vars(parser.parse_args(argv))
    worker_name = os.environ.get("PARKADE_WORKER_NAME") if process_name == "gpu_worker" else None
    open_log(worker_name or process_name.rpartition(".")[2])
    failpoints.check()
    config = settings.load(flags, flags.pop("config"))
    if not config.run_dir:
        raise ConfigError(f"python -m {process_name} needs --run-dir, the folder where the processes meet")
    return config


def file_limit() -> int:
    """How many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_file_limit() -> None:
    """Each client is a descriptor: take as many as we may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def write_out(fd: int, text: str) -> None:
    """To stdout (1) or stderr (2), past Python's buffers: what a full disk has refused would be tried again with what comes
    later, and at the end of the process, whose status it may change. OSError if it cannot be written. Nothing happens where there
    is no such file."""
    if (sys.stdout if fd == 1 else sys.stderr) is None:  # it was closed at the start: the number may be another file's by now
        return
    data = text.encode(errors="backslashreplace")
    while data:
        data = data[os.write(fd, data) :]


# log ------------------------------------------------------------------------------------------------------------------
class _StderrThread(logging.Handler):
    """Writes lines to stderr from a thread of its own: a reader that stops reading must never stop the loop that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.Queue[str | None] = queue.Queue(LOG_LINES)
        self.dropped = 0
        self.thread = threading.Thread(target=self._write, name="log", daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))

    def put(self, line: str) -> None:
        try:
            self.lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def _write(self) -> None:
        while (line := self.lines.get()) is not None:
            if dropped := self.dropped:
                self.dropped -= dropped
                line = f"({dropped} lines dropped: stderr did not take them)\n{line}"
            try:
                write_out(2, line + "\n")
            except OSError:  # the reader is gone, or the disk is full; the process goes on without a log
                self.dropped += dropped + 1

    def stop(self) -> None:
        """Write what is queued, for a second at most."""
        try:
            self.lines.put(None, timeout=0.5)
        except queue.Full:
            return
        self.thread.join(1.0)


class _Line(logging.Formatter):
    """`12:34:56.789 I router      text`; level as one letter, the process in a column of its own."""

    def __init__(self, label: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(letter)s {label:<10} %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        return super().format(record)


def open_log(label: str) -> None:
    """Send `log` and the libraries' warnings to stderr, one tidy line each, marked with `label`."""
    flush_log()
    handler = _StderrThread()
    handler.setFormatter(_Line(label))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    log.setLevel(logging.getLevelNamesMapping().get(os.environ.get("PARKADE_LOG", "").upper(), logging.INFO))


def log_raw(line: str) -> None:
    """A line that is already tidy (a child's)."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StderrThread):
            handler.put(line)


@atexit.register
def flush_log() -> None:
    """Write what is queued and close the log."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _StderrThread):
            root.removeHandler(handler)
            handler.stop()


# systemd --------------------------------------------------------------------------------------------------------------
FIRST_FD = 3  # of those that systemd passes (sd_listen_fds)


def passed_sockets() -> list[socket.socket]:
    """The listening sockets that systemd made for this process, none where it is not started by a socket unit."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    found = [socket.socket(fileno=fd) for fd in range(FIRST_FD, FIRST_FD + int(os.environ.get("LISTEN_FDS", "0")))]
    for passed in found:
        passed.set_inheritable(False)
    return found


def watchdog_s() -> float | None:
    """How often systemd wants WATCHDOG=1 at least, with room to spare; None: it does not watch."""
    usec = int(os.environ.get("WATCHDOG_USEC", "0"))
    return usec / 3e6 if usec else None


def notify(state: str) -> None:
    """Tell systemd, e.g. READY=1, STATUS=loading, WATCHDOG=1; nothing happens where no systemd listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer:
            peer.setblocking(False)
            peer.sendto(state.encode(), address)
    except OSError as error:
        log.debug("systemd does not listen: %s", error)
