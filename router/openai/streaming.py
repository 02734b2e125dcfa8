"""Answers as server-sent events, written straight to ASGI; and the watch for a client that hangs up."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from starlette.types import Receive, Send

KEEP_ALIVE_S = 8.0  # at least every 10 s is promised
PARKED_KEEP_ALIVE_S = 2.0
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class ClientGoneError(Exception):
    """The client has hung up: nobody is left to answer."""


class EventStream:
    """The open response. Writers take turns; `write` returns when the server's buffer has taken the bytes in.

    `send` is for the headers, `send_body` for the rest: what is wrapped around the server's own for the headers' sake (ids,
    errors) would cost each chunk several times what the server's own does.
    """

    def __init__(self, send: Send, send_body: Send) -> None:
        self._send = send
        self._send_body = send_body
        self._turn = asyncio.Lock()
        self._now = asyncio.get_running_loop().time
        self._last_write_s = self._now()
        self._parked: set[int] = set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Send the headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def write(self, payload: bytes) -> None:
        """Send whole events or comments, if there are any."""
        if not payload:
            return
        async with self._turn:
            await self._send_body({"type": "http.response.body", "body": payload, "more_body": True})
        self._last_write_s = self._now()

    async def end(self, payload: bytes) -> None:
        """Send the last events and close the response."""
        async with self._turn:
            await self._send_body({"type": "http.response.body", "body": payload, "more_body": False})

    async def pause(self, index: int) -> None:
        """Choice `index` was parked: say so, and keep the connection warm more often."""
        self._parked.add(index)
        self._changed.set()
        await self.write(b": preempted\n\n")

    async def go_on(self, index: int) -> None:
        """Choice `index` runs again: say so."""
        self._parked.discard(index)
        self._changed.set()
        await self.write(b": resumed\n\n")

    async def keep_alive(self) -> None:
        """Send a comment whenever the stream was silent for long. Never ends by itself."""
        while True:
            silence_s = PARKED_KEEP_ALIVE_S if self._parked else KEEP_ALIVE_S
            remaining_s = self._last_write_s + silence_s - self._now()
            if remaining_s <= 0:
                await self.write(b": keep-alive\n\n")
                continue
            self._changed.clear()
            try:
                async with asyncio.timeout(remaining_s):
                    await self._changed.wait()
            except TimeoutError:
                pass


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


async def hang_up(receive: Receive) -> None:
    """Ends when the client has gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless(event: Awaitable[object], work: Awaitable[None], error: Exception) -> None:
    """Run `work`; if `event` comes first, cancel the work, wait until it has cleaned up, and raise `error`."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
    finally:
        await _cancel((working, waiting))
    working.result()


async def all_of(work: Iterable[Awaitable[None]]) -> None:
    """Run all side by side; the first that fails ends the others, and its exception is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _cancel(tasks)
    for task in done:
        task.result()


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
