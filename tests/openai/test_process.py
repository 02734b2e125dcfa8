"""`python -m router.openai` as a process: how it starts, how it ends, and real messages to a router."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import zmq
import zmq.asyncio

from tests.openai.fake_router import ready_status
from tests.openai.test_bad_input import error_of
from tests.openai.test_chat import events
from wire.codec import Decoder, frames
from wire.messages import Accepted, Cancel, ClientToRouter, Credit, Finished, Generate, GetStatus, Message, Tokens, Usage
from wire.service import USER_ERROR
from wire.sockets import client_address, router_socket

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


class WireRouter:
    """The router's end of the socket, in the hands of a test."""

    def __init__(self, run_dir: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = router_socket(self.context, client_address(run_dir))
        self.decoder = Decoder(ClientToRouter)
        self.peer = b""

    async def next(self) -> Message:
        """The next message that is no Credit. GetStatus is answered."""
        while True:
            self.peer, *parts = await self.socket.recv_multipart()
            match self.decoder.decode(parts):
                case GetStatus(request_id):
                    await self.say(ready_status(request_id=request_id))
                case Credit():
                    pass
                case message:
                    return message

    async def say(self, message: Message) -> None:
        await self.socket.send_multipart([self.peer, *frames(message)])


@asynccontextmanager
async def wire_router(run_dir: Path) -> AsyncIterator[WireRouter]:
    router = WireRouter(run_dir)
    try:
        yield router
    finally:
        router.socket.close(linger=0)
        router.context.term()


@asynccontextmanager
async def process(run_dir: Path, *flags: str, **options: object) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The adapter's process and its address, once it listens. `options` are subprocess's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "router.openai", "--run-dir", str(run_dir), "--port", str(port), *flags]
    running = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, **options)
    try:
        while b"listening on" not in (line := await running.stderr.readline()):
            assert line, "it ended before it listened"
        yield running, f"http://127.0.0.1:{port}"
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


async def test_without_a_router_it_says_so_and_ends_cleanly(run_dir: Path) -> None:
    async with process(run_dir) as (running, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        health, chat = await asyncio.gather(http.get("/health"), http.post(CHAT, json=HELLO))
        assert error_of(health, 503)["code"] == "router_lost"
        assert error_of(chat, 503)["code"] == "router_lost"
        assert (await http.get("/v1/models")).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0


async def test_a_drain_finishes_what_runs_and_refuses_the_rest(run_dir: Path) -> None:
    async with (
        wire_router(run_dir) as router,
        process(run_dir, "--drain-s", "60") as (running, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        old = asyncio.ensure_future(http.post(CHAT, json=HELLO | {"stream": True}))
        asked = await router.next()
        assert isinstance(asked, Generate)
        await router.say(Accepted(asked.request_id, 1))
        running.send_signal(signal.SIGTERM)
        while b"draining 1 answers" not in await running.stderr.readline():
            pass
        error = error_of(await http.post(CHAT, json=HELLO), 503)
        assert error["code"] == "draining"
        await router.say(Tokens(asked.request_id, 0, [19556]))
        await router.say(Finished(asked.request_id, "stop", Usage(3, 1, exact=True)))
        chunks = events((await old).text)
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "stop"
        assert await running.wait() == 0


async def test_a_second_signal_ends_at_once_and_says_so(run_dir: Path) -> None:
    async with (
        wire_router(run_dir) as router,
        process(run_dir, "--drain-s", "1000") as (running, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        whole = asyncio.ensure_future(http.post(CHAT, json=HELLO))
        streamed = asyncio.ensure_future(http.post(CHAT, json=HELLO | {"stream": True}))
        asked = [await router.next(), await router.next()]
        for one in asked:
            await router.say(Accepted(one.request_id, 1))
            await router.say(Tokens(one.request_id, 0, [19556]))
        running.send_signal(signal.SIGTERM)
        while b"draining 2 answers" not in await running.stderr.readline():
            pass
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0
        assert error_of(await whole, 503)["code"] == "draining"
        assert events((await streamed).text)[-1]["error"]["code"] == "draining"
        cancelled = [await router.next(), await router.next()]
        assert sorted(one.request_id for one in cancelled) == sorted(one.request_id for one in asked)
        assert all(isinstance(one, Cancel) for one in cancelled)


async def test_a_router_that_dies_ends_the_stream_with_an_error(run_dir: Path) -> None:
    async with process(run_dir) as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        async with wire_router(run_dir) as router:
            asking = asyncio.ensure_future(http.post(CHAT, json=HELLO | {"stream": True}))
            asked = await router.next()
            await router.say(Accepted(asked.request_id, 1))
            await router.say(Tokens(asked.request_id, 0, [19556]))
        chunks = events((await asking).text)
        assert chunks[-1]["error"]["code"] == "router_lost"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "/nowhere/model.gguf"], "model"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file"),
        (["--host", "nowhere.invalid"], "--host"),
    ],
)
async def test_what_the_user_has_to_change_is_one_line(run_dir: Path, flags: list[str], told: str) -> None:
    command = [sys.executable, "-m", "router.openai", "--run-dir", str(run_dir), "--port", "0", *flags]
    running = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, log = await running.communicate()
    assert running.returncode == USER_ERROR
    assert told in log.decode().splitlines()[-1]
