"""POST /v1/completions: kinds of prompts, echo, logprobs, shapes."""

from collections.abc import AsyncIterator

import pytest

from tests.openai.conftest import Adapter
from tests.openai.fake_router import FakeStream
from tests.openai.test_chat import events
from wire.messages import Finished, Logprob, Message, Tokens, Usage

PATH = "/v1/completions"


async def test_whole_answer(adapter: Adapter) -> None:
    ids = adapter.say(" in a land far away", reason="length")
    reply = (await adapter.http.post(PATH, json={"model": "smollm2", "prompt": "Once"})).json()
    asked = adapter.router.asked
    assert asked.prompt_token_ids == adapter.serving.text.encode("Once")
    assert asked.max_tokens == 16
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [{"index": 0, "text": " in a land far away", "logprobs": None, "finish_reason": "length"}]
    assert reply["usage"]["completion_tokens"] == len(ids)
    assert reply["parkade"]["exact"] is True


async def test_stream(adapter: Adapter) -> None:
    adapter.say(" in a land")
    body = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await adapter.http.post(PATH, json=body)).text)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == " in a land"
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-2:] == [None, "stop"]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("parkade" not in chunk for chunk in chunks[:-1])


async def test_the_ids_of_a_streamed_prompt_come_once_and_first(adapter: Adapter) -> None:
    ids = adapter.say(" in a land far", per_message=2)
    body = {"prompt": ["Once", "Twice upon"], "stream": True, "return_token_ids": True, "stop": "never said"}
    chunks = [c for chunk in events((await adapter.http.post(PATH, json=body)).text) for c in chunk["choices"]]
    for index, prompt in enumerate(body["prompt"]):
        told = [choice for choice in chunks if choice["index"] == index]
        first, *others = (choice.get("prompt_token_ids") for choice in told)
        assert first == adapter.serving.text.encode(prompt)
        assert others and not any(others)
        assert [token for choice in told for token in choice["token_ids"]] == ids


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("Once", 1), (["Once", "Twice upon"], 2), ([1, 2.0, 3], 1), ([[1, 2], [3]], 2)],
)
async def test_kinds_of_prompts(adapter: Adapter, prompt: object, num_prompts: int) -> None:
    adapter.say(" x", usage=Usage(cached_tokens=1, exact=True))
    reply = (
        await adapter.http.post(PATH, json={"prompt": prompt, "n": 2, "seed": 1, "priority": 7, "return_token_ids": True})
    ).json()
    asked = [stream.generate for stream in adapter.router.streams]
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * num_prompts))
    encode = adapter.serving.text.encode
    given = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    expected = [encode(one) if isinstance(one, str) else [int(i) for i in one] for one in given for _ in range(2)]
    assert [g.prompt_token_ids for g in asked] == expected
    assert {g.priority for g in asked} == {7}
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == expected
    assert [bool(g.sibling_of) for g in asked] == [False, True] * num_prompts
    assert asked[1].sibling_of == asked[0].request_id
    assert [g.sampling.seed for g in asked[::2]] == [1] * num_prompts
    assert reply["usage"]["prompt_tokens"] == sum(len(ids) for ids in expected[::2])
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == num_prompts


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(adapter: Adapter, stream: bool) -> None:
    adapter.say(" upon a time")
    answer = await adapter.http.post(PATH, json={"prompt": "Once", "echo": True, "stream": stream})
    shown = answer.json()["choices"] if not stream else [c for chunk in events(answer.text) for c in chunk["choices"]]
    assert "".join(choice["text"] for choice in shown) == "Once upon a time"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_echo_with_logprobs(adapter: Adapter, stream: bool, max_tokens: int) -> None:
    text = adapter.serving.text
    prompt = text.encode("Once upon a 🙂 time")
    output = text.encode(" we", add_special=False)

    def told(token: int) -> Logprob:
        return Logprob(token, -float(token), [(token, -float(token)), (5, -1.0)])

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        me = stream.generate.request_id
        assert stream.generate.prompt_logprobs == 2
        known = [told(token) for token in prompt[1:]]
        yield Tokens(me, 0, [], [], 1, known[:3])
        yield Tokens(me, 0, [], [], 4, known[3:])
        yield Tokens(me, 0, output, [told(token) for token in output])
        yield Finished(me, "length", Usage(len(prompt), len(output)))

    adapter.router.script = script
    body = {"prompt": "Once upon a 🙂 time", "echo": True, "logprobs": 2, "max_tokens": max_tokens, "stream": stream}
    answer = await adapter.http.post(PATH, json=body)
    choices = answer.json()["choices"] if not stream else [c for chunk in events(answer.text) for c in chunk["choices"]]
    shown_ids = prompt + output if max_tokens else prompt
    whole = "Once upon a 🙂 time" + (" we" if max_tokens else "")
    assert "".join(choice["text"] for choice in choices) == whole
    logprobs = {
        name: [x for choice in choices if choice["logprobs"] for x in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert logprobs["token_logprobs"] == [None] + [-float(token) for token in shown_ids[1:]]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -float(prompt[1]), text.token_text(5): -1.0}
    for token, name, offset in zip(shown_ids, logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert whole[offset:].startswith(name)
            assert name == text.token_text(token)
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == (len(output) if max_tokens else 0)


async def test_logprobs_without_echo(adapter: Adapter) -> None:
    ids = adapter.say(" we go", logprobs=lambda token: Logprob(token, -0.5))
    choice = (await adapter.http.post(PATH, json={"prompt": "Here", "logprobs": 0})).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * len(ids)
    assert choice["logprobs"]["text_offset"][0] == 0
    assert choice["logprobs"]["top_logprobs"] == [{name: -0.5} for name in choice["logprobs"]["tokens"]]
    assert "".join(choice["logprobs"]["tokens"]) == " we go"


async def test_special_tokens_are_shown_only_when_asked_for(adapter: Adapter) -> None:
    adapter.say("<|im_start|>user")
    shown = [
        (await adapter.http.post(PATH, json={"prompt": "x", "skip_special_tokens": skip})).json()["choices"][0]["text"]
        for skip in (True, False)
    ]
    assert shown == ["user", "<|im_start|>user"]
