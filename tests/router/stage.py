"""Real sockets for tests of the router: a server in this loop, a scripted worker, raw peers."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from router.client import Client
from router.server import Server
from wire.codec import Decoder, frames, unbundle
from wire.messages import (
    Cancel,
    Counters,
    Finished,
    Hello,
    Load,
    Message,
    Park,
    Ping,
    PoolCells,
    RouterToClient,
    RouterToWorker,
    Slot,
    Status,
    Submit,
    Tokens,
    Usage,
)
from wire.sockets import client_address, dealer_socket, worker_address

PATIENCE_S = 20.0


class Stage:
    """A running server, and ways to meet it."""

    def __init__(self, server: Server, run_dir: str, ended: asyncio.Task[None]) -> None:
        self.server, self.run_dir, self.ended = server, run_dir, ended
        self._peers: list[zmq.asyncio.Socket] = []
        self._workers: list[ScriptedWorker] = []

    @property
    def address(self) -> str:
        return client_address(self.run_dir)

    def client(self) -> Client:
        return Client(self.address)

    async def worker(self, identity: bytes = b"cpu0-1-a", **options: object) -> "ScriptedWorker":
        worker = ScriptedWorker(self._peer(worker_address(self.run_dir), identity), identity, **options)
        self._workers.append(worker)
        await worker.say_hello()
        return worker

    def raw(self) -> zmq.asyncio.Socket:
        """A client that may send anything."""
        return self._peer(self.address, None)

    def _peer(self, address: str, identity: bytes | None) -> zmq.asyncio.Socket:
        socket = dealer_socket(zmq.asyncio.Context.instance(), address, identity)
        self._peers.append(socket)
        return socket

    async def close(self) -> None:
        for worker in self._workers:
            await worker.die()
        for peer in self._peers:
            peer.close(linger=0)


class ScriptedWorker:
    """Says what a test tells it to say, and answers pings. With `plays` it serves every Submit: token i of a stream is i."""

    def __init__(self, socket: zmq.asyncio.Socket, identity: bytes, slots: int = 8, plays: bool = False) -> None:
        self.socket, self.identity, self.slots, self.plays = socket, identity, slots, plays
        self.running: list[str] = []
        self.step = 0
        self.heard: list[Message] = []
        self._decoder: Decoder[RouterToWorker] = Decoder(RouterToWorker)
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    async def say(self, message: Message) -> None:
        await self.socket.send_multipart(frames(message))

    async def say_hello(self) -> None:
        name = self.identity.split(b"-")[0].decode()
        await self.say(Hello(name, 1, "m", "cpu", "f32", 65536, 16, self.slots, 4096, True))
        await self.say_load()

    async def say_load(self) -> None:
        self.step += 1
        slots = [Slot(number, request_id, "running") for number, request_id in enumerate(self.running)]
        await self.say(Load(self.step, PoolCells(free=65536), 0, len(slots), 0, slots, Counters(), True))

    async def next(self, *kinds: type) -> Message:
        """The next thing it is told, of these kinds; others before it are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self.heard:
                    message = self.heard.pop(0)
                    if isinstance(message, kinds or Message):
                        return message
                self._news.clear()
                await self._news.wait()

    async def finish(self, request_id: str, reason: str, completion: int) -> None:
        if request_id in self.running:
            self.running.remove(request_id)
        await self.say_load()
        await self.say(Finished(request_id, reason, Usage(3, completion)))

    async def play(self, submit: Submit, tokens_each: int = 1) -> None:
        """The whole rest of a stream."""
        generate = submit.generate
        for offset in range(len(submit.delivered), generate.max_tokens, tokens_each):
            tokens = list(range(offset, min(offset + tokens_each, generate.max_tokens)))
            await self.say(Tokens(generate.request_id, offset, tokens))
        await self.finish(generate.request_id, "length", generate.max_tokens)

    async def die(self) -> None:
        """As a SIGKILL would look: the connection ends, without a word."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()
        self.socket.close(linger=0)

    async def _listen(self) -> None:
        while True:
            message = self._decoder.decode(await self.socket.recv_multipart())
            match message:
                case Ping():
                    await self.say_load()
                    continue
                case Submit():
                    self.running.append(message.generate.request_id)
                    if self.plays:
                        await self.play(message)
                case Cancel(request_id) if self.plays:
                    await self.finish(request_id, "cancelled", 0)
                case Park():
                    pass
            self.heard.append(message)
            self._news.set()


class RawReader:
    """Decodes what a raw client is sent."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self._decoder: Decoder[RouterToClient] = Decoder(RouterToClient)
        self._heard: list[Message] = []

    async def next(self, *kinds: type) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self._heard:
                    message = self._heard.pop(0)
                    if isinstance(message, kinds or Message):
                        return message
                self._heard += map(self._decoder.unpack, unbundle(await self.socket.recv_multipart()))


@asynccontextmanager
async def stage(max_queued: int = 10_000, drain_s: float = 5.0) -> AsyncIterator[Stage]:
    """A server on fresh sockets, stopped at the end."""
    run_dir = tempfile.mkdtemp(prefix="parkade-")
    server = Server(run_dir, max_queued, drain_s)
    server.open()
    running = asyncio.create_task(server.run())
    stage = Stage(server, run_dir, running)
    try:
        yield stage
    finally:
        await stage.close()
        server.stop()
        server.stop()
        await running
        shutil.rmtree(run_dir)


async def until(client: Client, condition: Callable[[Status], bool]) -> Status:
    """Ask for the status until the condition holds; each answer is a round trip, so nothing is polled blindly."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(status := await client.status()):
            await asyncio.sleep(0)
    return status


async def ids_of(stream: AsyncIterator[Message]) -> list[int]:
    """All tokens of a stream, whose offsets must follow one another, to its Finished."""
    tokens: list[int] = []
    async for message in stream:
        if isinstance(message, Tokens):
            assert message.offset == len(tokens)
            tokens += message.tokens
    return tokens
