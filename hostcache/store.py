"""The arena in systemd's descriptor store, so that it outlives a restart of the host cache with its generation."""

import array
import os
import socket
from collections.abc import Mapping

from wire import arena

FIRST_FD = 3  # of those that systemd passes (sd_listen_fds)
_NAME = "arena-"  # and the generation


def available(environ: Mapping[str, str]) -> bool:
    """Whether somebody keeps descriptors for this process."""
    return bool(environ.get("NOTIFY_SOCKET")) and environ.get("FDSTORE") != "0"


def kept_arena(environ: Mapping[str, str], nbytes: int) -> tuple[int, int] | None:
    """(descriptor, generation) of the arena of `nbytes` that a former life stored. Others that it stored are dropped."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    found = None
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    for fd in range(FIRST_FD, FIRST_FD + int(environ.get("LISTEN_FDS", "0"))):
        name = names[fd - FIRST_FD] if fd - FIRST_FD < len(names) else ""
        generation = name.removeprefix(_NAME)
        if not name.startswith(_NAME) or not generation.isdigit():
            continue
        if found is None and arena.is_arena(fd, nbytes):
            os.set_inheritable(fd, False)
            found = fd, int(generation)
        else:
            os.close(fd)
            _tell(environ, f"FDSTOREREMOVE=1\nFDNAME={name}")
    return found


def keep(environ: Mapping[str, str], fd: int, generation: int) -> None:
    """Store the arena. OSError where nobody listens."""
    _tell(environ, f"FDSTORE=1\nFDNAME={_NAME}{generation}", fd)


def _tell(environ: Mapping[str, str], state: str, fd: int | None = None) -> None:
    address = environ["NOTIFY_SOCKET"]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer:
        peer.connect("\0" + address[1:] if address.startswith("@") else address)
        peer.sendmsg([state.encode()], rights)
