"""Asks the host cache for its budget: an observer on its Unix socket that never attaches, with a deadline on every answer."""

import asyncio
import socket

from wire.codec import Decoder, ProtocolError, pack
from wire.messages import Budget, FromHostCache, GetBudget
from wire.service import log

ANSWER_S = 0.1
MAX_DATAGRAM_BYTES = 1 << 20
_DECODER: Decoder[FromHostCache] = Decoder(FromHostCache)


class HostCacheLink:
    """One connection, opened when needed. A late or strange answer closes it, so that no answer meets the wrong question."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    async def budget(self) -> Budget | None:
        """What the host cache holds now, or None if there is none or it does not answer. One call at a time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                link = self._connected()
                link.send(pack(GetBudget()))
                await _readable(link)
            answer = _DECODER.unpack(link.recv(MAX_DATAGRAM_BYTES))
            if isinstance(answer, Budget):
                return answer
            log.warning("the host cache answered %s to GetBudget", type(answer).__name__)
        except (OSError, ProtocolError) as error:  # TimeoutError is an OSError
            log.debug("no word from the host cache: %s", error or type(error).__name__)
        self.close()
        return None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                link.connect(self._path)
            except OSError:
                link.close()
                raise
            self._socket = link
        return self._socket


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(link.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(link.fileno())
