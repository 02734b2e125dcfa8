"""The worker's connection to the host cache: datagrams that never block, and one error when it is gone."""

import errno
import os
import socket
from collections import deque
from collections.abc import Iterator

from wire import arena
from wire.codec import Decoder, ProtocolError, pack
from wire.messages import FromHostCache, HeldLease, ToHostCache

MAX_RECEIVE = 64  # datagrams in one poll


class HostCacheGone(Exception):
    """The connection has ended, or what came over it was no message of a host cache."""


class HostCacheSocket:
    """Owns the socket and the messages that the host cache has no room for yet."""

    def __init__(self, path: str) -> None:
        """`path` of the host cache's socket, which need not exist."""
        self._path = path
        self._socket: socket.socket | None = None
        self._outbox: deque[ToHostCache] = deque()
        self._decoder: Decoder[FromHostCache] = Decoder(FromHostCache)

    @property
    def open(self) -> bool:
        """Whether there is a connection."""
        return self._socket is not None

    @property
    def backlog(self) -> bool:
        """Whether messages wait for room."""
        return bool(self._outbox)

    def fileno(self) -> int | None:
        """The descriptor to wait on for reading, or None."""
        return self._socket.fileno() if self._socket is not None else None

    def connect(self) -> bool:
        """Try to connect, without waiting."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:  # no descriptor is free
            return False
        try:
            code = sock.connect_ex(self._path)
        except OSError as error:  # a path that is too long
            code = error.errno or errno.EINVAL
        if code:
            sock.close()
            return False
        self._socket = sock
        return True

    def close(self) -> None:
        """End the connection. What was not sent is dropped: it meant the peer that is gone."""
        self._outbox.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, message: ToHostCache) -> None:
        """Put `message` behind those that wait; `flush` sends them."""
        self._outbox.append(message)

    def withdraw(self, message: ToHostCache) -> bool:
        """Take back a message that was not sent yet; False if it was."""
        if message not in self._outbox:
            return False
        self._outbox.remove(message)
        return True

    def flush(self) -> None:
        """Send what the host cache has room for. HostCacheGone."""
        while self._outbox and self._socket is not None:
            try:
                arena.send(self._socket, pack(self._outbox[0]))
            except BlockingIOError:
                return
            except OSError as error:
                raise HostCacheGone(error.strerror or "lost") from None
            self._outbox.popleft()

    def receive(self) -> Iterator[tuple[FromHostCache, int | None]]:
        """What has arrived, MAX_RECEIVE messages at most, each with its descriptor (closed afterwards). HostCacheGone."""
        for _ in range(MAX_RECEIVE):
            if self._socket is None:
                return
            try:
                payload, fd = arena.receive(self._socket, descriptors=True)
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                raise HostCacheGone(str(error)) from None
            try:
                if not payload:
                    raise HostCacheGone("it has ended")
                yield self._decoder.unpack(payload), fd
            except ProtocolError as error:
                raise HostCacheGone(str(error)) from None
            finally:
                if fd is not None:
                    os.close(fd)


def fitting(held: list[HeldLease]) -> list[HeldLease]:
    """As many leases as fit an Attach; the others are lost."""
    room = arena.MAX_DATAGRAM_BYTES - 1024
    kept: list[HeldLease] = []
    for lease in held:
        room -= 64 + 24 * len(lease.extents)
        if room < 0:
            break
        kept.append(lease)
    return kept
