"""POST /v1/chat/completions: shapes, what is asked of the router, stop strings, logprobs, usage."""

import json

import pytest

from router.openai.params import sibling_seed
from tests.openai.conftest import Adapter
from tests.openai.fake_router import says
from wire.messages import Logprob, Usage

MESSAGES = [{"role": "user", "content": "Say something."}]
PATH = "/v1/chat/completions"


def events(body: str) -> list[dict]:
    """The JSON of a stream's events; checks that it ends with [DONE]."""
    lines = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def content(chunks: list[dict], index: int = 0) -> str:
    return "".join(c["delta"]["content"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_whole_answer(adapter: Adapter) -> None:
    ids = adapter.say(
        "Hello there, wörld 🙂!", usage=Usage(cached_tokens=7, parks=2, parked_ms=30, recomputed_tokens=5, exact=True)
    )
    reply = (await adapter.http.post(PATH, json={"model": "smollm2", "messages": MESSAGES})).json()
    prompt = adapter.serving.text.chat_prompt(MESSAGES)
    assert adapter.router.asked.prompt_token_ids == prompt
    assert reply["id"] == adapter.router.asked.request_id
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there, wörld 🙂!", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert reply["parkade"] == {"parks": 2, "parked_ms": 30, "recomputed_tokens": 5, "exact": True}
    assert reply["created"] > 0
    assert reply["system_fingerprint"].startswith("fp_")


async def test_stream_without_usage(adapter: Adapter) -> None:
    adapter.say("Hello there, wörld 🙂!", reason="length", usage=Usage(parks=1, exact=True))
    answer = await adapter.http.post(PATH, json={"messages": MESSAGES, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"content": "", "role": "assistant"}, "logprobs": None, "finish_reason": None}
    ]
    assert content(chunks) == "Hello there, wörld 🙂!"
    assert "�" not in answer.text
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["parkade"]["parks"] for chunk in chunks if "parkade" in chunk] == [1]
    assert "parkade" in chunks[-1]
    assert {chunk["id"] for chunk in chunks} == {adapter.router.asked.request_id}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_stream_with_usage(adapter: Adapter) -> None:
    ids = adapter.say("Hello")
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await adapter.http.post(PATH, json=body)).text)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    assert chunks[-1]["parkade"] == {"parks": 0, "parked_ms": 0, "recomputed_tokens": 0, "exact": True}
    assert all("parkade" not in chunk for chunk in chunks[:-1])


async def test_tokens_of_one_message_are_one_chunk(adapter: Adapter) -> None:
    adapter.say("one two three four five six", per_message=3)
    chunks = events((await adapter.http.post(PATH, json={"messages": MESSAGES, "stream": True})).text)
    assert len(chunks) == 1 + 2 + 1  # role, two messages, finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "shown"), [(False, "one two th"), (True, "one two three fo")])
@pytest.mark.parametrize("per_message", [1, 4, 100])
async def test_stop_string_across_tokens(adapter: Adapter, stream: bool, include: bool, shown: str, per_message: int) -> None:
    ids = adapter.say("one two three four five six seven", per_message)
    body = {"messages": MESSAGES, "stop": ["nothing", "ree fo"], "include_stop_str_in_output": include, "return_token_ids": True}
    answer = await adapter.http.post(PATH, json=body | {"stream": stream, "stream_options": None})
    assert adapter.router.streams[0].cancelled.is_set()
    if stream:
        chunks = events(answer.text)
        assert content(chunks) == shown
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        generated = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    else:
        reply = answer.json()
        assert reply["choices"][0]["message"]["content"] == shown
        assert reply["choices"][0]["finish_reason"] == "stop"
        generated = reply["choices"][0]["token_ids"]
        assert reply["usage"]["completion_tokens"] == len(generated)
    decode = adapter.serving.text.decode
    assert generated == ids[: len(generated)]
    assert "ree fo" in decode(generated)
    assert "ree fo" not in decode(generated[:-1])


async def test_text_held_back_for_a_stop_string_comes_at_the_end(adapter: Adapter) -> None:
    adapter.say("one two three", reason="length")
    chunks = events((await adapter.http.post(PATH, json={"messages": MESSAGES, "stream": True, "stop": "three four"})).text)
    assert content(chunks) == "one two three"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_within_the_minimum_length_does_not_count(adapter: Adapter) -> None:
    adapter.say("one two three two four")
    reply = (await adapter.http.post(PATH, json={"messages": MESSAGES, "stop": " two", "min_tokens": 3})).json()
    assert reply["choices"][0]["message"]["content"] == "one two three"


async def test_stop_token_is_not_shown(adapter: Adapter) -> None:
    text = adapter.serving.text
    word = text.encode(" stop", add_special=False)
    assert len(word) == 1
    hello = text.encode("Hello", add_special=False)
    adapter.router.script = says([hello, word])
    reply = (await adapter.http.post(PATH, json={"messages": MESSAGES, "stop_token_ids": word, "return_token_ids": True})).json()
    assert adapter.router.asked.stop_token_ids == word
    assert reply["choices"][0]["message"]["content"] == "Hello"
    assert reply["choices"][0]["token_ids"] == hello + word


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers(adapter: Adapter, stream: bool) -> None:
    adapter.say("Hello", usage=Usage(cached_tokens=3, parks=1, parked_ms=10, recomputed_tokens=2, exact=True))
    body = {"messages": MESSAGES, "n": 3, "seed": 42, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await adapter.http.post(PATH, json=body)
    asked = [stream.generate for stream in adapter.router.streams]
    assert [g.sampling.seed for g in asked] == [42, sibling_seed(42, 1), sibling_seed(42, 2)]
    assert len({g.request_id for g in asked}) == 3
    assert len({g.sampling.seed for g in asked}) == 3
    assert [g.sibling_of for g in asked] == ["", asked[0].request_id, asked[0].request_id]
    if stream:
        chunks = events(answer.text)
        assert [content(chunks, i) for i in range(3)] == ["Hello"] * 3
        assert sorted(c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]) == [0, 1, 2]
        last = chunks[-1]
    else:
        last = answer.json()
        assert [choice["message"]["content"] for choice in last["choices"]] == ["Hello"] * 3
    prompt = len(asked[0].prompt_token_ids)
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert last["parkade"] == {"parks": 3, "parked_ms": 30, "recomputed_tokens": 6, "exact": True}


async def test_parkade_rides_on_the_last_finish_when_no_usage_is_asked_for(adapter: Adapter) -> None:
    adapter.say("Hello")
    chunks = events((await adapter.http.post(PATH, json={"messages": MESSAGES, "n": 2, "stream": True})).text)
    assert ["parkade" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_logprobs(adapter: Adapter) -> None:
    ids = adapter.say("Hi 🙂", logprobs=lambda token: Logprob(token, -0.5, [(token, -0.5), (token + 1, float("-inf"))]))
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = (await adapter.http.post(PATH, json=body)).json()["choices"][0]["logprobs"]
    assert adapter.router.asked.sampling.logprobs == 2
    assert whole["refusal"] is None
    assert bytes(byte for entry in whole["content"] for byte in entry["bytes"]).decode() == "Hi 🙂"
    assert len(whole["content"]) == len(ids)
    assert [(e["logprob"], [t["logprob"] for t in e["top_logprobs"]]) for e in whole["content"]] == [
        (-0.5, [-0.5, -9999.0])
    ] * len(ids)
    chunks = events((await adapter.http.post(PATH, json=body | {"stream": True})).text)
    streamed = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == whole["content"]


async def test_return_token_ids(adapter: Adapter) -> None:
    ids = adapter.say("Hi 🙂 there")
    body = {"messages": MESSAGES, "return_token_ids": True}
    reply = (await adapter.http.post(PATH, json=body)).json()
    assert reply["choices"][0]["token_ids"] == ids
    assert reply["prompt_token_ids"] == adapter.router.asked.prompt_token_ids
    chunks = events((await adapter.http.post(PATH, json=body | {"stream": True})).text)
    assert all("token_ids" in chunk["choices"][0] for chunk in chunks)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [reply["prompt_token_ids"]]


async def test_parameters_reach_the_router(adapter: Adapter) -> None:
    adapter.say("Hello")
    body = {
        "messages": MESSAGES,
        "max_completion_tokens": 5.0,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -100},
        "seed": -7,
        "ignore_eos": True,
        "priority": -100.0,
        "user": "somebody",
        "metadata": {"a": "b"},
        "something_new": [1, {"deep": None}],
        "tools": [],
        "response_format": {"type": "text"},
        "store": False,
    }
    assert (await adapter.http.post(PATH, json=body)).status_code == 200
    asked = adapter.router.asked
    assert (asked.max_tokens, asked.min_tokens, asked.ignore_eos, asked.priority) == (5, 2, True, -100)
    drawn = asked.sampling
    assert (drawn.temperature, drawn.top_k, drawn.min_p, drawn.repetition_penalty) == (0, 0, 0.1, 1.1)
    assert 0 < drawn.top_p < 1e-6
    assert (drawn.presence_penalty, drawn.frequency_penalty, drawn.logit_bias, drawn.seed) == (-1, 0.5, {5: -100}, -7)


async def test_defaults(adapter: Adapter) -> None:
    adapter.say("Hello")
    await adapter.http.post(PATH, json={"messages": MESSAGES, "max_tokens": None, "temperature": None, "stop": None, "n": None})
    asked = adapter.router.asked
    assert (asked.max_tokens >= 2**31, asked.priority) == (True, 0)
    assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.logprobs) == (1.0, None, None)


async def test_huge_max_tokens_is_clipped_by_the_context_and_no_error(adapter: Adapter) -> None:
    adapter.say("Hello")
    answer = await adapter.http.post(PATH, json={"messages": MESSAGES, "max_tokens": 10**30})
    assert answer.status_code == 200


async def test_contents_and_roles(adapter: Adapter) -> None:
    adapter.say("Hello")
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Well?"},
    ]
    assert (await adapter.http.post(PATH, json={"messages": messages})).status_code == 200
    plain = [("system", "Be\nkind."), ("user", "Hi"), ("assistant", ""), ("user", "Well?")]
    expected = adapter.serving.text.chat_prompt([{"role": role, "content": said} for role, said in plain])
    assert adapter.router.asked.prompt_token_ids == expected


async def test_tools_that_may_not_be_called_are_ignored(adapter: Adapter) -> None:
    adapter.say("Hello")
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert (await adapter.http.post(PATH, json=body)).status_code == 200
