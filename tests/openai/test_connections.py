"""Connections that ask for nothing: many, half open, with headers without end. Each costs little, and the others are answered."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from router.openai import connections
from router.openai.__main__ import UNSENT_BYTES, http_config, listen, taken_over
from tests.openai.conftest import Adapter, Start
from tests.openai.fake_router import FakeStream
from wire.messages import Finished, Message, Usage

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(adapter: Adapter, words: bytes = b"") -> Pair:
    reader, writer = await asyncio.open_connection("127.0.0.1", adapter.port)
    writer.write(words)
    return reader, writer


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    return 8


async def health(adapter: Adapter) -> int:
    """Over a connection of its own."""
    async with httpx.AsyncClient(timeout=30) as http:
        return (await http.get(f"{adapter.url}/health")).status_code


@pytest.mark.parametrize("words", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
async def test_half_open_connections_make_room_oldest_first(few: int, start: Start, words: bytes) -> None:
    adapter = await start()
    pairs = [await connect(adapter, words) for _ in range(few)]
    assert await health(adapter) == 200
    assert await asyncio.wait_for(pairs[0][0].read(), 30) == b""
    assert len(adapter.server.server_state.connections) <= few
    for _, writer in pairs:
        writer.close()


async def test_answers_under_way_never_make_room(few: int, start: Start) -> None:
    adapter = await start()
    words = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    pairs = [await connect(adapter, words) for _ in range(few)]
    while len(adapter.server.server_state.tasks) < few:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(timeout=30) as http:
        refused = await http.get(f"{adapter.url}/health")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "too_many_connections"
    assert len(adapter.server.server_state.tasks) == few
    pairs[0][1].close()
    while len(adapter.server.server_state.connections) >= few:
        await asyncio.sleep(0)
    assert await health(adapter) == 200
    for _, writer in pairs:
        writer.close()


async def test_a_connection_kept_alive_makes_room_too(few: int, start: Start) -> None:
    adapter = await start()
    async with httpx.AsyncClient(timeout=30) as http:
        assert (await http.get(f"{adapter.url}/health")).status_code == 200
        pairs = [await connect(adapter) for _ in range(few)]
        for _, writer in pairs:
            writer.close()
        assert (await http.get(f"{adapter.url}/health")).status_code == 200


@pytest.mark.parametrize(
    ("begin", "on"),
    [
        (b"GET /", b"x" * 1000),
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 100),
        (b"GET / HTTP/1.1\r\nA", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nA: ", b"a" * 1000),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a" * 1000),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"A: b\r\n" * 100),
    ],
)
async def test_a_head_or_a_trailer_without_end_is_cut_off(adapter: Adapter, begin: bytes, on: bytes) -> None:
    reader, writer = await connect(adapter, begin)

    async def send() -> None:
        for _ in range((16 << 20) // len(on)):
            writer.write(on)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await send()
    writer.close()
    assert await health(adapter) == 200


async def test_headers_of_the_usual_size_and_a_large_body_pass(adapter: Adapter) -> None:
    answer = await adapter.http.post("/tokenize", json={"content": "x " * 100_000}, headers={"A": "b" * 16_000})
    assert answer.status_code in (200, 400)
    pieces = (b"[" if n == 0 else b" " * 10 for n in range(14_000))  # more bytes of framing than of body
    answer = await adapter.http.post("/tokenize", content=as_async(pieces))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"].startswith("invalid_")


async def as_async(pieces: Iterator[bytes]) -> object:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nA: b\r\n"])
async def test_a_head_that_never_ends_is_waited_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, start: Start, words: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.01)
    adapter = await start()
    first, _ = await connect(adapter, words)
    assert await asyncio.wait_for(first.read(), 30) == b""
    kept, writer = await connect(adapter, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await kept.readline()).startswith(b"HTTP/1.1 200")
    writer.write(b"GET / HT")  # the second on this connection
    await asyncio.wait_for(kept.read(), 30)


async def test_half_a_head_does_not_cut_the_answer_before_it(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.01)
    adapter = await start()
    overdue = asyncio.Event()

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        await overdue.wait()
        yield Finished(stream.generate.request_id, "length", Usage(1, 0))

    adapter.router.script = script
    body = b'{"prompt": "Once", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await connect(adapter, head + body)
    async with asyncio.timeout(30):
        await adapter.router.submitted.wait()
        writer.write(b"GET / HT")
        (connection,) = adapter.server.server_state.connections
        while (due := connection._head_due) is None:
            await asyncio.sleep(0)
        while connection._head_due is due:
            await asyncio.sleep(0)
        overdue.set()
        assert b"data: [DONE]" in await reader.read()  # and then it is closed, for want of the rest


async def test_an_answer_that_is_not_taken_waits_in_a_small_buffer(adapter: Adapter) -> None:
    _, writer = await connect(adapter)
    assert await health(adapter) == 200  # on the next one: this one has been let in
    for one in adapter.server.server_state.connections:
        assert one.transport.get_write_buffer_limits()[1] == connections.WRITE_BUFFER_BYTES
    assert adapter.server.server_state.connections
    writer.close()


def test_the_limit_fits_the_descriptors(adapter: Adapter) -> None:
    assert connections.connection_class(1024).max_connections == 1024 - connections.OTHER_DESCRIPTORS
    assert connections.connection_class(10**6).max_connections == connections.MAX_CONNECTIONS
    most = http_config(adapter.serving).http.max_connections
    assert most <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - connections.OTHER_DESCRIPTORS


def test_what_is_accepted_keeps_little_unsent() -> None:
    """A reader that stops pins what the kernel has queued: the option is inherited from the listener, systemd's own too."""
    with socket.create_server(("127.0.0.1", 0)) as passed, listen("127.0.0.1", 0) as own:
        for listener in (own, taken_over(passed)):
            with socket.create_connection(listener.getsockname()):
                listener.setblocking(True)
                with listener.accept()[0] as accepted:
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
