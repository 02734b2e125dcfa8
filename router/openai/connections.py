"""What a connection may cost before it has asked for anything: a limit of their number, of a head's bytes and of its time."""

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS = 20_000  # where the descriptors allow it
OTHER_DESCRIPTORS = 128  # what else the process has open
MAX_HEAD_BYTES = 64 << 10  # request line and headers; as much between two pieces of a body, and for what follows it
WRITE_BUFFER_BYTES = 16 << 10  # of an answer, kept for a reader that does not take it; then nothing more is taken from the router
HEAD_S = 20.0  # from the first byte, or from the connection, to the end of the headers
_REFUSAL = (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n"
    b'{"error":{"message":"%s","type":"%s","param":null,"code":"%s"}}'
)


def refusal(status: bytes, message: bytes, kind: bytes, code: bytes, header: bytes = b"") -> bytes:
    """A whole answer in OpenAI's shape, for where no request could be read."""
    nbytes = len(_REFUSAL.partition(b"\r\n\r\n")[2] % (message, kind, code))
    return _REFUSAL % (status, nbytes, header, message, kind, code)


FULL = refusal(
    b"503 Service Unavailable", b"Too many connections are open.", b"server_error", b"too_many_connections", b"retry-after: 1\r\n"
)
TOO_LARGE = refusal(
    b"431 Request Header Fields Too Large",
    b"The headers have more than %d bytes." % MAX_HEAD_BYTES,
    b"invalid_request_error",
    b"headers_too_large",
)


class Connection(HttpToolsProtocol):
    """uvicorn's connection. One beyond the limit takes the place of the one that has been idle longest, else it is refused."""

    max_connections = MAX_CONNECTIONS
    idle: "dict[Connection, None]"  # without a request under way, oldest first

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head_due: TimerHandle | None = None
        self._unused = 0  # bytes heard of which nothing came yet

    def connection_made(self, transport: Transport) -> None:
        """Let it in, or not."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        if len(self.connections) > self.max_connections:
            longest = next(iter(self.idle), None)
            if longest is None:
                return self._refuse(FULL)
            longest._leave()
            longest.transport.abort()
        self.idle[self] = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, as long as what is read leads somewhere."""
        if self.transport.is_closing():
            return
        self._unused += len(data)
        super().data_received(data)
        if self._unused > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._unused = 0
        self._leave()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._unused = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self.idle[self] = None

    def _await_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        """Close; but what has begun while an answer is under way may wait for its end."""
        self._head_due = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(b"")
        else:
            self._await_head()

    def _leave(self) -> None:
        """It is not idle any more, or not there."""
        self.idle.pop(self, None)
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _refuse(self, answer: bytes) -> None:
        """Say why, where the answer to a request is not under way, and close."""
        self._leave()
        if answer and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(answer)
        self.transport.close()


def connection_class(descriptors: int) -> type[Connection]:
    """Connections of one server that may open so many descriptors."""
    most = max(1, min(MAX_CONNECTIONS, descriptors - OTHER_DESCRIPTORS))
    return type("Connection", (Connection,), {"max_connections": most, "idle": {}})
