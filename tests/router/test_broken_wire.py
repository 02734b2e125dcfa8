"""A proxy between router and worker stops, or cuts the connection in the middle of a stream: no token is lost or doubled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from tests.router.stage import ScriptedWorker, Stage, ids_of, stage, until
from wire.messages import Submit, Tokens
from wire.sockets import dealer_socket, worker_address

pytestmark = pytest.mark.system


class Proxy:
    """Hands bytes on between a Unix socket of its own and the router's, unless it is stopped."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.path = target + ".proxy"
        self.flows = asyncio.Event()
        self.flows.set()
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_unix_connection(self.target)
        self._writers += [writer, back]
        await asyncio.gather(self._hand_on(reader, back), self._hand_on(there, writer))

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    def cut(self) -> None:
        """What is under way is lost; who wants to may connect again."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def proxied(s: Stage) -> AsyncIterator[tuple[Proxy, ScriptedWorker]]:
    proxy = Proxy(worker_address(s.run_dir).removeprefix("ipc://"))
    server = await asyncio.start_unix_server(proxy.met, proxy.path)
    identity = b"cpu0-1-a"
    worker = ScriptedWorker(dealer_socket(zmq.asyncio.Context.instance(), "ipc://" + proxy.path, identity), identity, plays=True)
    await worker.say_hello()
    try:
        yield proxy, worker
    finally:
        await worker.die()
        proxy.cut()
        server.close()


def test_a_wire_that_stands_still_costs_a_gap(run):
    async def story():
        async with stage() as s, s.client() as client, proxied(s) as (proxy, worker):
            worker.plays = False
            reading = asyncio.create_task(ids_of(client.generate([1], max_tokens=50, request_id="r")))
            submit = await worker.next(Submit)
            await worker.say(Tokens("r", 0, [0, 1]))
            await until(client, lambda status: "parkade_tokens_generated_total 2.0" in status.metrics)
            proxy.flows.clear()
            for offset in range(2, 20):
                await worker.say(Tokens("r", offset, [offset]))
            status = await client.status()
            assert "parkade_tokens_generated_total 2.0" in status.metrics
            proxy.flows.set()
            for offset in range(20, 50):
                await worker.say(Tokens("r", offset, [offset]))
            await worker.finish("r", "length", 50)
            assert await reading == list(range(50))
            assert "parkade_requests_replayed_total 0.0" in (await client.status()).metrics
            assert submit.generate.request_id == "r" and proxy.connections == 1

    run(story())


def test_what_a_cut_wire_has_lost_is_asked_for_again(run):
    async def story():
        async with stage() as s, s.client() as client, proxied(s) as (proxy, worker):
            worker.plays = False
            reading = asyncio.create_task(ids_of(client.generate([1], max_tokens=30, request_id="r")))
            await worker.next(Submit)
            await worker.say(Tokens("r", 0, [0, 1]))
            await until(client, lambda status: "parkade_tokens_generated_total 2.0" in status.metrics)
            proxy.flows.clear()
            for offset in range(2, 10):
                await worker.say(Tokens("r", offset, [offset]))
            worker.plays = True
            proxy.cut()
            proxy.flows.set()
            async with asyncio.timeout(20):
                while proxy.connections < 2:
                    await worker.say_load()
            for offset in range(10, 30):  # it knows of no loss
                await worker.say(Tokens("r", offset, [offset]))
            assert await reading == list(range(30))
            assert (await worker.next(Submit)).delivered == [0, 1]

    run(story())
