"""The real openai client against the adapter."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from router.client import RejectedError
from tests.openai.conftest import Adapter, Start
from wire.messages import Logprob

HELLO = [{"role": "user", "content": "Hello"}]


async def test_chat(adapter: Adapter) -> None:
    ids = adapter.say("Hello 🙂 you", logprobs=lambda token: Logprob(token, -1.0, [(token, -1.0)]))
    async with adapter.openai() as client:
        reply = await client.chat.completions.create(model="smollm2", messages=HELLO, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in reply.choices] == ["Hello 🙂 you"] * 2
    assert reply.choices[0].logprobs.content[0].top_logprobs[0].logprob == -1.0
    assert reply.usage.completion_tokens == 2 * len(ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.parkade["exact"] is True


async def test_chat_stream(adapter: Adapter) -> None:
    adapter.say("Hello 🙂 you", notices={1: "parked", 2: "resumed"})
    async with adapter.openai() as client:
        stream = await client.chat.completions.create(
            model="smollm2", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "Hello 🙂 you"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens > 0


async def test_the_helper_that_collects_a_stream(adapter: Adapter) -> None:
    adapter.say("Hello 🙂 you")
    async with adapter.openai() as client, client.chat.completions.stream(model="smollm2", messages=HELLO) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello 🙂 you"


async def test_completions(adapter: Adapter) -> None:
    adapter.say(" upon a time")
    async with adapter.openai() as client:
        reply = await client.completions.create(model="smollm2", prompt="Once", echo=True)
        stream = await client.completions.create(model="smollm2", prompt=[1, 2, 3], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert reply.choices[0].text == "Once upon a time"
    assert text == " upon a time"


async def test_models(adapter: Adapter) -> None:
    async with adapter.openai() as client:
        assert [model.id async for model in client.models.list()] == ["smollm2"]
        assert (await client.models.retrieve("smollm2")).owned_by == "parkade"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_errors_become_the_right_exceptions(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret")
    adapter = await start(api_key_file=str(tmp_path / "keys"))
    adapter.say("Hello")
    async with adapter.openai(api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with adapter.openai(api_key="secret") as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await create(model="smollm2", messages=HELLO, n=0)
        assert wrong.value.param == "n"
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="smollm2", messages=[{"role": "user", "content": "word " * 5000}])
        assert long.value.code == "context_length_exceeded"
        adapter.router.rejections[0] = RejectedError("queue_full", "The queue is full.", {})
        with pytest.raises(openai.RateLimitError):
            await create(model="smollm2", messages=HELLO)
        adapter.say("Hello", reason="error", code="worker_lost", error="lost")
        with pytest.raises(openai.InternalServerError):
            await create(model="smollm2", messages=HELLO)
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in await create(model="smollm2", messages=HELLO, stream=True):
                pass


async def test_closing_a_stream_cancels(adapter: Adapter) -> None:
    adapter.say("one two three four", wait_after=2)
    async with adapter.openai(http_client=httpx.AsyncClient()) as client:
        stream = await client.chat.completions.create(model="smollm2", messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(30):
            await adapter.router.streams[0].cancelled.wait()
