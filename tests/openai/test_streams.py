"""Streams that pause, fail or lose their client."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from parkade.api import event_lines
from router.client import RejectedError
from router.openai import answer as answers
from router.openai import streaming
from tests.openai.conftest import Adapter
from tests.openai.fake_router import FakeStream, says
from tests.openai.test_bad_input import error_of
from tests.openai.test_chat import events
from wire.messages import Finished, Message, Notice, Tokens, Usage

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
STREAM = HELLO | {"stream": True}


async def test_headers_go_out_when_the_router_has_accepted(adapter: Adapter) -> None:
    adapter.router.script = says([[1]], wait_after=0)
    async with adapter.http.stream("POST", CHAT, json=STREAM) as answer:
        assert answer.status_code == 200
        assert adapter.router.streams[0].taken == 0
    await adapter.router.streams[0].cancelled.wait()


async def test_comments_say_when_it_is_parked(adapter: Adapter) -> None:
    adapter.say("one two three", notices={1: "parked", 2: "resumed"})
    answer = await adapter.http.post(CHAT, json=STREAM)
    blocks = answer.text.split("\n\n")
    assert [block for block in blocks if block.startswith(":")] == [": preempted", ": resumed"]
    assert blocks.index(": preempted") < blocks.index(": resumed")
    assert "".join(c["choices"][0]["delta"]["content"] for c in events(answer.text)) == "one two three"


@pytest.mark.parametrize("parked", [False, True])
async def test_silence_is_filled_with_keep_alives(adapter: Adapter, parked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the interval that belongs to the state is short: the other would never come up in this test."""
    monkeypatch.setattr(streaming, "PARKED_KEEP_ALIVE_S", 0.01 if parked else 1000)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 1000 if parked else 0.01)

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        me = stream.generate.request_id
        if parked:
            yield Notice(me, "parked")
        await stream.cancelled.wait()
        yield Finished(me, "cancelled", Usage())

    adapter.router.script = script
    async with adapter.http.stream("POST", CHAT, json=STREAM) as answer:
        seen = []
        async for line in event_lines(answer):
            seen += [line] if line else []
            if seen.count(": keep-alive") == 3:
                break
    assert seen == [": preempted"] * parked + [": keep-alive"] * 3


async def test_an_error_in_the_middle_is_an_event(adapter: Adapter) -> None:
    adapter.say("one two", reason="error", code="kv_cache_full", error="The pool is full.")
    chunks = events((await adapter.http.post(CHAT, json=STREAM)).text)
    assert chunks[-1] == {
        "error": {"message": "The pool is full.", "type": "server_error", "param": None, "code": "kv_cache_full"}
    }
    assert all("error" not in chunk for chunk in chunks[:-1])
    assert adapter.router.streams[0].cancelled.is_set()


async def test_the_error_of_one_ends_all_of_n(adapter: Adapter) -> None:
    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        me = stream.generate.request_id
        yield Tokens(me, 0, [1])
        if stream.generate.sibling_of:
            yield Finished(me, "error", Usage(), "lost", "worker_lost")
        await stream.cancelled.wait()

    adapter.router.script = script
    chunks = events((await adapter.http.post(CHAT, json=STREAM | {"n": 2})).text)
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert all(stream.cancelled.is_set() for stream in adapter.router.streams)


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("kv_cache_full", 503, True),
        ("worker_lost", 503, True),
        ("router_lost", 503, True),
        ("drain_timeout", 503, True),
        ("context_length_exceeded", 400, False),
        ("", 500, False),
    ],
)
async def test_an_error_of_a_whole_answer_is_a_status(adapter: Adapter, code: str, status: int, retry: bool) -> None:
    adapter.say("one", reason="error", code=code, error="It went wrong.")
    answer = await adapter.http.post(CHAT, json=HELLO)
    assert error_of(answer, status)["message"] == "It went wrong."
    assert ("retry-after" in answer.headers) == retry


@pytest.mark.parametrize("body", [HELLO, STREAM])
@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [("queue_full", 429, True), ("draining", 503, True), ("context_length_exceeded", 400, False), ("bad_request", 400, False)],
)
async def test_rejections(adapter: Adapter, body: dict, code: str, status: int, retry: bool) -> None:
    adapter.say("Hello")
    adapter.router.rejections[1] = RejectedError(code, "no room", {"max_queued": 256})
    answer = await adapter.http.post(CHAT, json=body | {"n": 3})
    error = error_of(answer, status)
    assert error["code"] == code
    assert "256" in error["message"]
    assert ("retry-after" in answer.headers) == retry
    assert len(adapter.router.streams) == 3
    assert all(stream.cancelled.is_set() for stream in adapter.router.streams)


async def test_a_router_that_does_not_answer(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ACCEPT_TIMEOUT_S", 0.01)
    adapter.router.accept = asyncio.Event()
    assert error_of(await adapter.http.post(CHAT, json=HELLO), 503)["code"] == "router_lost"
    assert adapter.router.streams[0].cancelled.is_set()


@pytest.mark.parametrize("stage", ["queued", "accepted", "running", "parked"])
@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels(adapter: Adapter, stream: bool, stage: str) -> None:
    reached = asyncio.Event()
    if stage == "queued":
        adapter.router.accept = asyncio.Event()

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        me = stream.generate.request_id
        if stage in ("running", "parked"):
            yield Tokens(me, 0, [1])
        if stage == "parked":
            yield Notice(me, "parked")
        reached.set()
        await asyncio.Event().wait()

    adapter.router.script = script
    async with httpx.AsyncClient(base_url=adapter.url, timeout=30) as client:
        asking = asyncio.ensure_future(client.post(CHAT, json=HELLO | {"stream": stream, "n": 2}))
        await adapter.router.submitted.wait()
        if stage != "queued":
            await reached.wait()
        asking.cancel()
        await asyncio.wait([asking])
    for one in adapter.router.streams:
        await one.cancelled.wait()
    await adapter.serving.idle.wait()
    assert len(adapter.router.streams) == 2


async def test_a_client_that_does_not_read_stops_the_taking_of_messages(adapter: Adapter) -> None:
    """Nothing is taken from the router beyond what the socket takes in: that is what makes credit work."""
    blocked = asyncio.Event()
    text = adapter.serving.text
    big = text.encode("word " * 1000, add_special=False)

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        me = stream.generate.request_id
        for i in range(100_000):
            pull = asyncio.get_running_loop().call_later(0.5, blocked.set)  # set only if nobody asks for the next one
            yield Tokens(me, i * len(big), big)
            pull.cancel()
            await asyncio.sleep(0)  # as a real stream does, which waits for its socket now and then

    adapter.router.script = script
    async with adapter.http.stream("POST", CHAT, json=STREAM) as answer:
        assert answer.status_code == 200
        await blocked.wait()
        assert adapter.router.streams[0].taken < 4000  # about 5 KB each
