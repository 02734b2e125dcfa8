"""Bodies of requests: read to the end first, up to a limit; beyond it a clear error that the client can still read."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from router.openai.errors import ApiError

MAX_BODY_BYTES = 32 << 20
MAX_DRAINED_BYTES = 64 << 20  # read and thrown away, so that a client which only writes gets to read the error
DRAIN_TIMEOUT_S = 1.5
BODY_SILENCE_S = 30.0


async def read_body(request: Request) -> bytes:
    """The whole body. ApiError 413 if it is too large, 408 if it stops coming."""
    parts: list[bytes] = []
    size = 0
    source = request.stream()
    async for part in _not_silent(source):
        size += len(part)
        if size > MAX_BODY_BYTES:
            parts.clear()
            await _drain(source)
            raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


async def _not_silent(source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                part = await anext(source)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(408, f"The body did not go on for {BODY_SILENCE_S:g} s.", code="request_timeout") from None
        yield part


async def _drain(source: AsyncIterator[bytes]) -> None:
    drained = 0
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            async for part in source:
                drained += len(part)
                if drained > MAX_DRAINED_BYTES:
                    return
    except (TimeoutError, ClientDisconnect):
        return
