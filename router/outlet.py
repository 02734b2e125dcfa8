"""The sending side of a ROUTER socket: what a full peer cannot take now is kept, within a bound, and tried again."""

from collections import deque

import zmq

from wire.messages import PROTOCOL

MAX_KEPT_BYTES = 16 << 20  # a peer that lets so much pile up counts as gone
STUCK_S = 60.0  # and one that takes nothing of it for so long


class Kept:
    """Messages of one peer, oldest first. `since`: when it last took one."""

    __slots__ = ("nbytes", "payloads", "since")

    def __init__(self, now: float) -> None:
        self.payloads: deque[bytes] = deque()
        self.nbytes = 0
        self.since = now


class Outlet:
    """Never blocks. A full pipe often empties in a moment, so time decides, not the first EAGAIN."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._kept: dict[bytes, Kept] = {}

    @property
    def full(self) -> bool:
        """Something is kept: call `retry` soon."""
        return bool(self._kept)

    def send(self, peer: bytes, payload: bytes, now: float, probe: bool = False) -> bool:
        """Send in order, or keep. False: the peer cannot be reached, or took too little; what was kept for it is dropped.

        A `probe` is dropped where it cannot go out at once.
        """
        kept = self._kept.get(peer)
        if kept is None:
            try:
                self._send(peer, payload)
                return True
            except zmq.Again:
                if probe:
                    return True
                kept = self._kept[peer] = Kept(now)
            except zmq.ZMQError as error:
                return self._gone(peer, error)
        elif probe:
            return True
        kept.payloads.append(payload)
        kept.nbytes += len(payload)
        # one message may be larger than the bound: a prompt of millions of tokens on its way to a worker
        if kept.nbytes > MAX_KEPT_BYTES and len(kept.payloads) > 1:
            del self._kept[peer]
            return False
        return True

    def retry(self, now: float) -> list[bytes]:
        """Try again what was kept; peers that are gone or stuck."""
        lost = []
        for peer, kept in list(self._kept.items()):
            try:
                while kept.payloads:
                    self._send(peer, kept.payloads[0])
                    kept.nbytes -= len(kept.payloads.popleft())
                    kept.since = now
                del self._kept[peer]
            except zmq.Again:
                if now - kept.since >= STUCK_S:
                    del self._kept[peer]
                    lost.append(peer)
            except zmq.ZMQError as error:
                self._gone(peer, error)
                lost.append(peer)
        return lost

    def _send(self, peer: bytes, payload: bytes) -> None:
        self._socket.send_multipart((peer, PROTOCOL, payload), zmq.NOBLOCK)

    def _gone(self, peer: bytes, error: zmq.ZMQError) -> bool:
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        self._kept.pop(peer, None)
        return False
