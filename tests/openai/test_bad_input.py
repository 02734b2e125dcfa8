"""Whatever a client sends, it gets one clear error in OpenAI's shape, and the router never hears of it."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from router.openai import limits
from router.openai.text import Text
from tests.openai.conftest import Adapter, running
from wire.model_files import ModelFiles

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapter(files: ModelFiles, text: Text) -> AsyncIterator[Adapter]:
    """One for all tests of this file: nothing here may change it."""
    async with running(files, text) as one:
        yield one


def error_of(answer: object, status: int = 400) -> dict:
    """The error of an answer, after checking its shape."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{'messages': []}",
        b'{"messages": [], "temperature": NaN}',
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "\\ud800x", "messages": [{"role": "user", "content": "\\ud800x"}]}',
        b'{"prompt": "a\\udc00b", "messages": [{"role": "user", "content": "a\\udc00b"}]}',
        b'{"prompt": "\xed\xa0\x80", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"prompt": "\xff\xfe", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 100_000,
        b"\x00\x01\x02",
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_bodies_that_are_no_request(adapter: Adapter, path: str, body: bytes) -> None:
    error_of(await adapter.http.post(path, content=body))
    assert adapter.router.streams == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("field", "value"), [("temperature", "1e999"), ("n", "1" + "0" * 10_000), ("seed", "9" * 5000)])
async def test_numbers_beyond_everything(adapter: Adapter, path: str, field: str, value: str) -> None:
    body = f'{{"prompt": "x", "messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
    error_of(await adapter.http.post(path, content=body.encode()))
    assert adapter.router.streams == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 1.5),
        ("n", "1"),
        ("n", True),
        ("n", 10**100),
        ("max_tokens", -5),
        ("max_tokens", 0),
        ("max_tokens", 0.5),
        ("max_tokens", "many"),
        ("max_tokens", [1]),
        ("min_tokens", -1),
        ("min_tokens", 99),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("temperature", "hot"),
        ("top_p", -1),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 1e6),
        ("frequency_penalty", -1e6),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 1e6}),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", [1]),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 5000),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", [0] * 2000),
        ("stop_token_ids", 5),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "json"),
        ("guided_json", {"type": "object"}),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("ignore_eos", 1),
        ("priority", 101),
        ("priority", -101),
        ("priority", 0.5),
        ("priority", "high"),
        ("priority", True),
        ("model", 5),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_values_that_cannot_be(adapter: Adapter, path: str, field: str, value: object) -> None:
    body = {"messages": HELLO, "prompt": "Hello", "max_tokens": 50, field: value}
    error = error_of(await adapter.http.post(path, json=body))
    assert error["param"] is not None
    assert error["param"].startswith(field)
    assert error["type"] == "invalid_request_error"
    assert adapter.router.streams == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages"),
        ({"messages": [{"content": "Hello"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "5", "tool_call_id": "1"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages[0]"),
        ({"messages": HELLO, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 5}, "logprobs"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_chats_that_cannot_be(adapter: Adapter, body: dict, param: str) -> None:
    error = error_of(await adapter.http.post(CHAT, json=body))
    assert error["param"].startswith(param)
    assert adapter.router.streams == []


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", ""], ["a", 1], [1, [2]], [-1], [10**9], [1.5], {"a": 1}, 5, None, [None], [["a"]], [True]]
)
async def test_prompts_that_cannot_be(adapter: Adapter, prompt: object) -> None:
    error = error_of(await adapter.http.post(TEXT, json={"prompt": prompt}))
    assert error["param"].startswith("prompt")
    assert adapter.router.streams == []


async def test_too_many_streams(adapter: Adapter) -> None:
    error_of(await adapter.http.post(TEXT, json={"prompt": ["a"] * 100, "n": 100}))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "x" * 10_000_000}),
        (TEXT, {"prompt": ["ok", "x" * 10_000_000]}),
        (TEXT, {"prompt": [1] * 3_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10_000_000}]}),
        (TEXT, {"prompt": "word " * 3000}),
        (TEXT, {"prompt": [1] * 2048}),
    ],
)
async def test_prompts_that_do_not_fit(adapter: Adapter, path: str, body: dict) -> None:
    error = error_of(await adapter.http.post(path, json=body))
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert adapter.router.streams == []


async def test_a_body_beyond_the_limit_is_refused_and_can_be_read(adapter: Adapter) -> None:
    body = json.dumps({"prompt": "x" * limits.MAX_BODY_BYTES}).encode()
    error = error_of(await adapter.http.post(TEXT, content=body), 413)
    assert error["code"] == "request_too_large"


async def test_a_chunked_body_beyond_the_limit(adapter: Adapter) -> None:
    async def parts():
        for _ in range(limits.MAX_BODY_BYTES // (1 << 20) + 2):
            yield b"x" * (1 << 20)

    error_of(await adapter.http.post(TEXT, content=parts()), 413)


async def test_unknown_places_methods_and_models(adapter: Adapter) -> None:
    assert error_of(await adapter.http.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = await adapter.http.get(CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(await adapter.http.post("/health"), 405)
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}), ("/tokenize", {"content": "x"})):
        error = error_of(await adapter.http.post(path, json=body | {"model": "gpt-9"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(await adapter.http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
