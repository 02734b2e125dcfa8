"""HTTP clients whose machine goes without a word: nothing is acknowledged any more, and no end comes. They are noticed."""

import asyncio
import ctypes
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from router.ledger import CREDIT_LOST_S
from router.openai import __main__ as adapter_process
from router.openai.__main__ import SILENT_S, listen, taken_over
from tests.openai.conftest import Start
from tests.openai.fake_router import FakeStream
from wire.messages import Message, Tokens

SO_ATTACH_FILTER = 26
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF: return 0
WORD = 19556
LIMIT_S = 30
ASK = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    b'{"prompt": "Hello", "max_tokens": 1000, "stream": %s}'
)
BODY_BYTES = len(ASK.partition(b"\r\n\r\n")[2] % b"")


def silence(sock: socket.socket) -> None:
    """From now on what comes to it is thrown away below TCP, so that it answers nothing: as if its machine had gone."""
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    except OSError as error:
        pytest.skip(f"no socket filters: {error}")


@pytest.mark.parametrize("stream", [True, False], ids=["in the middle of a stream", "while it waits for a whole answer"])
async def test_a_client_that_goes_without_a_word_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(adapter_process, "SILENT_S", 1)
    adapter = await start()
    gone = asyncio.Event()

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        yield Tokens(stream.generate.request_id, 0, [WORD])
        await gone.wait()
        yield Tokens(stream.generate.request_id, 1, [WORD])
        await asyncio.Event().wait()

    adapter.router.script = script
    said = b"true" if stream else b"false"
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", adapter.port))
        await loop.sock_sendall(client, ASK % (BODY_BYTES + len(said), said))
        await adapter.router.submitted.wait()
        while stream and b"data:" not in await loop.sock_recv(client, 10_000):
            pass
        silence(client)
        gone.set()
        async with asyncio.timeout(LIMIT_S):
            await adapter.router.streams[0].cancelled.wait()
            await adapter.serving.idle.wait()
            while adapter.server.server_state.connections:
                await asyncio.sleep(0.01)


def test_what_is_accepted_ends_when_its_peer_is_silent() -> None:
    """The options are inherited from the listener, systemd's own too. Who reads nothing is told why before."""
    assert SILENT_S > CREDIT_LOST_S
    with socket.create_server(("127.0.0.1", 0)) as passed, listen("127.0.0.1", 0) as own:
        for listener in (own, taken_over(passed)):
            with socket.create_connection(listener.getsockname()):
                listener.setblocking(True)
                with listener.accept()[0] as accepted:
                    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENT_S
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < SILENT_S
