"""The folder where the processes of one server meet: fresh and private, or a given one that no living server uses."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from wire import sockets
from wire.config import ConfigError

LOCK_NAME = "serve.lock"


@contextlib.contextmanager
def run_dir(given: str) -> Iterator[str]:
    """Yields the folder's path and holds it until the end. `given` empty: a fresh one that is removed at the end.

    ConfigError when a living server holds it, or when it cannot be used. What a killed server left there is removed.
    """
    if not given:
        path = _fresh()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return
    path = os.path.abspath(given)
    sockets.check_path(sockets.hostcache_path(path))  # the longest of them
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        there = os.stat(path)
        if there.st_mode & 0o022:
            raise ConfigError(
                f"--run-dir {path}: others may write there, and so take the place of a socket; give a folder of its own"
            )
        if there.st_uid != os.geteuid():
            raise ConfigError(f"--run-dir {path}: it is another user's, who may take the place of a socket; chown it")
        lock = os.open(f"{path}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
            raise ConfigError(f"--run-dir {path}: in use by a living server (process {pid}); choose another") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        _clean(path)
        yield path
        _clean(path)
    finally:
        os.close(lock)  # the file stays: to remove it while another server opens it would let both hold a lock


def _fresh() -> str:
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) < 80 and os.access(parent, os.W_OK | os.X_OK):
            return tempfile.mkdtemp(prefix="parkade-", dir=parent)
    raise ConfigError("--run-dir: no folder for the sockets found; give one")


def _clean(path: str) -> None:
    addresses = sockets.client_address(path), sockets.worker_address(path), sockets.hostcache_path(path)
    for address in addresses:
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
