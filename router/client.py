"""The reference ZeroMQ client: streams over one socket, credits, cancellation, reconnection. For asyncio and uvloop."""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import zmq
from msgspec import Raw
from msgspec.structs import fields
from zmq.utils.monitor import recv_monitor_message

from wire.codec import Decoder, ProtocolError, frames, unbundle
from wire.messages import (
    DEFAULT_PARK_S,
    MAX_PARK_S,
    Accepted,
    Cancel,
    Credit,
    Finished,
    Generate,
    GetStatus,
    HoldAnswer,
    Message,
    Notice,
    Park,
    Rejected,
    Resume,
    RouterToClient,
    Sampling,
    Status,
    Tokens,
    Usage,
)
from wire.sockets import dealer_socket

WINDOW_BYTES = 64 << 10  # what the router sends of a stream before it wants credit
MAX_UNSENT = 10_000  # messages that wait for a router that does not read
RETRY_S = 0.02
STATUS_TIMEOUT_S = 5.0
HOLD_TIMEOUT_S = 30.0  # a park waits for a step and a copy
MAX_UNPACKED = 32  # messages of a stream that wait ready for who iterates; what comes behind them stays packed
_BATCH = 256  # messages taken in before the loop gets its turn
_DECODER: Decoder[RouterToClient] = Decoder(RouterToClient)
_SAMPLING_FIELDS = frozenset(field.name for field in fields(Sampling))

StreamMessage = Tokens | Notice | Finished


class RejectedError(Exception):
    """The router did not accept a request. `code` and `numbers` are for programs, the text is for people."""

    def __init__(self, code: str, message: str, numbers: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.numbers = numbers or {}


class Client:
    """A connection to a router: `async with Client("ipc://RUN_DIR/client.sock") as client`. One event loop, one socket.
    From another machine: `Client("tcp://HOST:PORT", curve=(PUBLIC KEY OF THE SERVER, OWN SECRET KEY))`.

    What is sent while the router is away waits for it. Streams that were running when the router vanished end with
    `Finished(reason="error", code="router_lost")`.
    """

    def __init__(self, address: str, context: zmq.Context | None = None, curve: tuple[bytes, bytes] | None = None) -> None:
        self._address = address
        self._curve = curve
        self._context = context or zmq.Context.instance()
        self._streams: dict[str, Stream] = {}
        self._questions: dict[str, asyncio.Future[Status]] = {}
        self._holds: dict[int, asyncio.Future[HoldAnswer]] = {}  # by ask
        self._asks = count(1)
        self._unsent: deque[list[bytes]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._open = False

    async def __aenter__(self) -> "Client":
        self._loop = asyncio.get_running_loop()
        self._socket = dealer_socket(self._context, self._address, curve=self._curve)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._open = True
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._receive)
        self._loop.add_reader(self._monitor.getsockopt(zmq.FD), self._watch)
        self._watch()  # a monitor's FD is silent until the first look finds nothing
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel every stream and close the socket. Who still waits for a stream gets its Finished."""
        if not self._open:
            return
        for stream in list(self._streams.values()):
            stream.close()
        self._open = False
        self._end_streams("the client was closed", "cancelled", "")
        for question in (*self._questions.values(), *self._holds.values()):
            question.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._loop.remove_reader(self._monitor.getsockopt(zmq.FD))
        self._socket.disable_monitor()  # first: the I/O thread would wait for ever to tell a closed monitor
        self._monitor.close(linger=0)
        self._socket.close()

    # streams ----------------------------------------------------------------------------------------------------------
    def submit(self, generate: Generate) -> "Stream":
        """Send the request; the stream's answers are read from what is returned. Never blocks, never raises for a refusal.
        ConnectionError if the client is closed or far too much waits for the router already."""
        stream = Stream(self, generate.request_id)
        if generate.request_id in self._streams:
            stream._take(Rejected(generate.request_id, "duplicate_id", "a stream with this request_id is still alive"))
            return stream
        self._send(generate)
        self._streams[generate.request_id] = stream
        return stream

    async def generate(
        self, prompt_token_ids: list[int], *, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[StreamMessage]:
        """Tokens, Notices and one Finished. `options` are fields of Generate or Sampling. RejectedError if refused.

        Leaving the loop, in whatever way, cancels the request.
        """
        stream = self.submit(generate_message(prompt_token_ids, request_id, options))
        try:
            async for message in stream:
                yield message
        finally:
            stream.close()

    # others -----------------------------------------------------------------------------------------------------------
    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> Status:
        """The router's state now. TimeoutError if it does not answer."""
        ask = GetStatus(uuid.uuid4().hex)
        answer = self._questions[ask.request_id] = self._loop.create_future()
        try:
            self._send(ask)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._questions.pop(ask.request_id, None)

    async def cancel(self, request_id: str) -> None:
        """End a stream by its id, whoever started it; its Finished goes to its owner."""
        self._send(Cancel(request_id))

    async def park(self, request_id: str, deadline_s: float = DEFAULT_PARK_S, *, timeout_s: float = HOLD_TIMEOUT_S) -> HoldAnswer:
        """Set a request aside, whoever started it, until `resume`, or until `deadline_s` have passed. The answer comes when it
        has left the batch; its `code` says if that cannot be. ValueError for a deadline out of range, TimeoutError if no answer
        came (the request will be set aside all the same), ConnectionError if the router is gone."""
        if not 0 < deadline_s <= MAX_PARK_S:
            raise ValueError(f"deadline_s must be above 0 and at most {MAX_PARK_S:.0f}, not {deadline_s}")
        return await self._hold(Park(request_id, deadline_s=deadline_s, ask=next(self._asks)), timeout_s)

    async def resume(self, request_id: str, *, timeout_s: float = HOLD_TIMEOUT_S) -> HoldAnswer:
        """Let a request that was set aside come back as soon as it fits. Answered at once; errors as of `park`."""
        return await self._hold(Resume(request_id, ask=next(self._asks)), timeout_s)

    async def _hold(self, message: Park | Resume, timeout_s: float) -> HoldAnswer:
        answer = self._holds[message.ask] = self._loop.create_future()
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._holds.pop(message.ask, None)

    # the socket -------------------------------------------------------------------------------------------------------
    def _send(self, message: Message) -> None:
        """Send, or keep for later if the pipe is full. ConnectionError if far too much waits already."""
        if not self._open:
            raise ConnectionError("the client is closed")
        if len(self._unsent) >= MAX_UNSENT:
            raise ConnectionError(f"the router does not answer: {MAX_UNSENT} messages wait for it")
        self._unsent.append(frames(message))
        self._flush()
        # a send handles the socket's internal commands and may swallow the edge of its FD
        self._loop.call_soon(self._receive)

    def _flush(self) -> None:
        self._retry = None
        while self._unsent:
            try:
                self._socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                self._retry = self._loop.call_later(RETRY_S, self._flush)
                return
            self._unsent.popleft()

    def _receive(self) -> None:
        """Take in what has arrived. The FD only tells of changes, so this ends with an empty socket or with another turn."""
        if self._take_batch():
            self._loop.call_soon(self._receive)

    def _take_batch(self) -> bool:
        """Take in a bounded part of what has arrived; whether there may be more."""
        taken = 0
        while self._open and taken < _BATCH:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                payloads = unbundle(parts)
                taken += len(payloads)
                for payload in payloads:
                    self._dispatch(_DECODER.unpack(payload), payload)
            except ProtocolError:
                taken += 1  # a router of another version; its streams cannot be read, and time-outs are the caller's
        return self._open

    def _dispatch(self, message: RouterToClient, payload: bytes | Raw) -> None:
        if isinstance(message, Status):
            if (question := self._questions.get(message.request_id)) is not None and not question.done():
                question.set_result(message)
        elif isinstance(message, HoldAnswer):
            if (hold := self._holds.get(message.ask)) is not None and not hold.done():
                hold.set_result(message)
        elif (stream := self._streams.get(message.request_id)) is not None:
            if isinstance(message, Finished | Rejected):
                del self._streams[message.request_id]
            stream._take(message, payload)

    def _watch(self) -> None:
        """The connection broke. Whoever answers next knows none of our streams, except to cancel what was still on its way."""
        while self._open:
            try:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            while self._take_batch():
                pass  # what had arrived before the end still counts
            lost = list(self._streams)
            self._end_streams("the router is gone", "error", "router_lost")
            for hold in self._holds.values():
                if not hold.done():
                    hold.set_exception(ConnectionError("the router is gone"))
            for request_id in lost:
                self._send(Cancel(request_id))

    def _end_streams(self, why: str, reason: str, code: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream._take(Finished(request_id, reason, stream.usage, why, code))


class Stream:
    """One request's answers. Iterate to the Finished; what is not iterated costs no more than the window."""

    def __init__(self, client: Client, request_id: str) -> None:
        self.request_id = request_id
        self.usage = Usage()  # the newest that was told
        self._client = client
        self._messages: deque[tuple[StreamMessage, int] | bytes] = deque()  # with its bytes on the wire, or packed
        self._news = asyncio.Event()
        self._accepted: Accepted | None = None
        self._rejected: Rejected | None = None
        self._consumed_bytes = 0
        self._credited_bytes = 0
        self._ended = False  # its last word has arrived
        self._read_out = False  # its last word was handed out
        self._cancelled = False
        self._closed = False

    async def accepted(self) -> Accepted:
        """The router's Accepted, with the seed. RejectedError if it refused; ConnectionError if it is gone."""
        while self._accepted is None:
            self._raise_if_rejected()
            if self._ended:
                raise ConnectionError("the router is gone")
            self._news.clear()
            await self._news.wait()
        return self._accepted

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> StreamMessage:
        """The next Tokens, Notice or Finished; the end after Finished. RejectedError if the router refused the request."""
        while not self._messages:
            self._raise_if_rejected()
            if self._read_out or self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        waited = self._messages.popleft()
        message, nbytes = (_DECODER.unpack(waited), len(waited)) if isinstance(waited, bytes) else waited
        self._read_out = isinstance(message, Finished)
        self._consume(nbytes)
        return message

    def cancel(self) -> None:
        """Ask the router to end the stream; its Finished still comes. Does nothing after the end."""
        if not self._ended and not self._cancelled and self._client._open:
            self._cancelled = True
            self._client._send(Cancel(self.request_id))

    def close(self) -> None:
        """Cancel, and read no more."""
        try:
            self.cancel()
        except ConnectionError:
            pass  # nobody reads our messages; the router cancels when the socket closes
        self._closed = True
        self._messages.clear()
        self._news.set()

    def _take(self, message: Accepted | Rejected | StreamMessage, payload: bytes | Raw = b"") -> None:
        match message:
            case Accepted():
                self._accepted = message
                self._consume(len(payload))
            case Rejected():
                self._rejected = message
                self._ended = True
            case Tokens(tokens=[], prompt_logprobs=[]):
                return  # the router only looked whether we are alive; that costs no credit
            case _:
                if isinstance(message, Notice | Finished):
                    self.usage = message.usage
                self._ended = isinstance(message, Finished)
                if not self._closed:
                    self._keep(message, payload)
        self._news.set()

    def _keep(self, message: StreamMessage, payload: bytes | Raw) -> None:
        """Let it wait. Unpacked, the messages of a window would have up to ten times its size."""
        if payload and len(self._messages) >= MAX_UNPACKED:
            self._messages.append(bytes(payload))  # a copy: of a bundle it would keep the whole
        else:
            self._messages.append((message, len(payload)))

    def _consume(self, nbytes: int) -> None:
        self._consumed_bytes += nbytes
        owed = self._consumed_bytes - self._credited_bytes
        if owed >= WINDOW_BYTES // 2 and not self._ended and not self._cancelled:
            self._credited_bytes = self._consumed_bytes
            self._client._send(Credit(self.request_id, self._consumed_bytes))

    def _raise_if_rejected(self) -> None:
        if self._rejected is not None:
            raise RejectedError(self._rejected.code, self._rejected.message, self._rejected.numbers)


def generate_message(prompt_token_ids: list[int], request_id: str | None, options: dict[str, Any]) -> Generate:
    """A Generate from flat options: those that Sampling knows go into its `sampling`. TypeError for an unknown one."""
    sampling = {name: value for name, value in options.items() if name in _SAMPLING_FIELDS}
    others = {name: value for name, value in options.items() if name not in _SAMPLING_FIELDS}
    if sampling:
        others["sampling"] = Sampling(**sampling)
    return Generate(request_id or uuid.uuid4().hex, prompt_token_ids, **others)
