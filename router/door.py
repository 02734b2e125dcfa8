"""The clients' connections below ZeroMQ: their number, and who sends a message that never ends. Who is too much is cut off.

ZeroMQ hands over whole messages only, bounds each frame and not their number, and without a free descriptor it ends the process
(libzmq 4.3.5, `abort` in ipc_listener.cpp). It does say which descriptors it has accepted, and from which one a message came; the
kernel says the rest.
"""

import ctypes
import fcntl
import os
import socket
import struct
import termios
from typing import Any

import zmq

from wire.sockets import MAX_FRAME_BYTES

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
OTHER_DESCRIPTORS = 256  # workers, sockets of the process itself
BURST = 2048  # ZeroMQ accepts so many before we hear of the first, and waits for us then: the queue of its monitor is full
SUSPICIOUS_BYTES = MAX_FRAME_BYTES  # the process has grown by so much: look who sends
UNDOUBTED_BYTES = 2 * MAX_FRAME_BYTES  # by so much since: more than a message holds
LOOKS = 20  # before somebody is cut off
FLOOD_BYTES = 4 * MAX_FRAME_BYTES  # it grows so fast that FEW_LOOKS must do
FEW_LOOKS = 8
MESSAGE_LOOKS = 4  # one message of the largest size has come within these
TRIM_AFTER = 20  # looks; then what was read of a message without end has been dropped, and goes back to the system
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Door:
    """Hears of each connection of one ROUTER, `heard`, and has to be told which of them said something while it is `watching`."""

    def __init__(self, most: int) -> None:
        """Of `most` descriptors that are free for connections BURST are kept free, half of them at most; who comes then is
        cut off. Above 2 x BURST no burst, however fast, takes the last one."""
        self._most = max(1, most - min(BURST, most // 2))
        self._fds: set[int] = set()
        self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # kept: there may be no descriptor later
        self._calm_bytes = self._resident()
        self._busy: dict[int, int] = {}  # under watch: the look at which something began to come, 0 for none
        self._looks = 0
        self._round_bytes = 0  # as many looks ago
        self._trim_in = 0
        self.watching = False

    def close(self) -> None:
        """Give its descriptor back."""
        os.close(self._memory)

    def heard(self, event: dict[str, Any]) -> bool:
        """What the monitor says; whether a connection ended."""
        fd = int(event["value"])
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._fds.discard(fd)
            self._busy.pop(fd, None)
            return True
        self._fds.add(fd)
        if len(self._fds) > self._most:
            _cut(fd)
        return False

    def spoke(self, frame: zmq.Frame) -> None:
        """A whole message has come, of which this is a frame: its sender is no suspect."""
        self._busy.pop(frame.get(zmq.SRCFD), None)

    def look(self) -> int:
        """To be called at each tick. How many were cut off: they sent, no message came of it, and memory grew."""
        if self._trim_in:
            self._trim_in -= 1
            if not self._trim_in and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)
        resident = self._resident()
        if not self.watching:
            self._calm_bytes = min(self._calm_bytes, resident)
            if resident - self._calm_bytes > SUSPICIOUS_BYTES:
                self.watching, self._looks, self._round_bytes = True, 0, resident
                self._busy = dict.fromkeys(self._fds, 0)
            return 0
        self._looks += 1
        for fd, since in self._busy.items():
            if not since and _unread(fd):
                self._busy[fd] = self._looks
        grown = resident - self._calm_bytes
        if self._looks < (FEW_LOOKS if grown > FLOOD_BYTES else LOOKS):
            return 0
        suspects = [fd for fd, since in self._busy.items() if since and self._looks - since >= MESSAGE_LOOKS]
        guilty = suspects if grown > UNDOUBTED_BYTES else []
        for fd in guilty:
            _cut(fd)
        self.watching = not guilty and resident > self._round_bytes
        self._looks, self._round_bytes, self._busy = 0, resident, dict.fromkeys(self._fds, 0) if self.watching else {}
        if not self.watching:
            self._calm_bytes = resident
        if guilty:
            self._trim_in = TRIM_AFTER
        return len(guilty)

    def _resident(self) -> int:
        return int(os.pread(self._memory, 200, 0).split()[1]) * _PAGE_BYTES


def _unread(fd: int) -> int:
    """Bytes that wait in the kernel."""
    try:
        return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    except OSError:  # it is gone
        return 0


def _cut(fd: int) -> None:
    """End a connection; ZeroMQ then closes it. If it has ended meanwhile it may be another file by now: only a stream is cut."""
    try:
        stream = socket.socket(fileno=fd)
    except OSError:
        return
    try:
        if stream.type == socket.SOCK_STREAM:
            stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        stream.detach()
