"""Named places where a process can be made to fail, for tests: `PARKADE_FAIL=name:n[:kill|stop|raise]`, several with commas.

The n-th time that a process comes by the place (counted in each life of it) it kills itself, stops, or raises Failpoint.
`PARKADE_FAIL=@FOLDER` instead arms at run time: who comes by a place removes the file of its name there and does what it says.
Without the variable `hit` does nothing.
"""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from wire.config import ConfigError

VARIABLE = "PARKADE_FAIL"
ACTIONS = ("kill", "stop", "raise")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,9}")

# name -> (file, where). tests/wire/test_failpoints.py holds the table against the code.
POINTS = {
    "admit": ("gpu_worker/worker.py", "a request has come from the router"),
    "prefill": ("gpu_worker/worker.py", "before a step that feeds more than one known token of a sequence"),
    "decode": ("gpu_worker/worker.py", "before a step that feeds newest tokens"),
    "verify": ("gpu_worker/runner.py", "drafts are made and computed, and not judged yet"),
    "granted": ("gpu_worker/parking.py", "the lease of a park has come, nothing is copied"),
    "copy": ("gpu_worker/parking.py", "a piece of an image has been saved, and perhaps more are to come"),
    "before_commit": ("gpu_worker/parking.py", "an image is saved, its commit is not sent"),
    "committed": ("gpu_worker/parking.py", "the commit of an image is sent, the scheduler does not know"),
    "parked": ("gpu_worker/worker.py", "the router has been told of a park"),
    "load": ("gpu_worker/parking.py", "a piece of an image has been loaded, and perhaps more are to come"),
    "finishing": ("gpu_worker/worker.py", "a sequence has ended, the router has not been told"),
    "reserve": ("hostcache/server.py", "an ask has come, nothing is taken"),
    "grant": ("hostcache/server.py", "a lease is in the book, its owner does not know"),
    "commit": ("hostcache/server.py", "a commit has come"),
    "release": ("hostcache/server.py", "a lease is given back, and is still in the book"),
    "accept": ("router/server.py", "a request is in the ledger, its client does not know"),
    "submit": ("router/server.py", "a worker has been chosen, and does not know"),
    "tokens": ("router/server.py", "tokens are in the ledger, their client does not have them"),
    "finish": ("router/server.py", "a stream has ended, its client does not know"),
}


class Failpoint(RuntimeError):
    """A bug, as far as the process can tell."""


def hit(name: str) -> None:
    """The process comes by the place `name`."""


def act(name: str, action: str) -> None:
    """Fail."""
    if action == "raise":
        raise Failpoint(f"failpoint {name}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def counted(text: str) -> Callable[[str], None]:
    """`hit` for `name:n[:action],...`. ConfigError."""
    wanted: dict[tuple[str, int], str] = {}
    for part in text.split(","):
        name, _, rest = part.strip().partition(":")
        number, _, action = rest.partition(":")
        action = action or "kill"
        if name not in POINTS or not _NUMBER.fullmatch(number) or action not in ACTIONS:
            raise ConfigError(
                f"{VARIABLE}={text}: {part!r} is not NAME:N[:{'|'.join(ACTIONS)}] with a name of {', '.join(POINTS)}"
            )
        wanted[name, int(number)] = action
    seen: Counter[str] = Counter()

    def hit(name: str) -> None:
        seen[name] += 1
        if (action := wanted.get((name, seen[name]))) is not None:
            act(name, action)

    return hit


def from_folder(folder: Path) -> Callable[[str], None]:
    """`hit` that looks for a file named like the place; one process gets it."""

    def hit(name: str) -> None:
        path, mine = folder / name, folder / f"{name}.{os.getpid()}"
        try:
            path.rename(mine)
        except FileNotFoundError:
            return
        action = mine.read_text().strip()
        mine.unlink()
        act(name, action)

    return hit


def chosen(text: str) -> Callable[[str], None]:
    """`hit` as the variable says."""
    return from_folder(Path(text[1:])) if text.startswith("@") else counted(text)


armed = bool(os.environ.get(VARIABLE))  # for places where even finding out the name costs something
_mistake = ""
if armed:
    try:
        hit = chosen(os.environ[VARIABLE])
    except ConfigError as error:  # for `check`: who imports this cannot tell it
        _mistake = str(error)


def check() -> None:
    """ConfigError if the variable does not say what it should. Every process asks at its start."""
    if _mistake:
        raise ConfigError(_mistake)
