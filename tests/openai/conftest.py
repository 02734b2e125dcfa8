"""The adapter on a loopback port, in this process, in front of a scripted router and with the real tokenizer of SmolLM2."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest

from router.client import Client
from router.openai.__main__ import Server, http_config, listen
from router.openai.keys import Keys
from router.openai.serving import Serving
from router.openai.text import Text
from tests.openai.fake_router import FakeClient, says
from wire.config import Config
from wire.model_files import ModelFiles, find_model


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    return find_model("smollm2")


@pytest.fixture(scope="session")
def text(files: ModelFiles) -> Text:
    return Text(files)


@dataclass
class Adapter:
    """A running adapter. `http` speaks to it, `router` is what stands behind it."""

    router: FakeClient | Client
    serving: Serving
    server: Server
    port: int
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **more: object) -> openai.AsyncOpenAI:
        """The real client, pointed here."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | more))

    def say(self, whole: str, per_message: int = 1, **more: object) -> list[int]:
        """Let the router generate this text; its token ids."""
        ids = self.serving.text.encode(whole, add_special=False)
        self.router.script = says([ids[i : i + per_message] for i in range(0, len(ids), per_message)], **more)
        return ids


Start = Callable[..., Awaitable[Adapter]]


@asynccontextmanager
async def running(
    files: ModelFiles, text: Text, router: FakeClient | Client | None = None, **settings: object
) -> AsyncIterator[Adapter]:
    """An adapter that serves until the block ends. `router`: what it speaks to, if that is not a scripted one."""
    router = router or FakeClient(says([]))
    config = Config(ctx=2048, **settings)
    serving = Serving(router, files, text, config, Keys(config))
    listener = listen("127.0.0.1", 0)
    server = Server(http_config(serving))
    port = listener.getsockname()[1]
    task = asyncio.ensure_future(server.serve([listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        yield Adapter(router, serving, server, port, http)
    server.should_exit = True
    await task


@pytest.fixture
async def start(files: ModelFiles, text: Text) -> AsyncIterator[Start]:
    """Starts adapters: `await start(api_key_file=...)`."""
    async with AsyncExitStack() as stack:

        async def started(**settings: object) -> Adapter:
            return await stack.enter_async_context(running(files, text, **settings))

        yield started


@pytest.fixture
async def adapter(start: Start) -> Adapter:
    return await start()
