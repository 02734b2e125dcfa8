"""Clients on other machines that go without a word: the wire still stands and carries nothing. Their requests are cancelled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.client import Client
from tests.router.stage import ids_of, until
from tests.router.test_gate import ANN, BOB, SERVER, config, folder, gated, guest  # noqa: F401
from wire import sockets
from wire.config import Config
from wire.messages import Cancel, Generate, Submit, Tokens

HEARTBEAT_MS = 400  # and three times that without a word is the end
LIMIT_S = 30


class Relay:
    """Hands bytes on between a port of its own and the router's. `stop`: no more, in either direction, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._flows = asyncio.Event()
        self._flows.set()
        self.ends: list[asyncio.StreamWriter] = []

    def stop(self) -> None:
        self._flows.clear()

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ends.append(writer)
        if not self._flows.is_set():
            return  # who comes then waits in vain
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self.ends.append(back)
        await asyncio.gather(self._hand_on(reader, back), self._hand_on(there, writer), return_exceptions=True)

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flows.wait()
            writer.write(data)


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[tuple[Relay, int]]:
    """A relay to that port, and its own."""
    relay = Relay(port)
    server = await asyncio.start_server(relay.met, "127.0.0.1", 0)
    try:
        yield relay, server.sockets[0].getsockname()[1]
    finally:
        for end in relay.ends:
            end.transport.abort()
        server.close()


def test_a_guest_that_goes_without_a_word_is_noticed(run, folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setattr(sockets, "TCP_HEARTBEAT_MS", HEARTBEAT_MS)

    async def story():
        async with gated(folder, config) as s, s.client() as local, guest(s, BOB) as bob:
            port = int(s.server._gate.address.rpartition(":")[2])
            async with relayed(port) as (relay, near), Client(f"tcp://127.0.0.1:{near}", curve=(SERVER[0], ANN[1])) as ann:
                worker = await s.worker()
                stream = ann.submit(Generate("r", [1], max_tokens=100))
                await worker.next(Submit)
                await worker.say(Tokens("r", 0, [0]))
                assert (await asyncio.wait_for(anext(stream), LIMIT_S)).tokens == [0]
                relay.stop()
                async with asyncio.timeout(LIMIT_S):
                    assert await worker.next(Cancel) == Cancel("r")
                await worker.finish("r", "cancelled", 1)
                gone = 'parkade_requests_finished_total{reason="client_lost"} 1.0'
                await until(local, lambda status: gone in status.metrics and not status.slots)
                worker.plays = True
                assert await ids_of(bob.generate([1], max_tokens=3)) == [0, 1, 2]  # who is there is not taken for gone

    run(story())
