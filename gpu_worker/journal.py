"""Journal: writes what the scheduler hears and plans to a file, for `parkade sim --journal`. Off unless --journal names a file.

Records are written with each plan, so a kill loses what was heard since the last one. Trouble with the file ends the journal with
one line in the log, never the worker.
"""

import errno
import logging
import os
from pathlib import Path
from typing import BinaryIO

from gpu_worker.policy.events import Event, Plan
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.recording import MAGIC, Header, Heard, framed, planned
from gpu_worker.policy.scheduler import Scheduler

MOST_BYTES = 1 << 30
BUFFER_BYTES = 1 << 20
MOST_FILES = 1000  # of one name

log = logging.getLogger("parkade")


class Journal:
    """Owns the file. OSError if it cannot be made; an existing one is never written over: FILE.1, FILE.2, ... are next."""

    def __init__(self, path: Path, header: Header, most_bytes: int = MOST_BYTES) -> None:
        self.path, fd = _created(path)
        self._file: BinaryIO | None = os.fdopen(fd, "wb", BUFFER_BYTES)
        self._left = most_bytes
        self._write(MAGIC + framed(header), flush=True)

    @property
    def open(self) -> bool:
        """Whether records are still kept."""
        return self._file is not None

    def heard(self, event: Event, now: float) -> None:
        """Note what the scheduler is about to hear."""
        if self._file is not None:
            self._write(framed(Heard(now, event)))

    def planned(self, plan: Plan, now: float) -> None:
        """Note what the scheduler has planned. Its rows must not have been run yet."""
        if self._file is not None:
            self._write(framed(planned(plan, now)), flush=True)

    def close(self, why: str = "") -> None:
        """Write what is left. Nothing is kept from then on; `why` goes to the log."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            why = why or f"its end is lost: {error.strerror}"
        if why:
            log.warning("the journal %s ends here: %s", self.path, why)

    def _write(self, data: bytes, flush: bool = False) -> None:
        self._left -= len(data)
        if self._left < 0:
            self.close("it has reached its size")
            return
        try:
            self._file.write(data)
            if flush:
                self._file.flush()
        except OSError as error:
            self.close(str(error.strerror))


class JournaledScheduler(Scheduler):
    """The scheduler, with all that goes in and comes out noted. Without a journal the plain one runs, at no cost."""

    def __init__(self, limits: Limits, journal: Journal) -> None:
        super().__init__(limits)
        self.journal = journal

    def handle(self, event: Event, now: float) -> None:
        """Noted before it is taken in, so that an event that ends the worker is there."""
        self.journal.heard(event, now)
        super().handle(event, now)

    def plan(self, now: float) -> Plan:
        plan = super().plan(now)
        self.journal.planned(plan, now)
        return plan


def path_of(name: str, worker: str, workers: int) -> Path:
    """The file of one worker of several: its name goes before the suffix."""
    path = Path(name)
    return path if workers == 1 or not path.name else path.with_name(f"{path.stem}-{worker}{path.suffix}")


def _created(path: Path) -> tuple[Path, int]:
    """A new file that only we may read, as it holds prompts."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    for number in range(MOST_FILES):
        one = path.with_name(f"{path.name}.{number}") if number else path
        try:
            return one, os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, f"{MOST_FILES} journals of that name exist")
