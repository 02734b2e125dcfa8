"""What a reader that stops costs: all that is kept for one over HTTP, counted byte by byte; in the long tier the memory of real
processes, over HTTP and over ZeroMQ."""

import asyncio
import socket
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from benchmarks.sse import bench, request
from benchmarks.stopped import READERS, measure, unsent
from router.client import WINDOW_BYTES, Client, Stream
from router.openai.text import Text
from tests.openai.conftest import Adapter, running
from tests.openai.fake_router import ready_status
from tests.openai.test_process import WireRouter, wire_router
from wire.codec import pack
from wire.messages import Accepted, Credit, Generate, GetStatus, Tokens
from wire.model_files import ModelFiles
from wire.sockets import client_address

MOST_BYTES = 256 << 10  # of router, adapter and the kernel's send queue together
TOKENS = 20_000  # of the stream: far more than is let out to a reader that stops
WORD = 19556  # a token whose text goes out at once
RECEIVE_BUFFER = 4096  # of the reader, which has a machine of its own
SAME = 5  # looks in a row that find the same: nothing moves any more
LOOK_EVERY_S = 0.02
LIMIT_S = 30.0


async def worst_case(router: WireRouter) -> None:
    """Speaks as a router does to its only stream: messages of one token each, as far as the window lets them."""
    name, sent, consumed, offset = "", 0, 0, 0
    while True:
        while not name or sent - consumed >= WINDOW_BYTES or await router.socket.poll(0, zmq.POLLIN):
            router.peer, *parts = await router.socket.recv_multipart()
            match router.decoder.decode(parts):
                case GetStatus(request_id):
                    await router.say(ready_status(request_id=request_id))
                case Generate(request_id=name):
                    await router.say(Accepted(name, 1))
                    sent = len(pack(Accepted(name, 1)))
                case Credit(consumed_bytes=consumed):
                    pass
        tokens = Tokens(name, offset, [WORD])
        await router.say(tokens)
        sent, offset = sent + len(pack(tokens)), offset + 1
        assert offset < TOKENS, "it is sent on and on"


def memory(kept: object) -> int:
    """Bytes of an object and of all that only it holds."""
    nbytes = sys.getsizeof(kept)
    match kept:
        case msgspec.Struct():
            nbytes += sum(memory(getattr(kept, name)) for name in kept.__struct_fields__)
        case list() | tuple():
            nbytes += sum(map(memory, kept))
    return nbytes


def waiting(stream: Stream) -> int:
    """Bytes of memory of the messages that wait for who iterates."""
    return sys.getsizeof(stream._messages) + sum(map(memory, stream._messages))


async def settled(client: Client, adapter: Adapter) -> tuple[int, int, int]:
    """What is kept of the only stream in client, connection and kernel, once nothing moves any more and the window is shut."""
    seen: list[tuple[int, int, int]] = []
    async with asyncio.timeout(LIMIT_S):
        while len(seen) < SAME or len(set(seen[-SAME:])) > 1 or not sum(seen[-1]):
            await asyncio.sleep(LOOK_EVERY_S)
            transports = [connection.transport for connection in adapter.server.server_state.connections]
            unwritten = sum(transport.get_write_buffer_size() for transport in transports)
            seen.append((sum(map(waiting, client._streams.values())), unwritten, unsent(adapter.port)))
    return seen[-1]


async def test_what_is_kept_for_a_reader_that_stops_is_little(files: ModelFiles, text: Text, tmp_path: Path) -> None:
    async with (
        wire_router(tmp_path) as router,
        Client(client_address(tmp_path)) as client,
        running(files, text, client) as adapter,
    ):
        speaking = asyncio.ensure_future(worst_case(router))
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            reader.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(reader, ("127.0.0.1", adapter.port))
            await loop.sock_sendall(reader, request(adapter.port, TOKENS))
            assert (await loop.sock_recv(reader, 12)).endswith(b" 200")
            kept = await settled(client, adapter)
            assert not speaking.done(), speaking
            assert WINDOW_BYTES < sum(kept) < MOST_BYTES, kept
        speaking.cancel()


@pytest.mark.long
@pytest.mark.system
@pytest.mark.parametrize("how", ["http", "zeromq"])
def test_a_reader_that_stops_costs_little(how: str) -> None:
    with bench() as running:
        running.measure(4, 2_000)
        cost = measure(running, READERS, how)
    assert cost.total < MOST_BYTES, cost
