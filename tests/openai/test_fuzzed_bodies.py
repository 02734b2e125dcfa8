"""Fuzzed bodies of every POST: whatever stands in one, it is answered, or refused by an error that names what to change; nothing
fails in the log, nothing is left in the router, and the next request is served."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from router.openai import schema, slots
from router.openai.text import Text
from tests.openai.conftest import Adapter, running
from tests.openai.fake_router import FakeStream
from tests.openai.test_bad_input import error_of
from wire.codec import Decoder, frames
from wire.messages import ClientToRouter, Finished, Logprob, Message, Notice, Tokens, Usage
from wire.model_files import ModelFiles

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 30.0
EXAMPLES = 50  # of each test
KINDS = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/slots/1/park": schema.ParkRequest,
    "/slots/1/resume": schema.ResumeRequest,
    "/slots/0/park": schema.ParkRequest,  # an idle seat
}
CHAT, PROMPT, CONTENT = b'"messages": [{"role": "user", "content": "Hello"}]', b'"prompt": "Once"', b'"content": "Once"'
GOOD = {"/v1/chat/completions": [CHAT], "/v1/completions": [PROMPT], "/tokenize": [CHAT, PROMPT, CONTENT]}
REFUSALS = {400, 404, 409}
READER: Decoder[ClientToRouter] = Decoder(ClientToRouter)  # the router's

# JSON text: what json.dumps would not write is wanted, too ----------------------------------------------------------------
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())

WILD = [
    *(b"null", b"true", b"false", b"0", b"-0", b"-1", b"0.5", b"1e3", b"1e308", b"-1e308", b"5e-324"),
    *(b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 20, b"1" + b"0" * 310),
    *(b'""', b'"text"', b'"\\ud800"', b'"\\udc00x"', b'"a\\ud83d\\ude42"', b'"\\u0000"', '"\u2028\ufeff\U0010ffff"'.encode()),
    *(b'"' + b"x" * nbytes + b'"' for nbytes in (5000, 200_000)),
    *(b"[]", b"{}", b"[null]", b"[[]]", b'[""]', b'["a", 1]', b"[1, [2]]", b'{"": {}}', b'{"a": 1, "a": 2}'),
    *(b"[" * deep + b"]" * deep for deep in (30, 3000)),
    *(b'{"a":' * deep + b"1" + b"}" * deep for deep in (30, 3000)),
    *(b"[" + b"1," * 3000 + b"1]", b'["' + b'x","' * 300 + b'"]'),
]
BROKEN = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" + b"0" * 5000),
    *(b"01", b"+1", b"1.", b".5", b"1e", b"0x10", b"--1", b"", b"{", b"]", b'"', b"tru", b"[1,]", b"[" * 3000),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\n"', b'"\\x"', b'"\\uD800\\uD800"'),
]
wild = st.one_of(st.sampled_from(WILD), st.sampled_from(WILD), st.sampled_from(WILD), any_json, st.sampled_from(BROKEN))

USUAL: dict[str, list[object]] = {
    "messages": [
        [{"role": "user", "content": "Hello"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
        ],
        [{"role": "user", "content": None}],
    ],
    "prompt": ["Once", [1, 2, 3], [[1], [2.0]], ["a", "b"]],
    "content": ["Once upon a time", ""],
    "tokens": [[1, 2, 3.0], []],
    "model": ["smollm2", "gpt-9"],
    "n": [1, 2.0, 3],
    "best_of": [1],
    "max_tokens": [1, 7.0, 0],
    "max_completion_tokens": [5],
    "logprobs": [True, 3],
    "top_logprobs": [0, 2],
    "stop": ["e", ["the", "\u00e9"]],
    "stop_token_ids": [[5], []],
    "logit_bias": [{"5": -100}, {}],
    "stream_options": [{"include_usage": True}, {}],
    "response_format": [{"type": "text"}],
    "chat_template_kwargs": [{"x": 1}],
    "seed": [0, -5],
    "temperature": [0, 0.7],
    "deadline_s": [5, 0.5],
}
SWITCHES = {
    *("stream", "echo", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids", "with_pieces"),
    *("add_special", "add_special_tokens", "add_generation_prompt"),
}


def usual(name: str) -> st.SearchStrategy[bytes]:
    """A value that the field is meant for."""
    values = [True, False, None] if name in SWITCHES else USUAL.get(name, [None])
    return st.sampled_from(values).map(lambda value: json.dumps(value).encode())


@st.composite
def inner(draw: st.DrawFn, name: str) -> bytes:
    """A list or an object of the field's own kind with something wild in it."""
    some = draw(wild)
    match name:
        case "messages":
            role, content = draw(st.permutations([b'"user"', some])), draw(wild)
            return b'[{"role": %s, "content": %s, "name": %s}]' % (role[0], content, draw(st.just(b"null") | wild))
        case "prompt" | "tokens" | "stop" | "stop_token_ids" | "modalities" | "tools":
            return b"[%s, %s]" % (draw(st.sampled_from([b"1", b'"a"', b"[1]", some])), some)
        case "logit_bias":
            key = draw(st.sampled_from([b'"-1"', b'"\\ud800"', b'"1e5"', b'"99999999999"', b'"2"', b'"\xc2\xb2"']))
            return b'{"1": %s, %s: 1}' % (some, key)
        case "stream_options":
            return b'{"include_usage": %s}' % some
        case _:
            return b'{"type": %s}' % some


@st.composite
def changed(draw: st.DrawFn, kind: type) -> bytes:
    """A request for an endpoint: its fields in any number and order, some of them twice, with values that are meant or not."""
    known = [one.encode_name for one in fields(kind)]
    given = [name for name in ("messages", "prompt", "content", "tokens") if name in known]  # /tokenize takes one of three
    names = [draw(st.sampled_from(given))] if given else []
    names += [name for name in ("stream",) if name in known]
    names += draw(st.lists(st.sampled_from(known or ["x"]), max_size=4))
    pairs = []
    for name in draw(st.permutations(names)):
        dice = draw(st.integers(0, 11))
        value = draw(wild if dice == 0 else inner(name) if dice == 1 else usual(name))
        pairs.append(b'"%s": %s' % (name.encode(), value))
    if draw(st.integers(0, 9)) == 0:
        pairs.append(b"%s: 1" % draw(st.sampled_from([b'"\\ud800"', b'"x"', b'""', b'"\xff"', b"x", b"1"])))
    return b"{" + b", ".join(pairs) + b"}"


# the promise --------------------------------------------------------------------------------------------------------------
@dataclass
class Fuzzed:
    """The adapter, and what its log had to complain about."""

    adapter: Adapter
    complaints: list[str] = field(default_factory=list)

    async def send(self, path: str, body: bytes) -> httpx.Response:
        """The answer, after looking that all that is promised of it is so."""
        answer = await self.adapter.http.post(path, content=body)
        complaints, self.complaints[:] = self.complaints[:], []
        assert complaints == []
        if answer.status_code == 200:
            check_answer(answer)
        else:
            assert answer.status_code in REFUSALS
            error = error_of(answer, answer.status_code)
            assert error["code"] is not None or error["param"] is not None
            if error["param"] is not None:
                root = error["param"].partition(".")[0].partition("[")[0]
                assert root in {one.encode_name for one in fields(KINDS[path])}
        await asyncio.wait_for(self.adapter.serving.idle.wait(), PATIENCE_S)
        streams, self.adapter.router.streams = self.adapter.router.streams, []
        assert all(stream.cancelled.is_set() for stream in streams)
        for stream in streams:
            assert READER.decode(frames(stream.generate)) == stream.generate  # or the router would refuse it
        return answer

    async def check(self, path: str, body: bytes) -> None:
        """One body, and whether the adapter still serves."""
        await self.send(path, body)
        assert (await self.send("/detokenize", b'{"tokens": [1]}')).status_code == 200


def check_answer(answer: httpx.Response) -> None:
    """It is whole, and any parser of JSON can read it."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        json.loads(answer.text, parse_constant=pytest.fail)
        return
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        if not event.startswith(": "):
            assert "error" not in json.loads(event.removeprefix("data: "), parse_constant=pytest.fail)


def answers(vocab_size: int) -> Callable[[FakeStream], AsyncIterator[Message]]:
    """A script that gives what is asked for: special tokens, parts of characters, impossible log probabilities, a pause."""

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        asked = stream.generate
        count = asked.sampling.logprobs
        tokens = [(len(asked.prompt_token_ids) * 7919 + 131 * i) % vocab_size for i in range(min(asked.max_tokens, 8))]
        told = [] if count is None else [Logprob(token, -math.inf, [(token, -0.5)] * count) for token in tokens]
        echoed = [] if asked.prompt_logprobs is None else [Logprob(5, -1.0)] * (len(asked.prompt_token_ids) - 1)
        yield Notice(asked.request_id, "parked")
        yield Notice(asked.request_id, "resumed")
        yield Tokens(asked.request_id, 0, tokens, told, 1 if echoed else 0, echoed)
        yield Finished(asked.request_id, "stop", Usage(len(asked.prompt_token_ids), len(tokens), exact=True))

    return script


class Complaints(logging.Handler):
    """Keeps the lines of the log that are warnings or worse."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


@pytest.fixture(scope="module")
def heard() -> Iterator[list[str]]:
    """What the adapter and uvicorn complain about."""
    lines: list[str] = []
    handler = Complaints(lines)
    loggers = [logging.getLogger(name) for name in ("parkade", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzzed(files: ModelFiles, text: Text, heard: list[str]) -> AsyncIterator[Fuzzed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "LISTED_S", 0)
        async with running(files, text) as adapter:
            adapter.router.script = answers(adapter.serving.vocab_size)
            yield Fuzzed(adapter, heard)


bounded = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
paths = st.sampled_from(sorted(KINDS))


@bounded
@given(paths, st.binary(max_size=200) | any_json | wild)
async def test_any_bytes_and_any_json(fuzzed: Fuzzed, path: str, body: bytes) -> None:
    await fuzzed.check(path, body)


@pytest.mark.parametrize("path", sorted(KINDS))
@bounded
@given(st.data())
async def test_changed_requests(fuzzed: Fuzzed, path: str, data: st.DataObject) -> None:
    await fuzzed.check(path, data.draw(changed(KINDS[path])))


@pytest.mark.parametrize("path", sorted(GOOD))
@bounded
@given(st.data())
async def test_one_field_of_a_good_request(fuzzed: Fuzzed, path: str, data: st.DataObject) -> None:
    """Everything else is as it should be, so what is refused is this field."""
    kind = KINDS[path]
    good = data.draw(st.sampled_from(GOOD[path]))
    if data.draw(st.booleans()):
        good += b', "stream": true'
    name = data.draw(st.sampled_from([one.encode_name for one in fields(kind)]))
    value = data.draw(st.one_of(usual(name), inner(name), wild))
    await fuzzed.check(path, b'{%s, "%s": %s}' % (good, name.encode(), value))
