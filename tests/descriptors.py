"""For tests of processes that run out of descriptors: connections that say nothing, and whether the others go on."""

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Callable

import psutil

LIMIT_S = 30
LOOK_S = 1.0  # how long the CPU time is looked at
PAUSE_S = 0.02  # between two tokens


def knock(address: str | tuple[str, int], most: int, patience_s: float = LIMIT_S) -> list[socket.socket]:
    """Connections to a Unix socket or a port that say nothing: `most`, or as many as are let in before nobody has been for so
    long. A port lets everybody in, whether the process takes them or not."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    socks: list[socket.socket] = []
    last = time.monotonic()
    while len(socks) < most and time.monotonic() - last < patience_s:
        sock = socket.socket(family)
        sock.setblocking(False)
        if sock.connect_ex(address) == errno.EAGAIN:
            sock.close()
        else:
            socks.append(sock)
            last = time.monotonic()
    return socks


def ended(sock: socket.socket) -> bool:
    """Whether the other end has closed it, perhaps with a last word."""
    try:
        while sock.recv(1000):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def goes_on(pid: int, token: Callable[[int], Awaitable[None]], offset: int) -> int:
    """Tokens from `offset` on come through for a while, and for the CPU time of that, not of a spin; the next offset.
    `token(offset)` says one to the process and waits until it has come out."""
    began, before_s = time.monotonic(), cpu_s(pid)
    while time.monotonic() - began < LOOK_S:
        await asyncio.wait_for(token(offset), LIMIT_S)
        offset += 1
        await asyncio.sleep(PAUSE_S)
    assert cpu_s(pid) - before_s < 0.5 * (time.monotonic() - began)
    return offset
