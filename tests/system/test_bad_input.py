"""Bad input over HTTP and ZeroMQ while a stream runs: each gets a clear error or is dropped, and the stream never notices."""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from tests.system.stack import STREAM_TIMEOUT_S, Answer, Stack, prompt, stream, together
from wire.codec import Decoder, frames
from wire.messages import PROTOCOL, GetStatus, Rejected, RouterToClient, Status
from wire.sockets import MAX_FRAME_BYTES

CTX = 4096
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ERROR_S = 5  # an error is promised within 2 s; the machine may be busy
GOING_ON = 20  # tokens that the stream must still say afterwards
MANY_PARTS = 200_000
MAX_GROWTH_BYTES = 256 << 20

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("bad") / "run", ctx=CTX, slots=4) as stack:
        yield stack


def undisturbed(stack: Stack, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Run `meanwhile` beside a long stream; the stream must still run then, go on, and say what it says alone."""
    body = {"prompt": prompt(5, 60), "temperature": 0.8, "seed": 3}

    async def run() -> Answer:
        started, done = asyncio.Event(), []

        def on_tokens(answer: Answer) -> bool:
            started.set()
            return not done or len(answer.ids) < done[0] + GOING_ON

        said = Answer()

        def watch(answer: Answer) -> bool:
            said.ids = answer.ids
            return on_tokens(answer)

        running = asyncio.create_task(stream(stack.url, max_tokens=CTX, on_tokens=watch, **body))
        await started.wait()
        await meanwhile()
        assert not running.done(), "the stream ended too early: the test shows nothing"
        done.append(len(said.ids))
        return await running

    answer = asyncio.run(asyncio.wait_for(run(), STREAM_TIMEOUT_S))
    assert answer.error is None
    alone = together(stream(stack.url, max_tokens=len(answer.ids), **body))[0]
    assert (answer.ids, answer.text) == (alone.ids[: len(answer.ids)], alone.text)


def deep(opening: str, closing: str) -> str:
    return opening * 100_000 + closing * 100_000


def both(fields: str) -> bytes:
    """A body that both endpoints would take, were it not for `fields`."""
    return f'{{"prompt": "x", "messages": [{{"role": "user", "content": "x"}}], "max_tokens": 9, {fields}}}'.encode()


BODIES = {
    "nothing": (b"", "invalid_json"),
    "half a body": (b'{"prompt": "x', "invalid_json"),
    "no object": (b"[1, 2]", "invalid_type"),
    "bytes that are no text": (b"\xff\xfe\x00", "invalid_json"),
    "NaN": (both('"temperature": NaN'), "invalid_json"),
    "Infinity": (both('"top_p": -Infinity'), "invalid_json"),
    "a lone surrogate": (both('"prompt": "a\\ud800b"').replace(b'"content": "x"', b'"content": "a\\ud800b"'), None),
    "half of a surrogate in UTF-8": (both('"y": 0').replace(b'"x"', b'"\xed\xa0\x80"'), "invalid_json"),
    "deep nesting": (both('"y": ' + deep("[", "]")), "invalid_json"),
    "deep objects": (both('"y": ' + deep('{"a":', "") + "1" + "}" * 100_000), "invalid_json"),
    "text for a number": (both('"n": "many"'), "invalid_type"),
    "a list for text": (both('"prompt": [["x"]], "messages": ["x"]'), "invalid_type"),
    "a number for a flag": (both('"stream": 1'), "invalid_type"),
    "a negative number": (both('"max_tokens": -1'), None),
    "zero": (both('"n": 0'), None),
    "too many answers": (both('"n": 1000000'), None),
    "a huge number": (both('"seed": 1' + "0" * 400), None),
    "a huge float": (both('"temperature": 1e308'), None),
    "a number beyond floats": (both('"temperature": 1e999'), None),
    "a negative temperature": (both('"temperature": -0.5'), None),
    "an impossible token": (both('"logit_bias": {"99999999": 1}'), None),
    "a negative token": (both('"stop_token_ids": [-1]'), None),
    "an empty stop": (both('"stop": [""]'), None),
    "nothing to say": (b'{"prompt": "", "messages": []}', None),
    "empty lists": (b'{"prompt": [[]], "messages": []}', None),
    "null": (b'{"prompt": null, "messages": null}', None),
    "10 MB": (json.dumps({"prompt": "x" * 10**7, "messages": [{"role": "user", "content": "x" * 10**7}]}).encode(),
              "context_length_exceeded"),
    "a bit too long": (json.dumps({"prompt": "sea " * CTX, "messages": [{"role": "user", "content": "sea " * CTX}]}).encode(),
                       "context_length_exceeded"),
}  # fmt: skip


def test_each_bad_body_gets_one_clear_error_and_the_stream_goes_on(stack):
    wrong = []

    async def send_all() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=ERROR_S) as http:
            for name, (body, code) in BODIES.items():
                for path in (CHAT, TEXT):
                    response = await http.post(path, content=body)
                    error = response.json().get("error", {})
                    clear = error.keys() == {"message", "type", "param", "code"} and len(error["message"]) > 10
                    if response.status_code != 400 or not clear or error["type"] != "invalid_request_error":
                        wrong.append((name, path, response.status_code, response.text[:200]))
                    elif code not in (None, error["code"]) or ("context" in str(code) and str(CTX) not in error["message"]):
                        wrong.append((name, path, error))
            too_large = await http.post(TEXT, content=b'{"prompt": "' + b"x" * (33 << 20) + b'"}')
            if (too_large.status_code, too_large.json()["error"]["code"]) != (413, "request_too_large"):
                wrong.append(too_large.text)

    undisturbed(stack, send_all)
    assert wrong == []


def test_a_prompt_is_refused_with_its_own_number_of_tokens(stack):
    ids = [1000] * CTX
    error = stack.http.post(TEXT, json={"prompt": ids}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count(str(CTX)) == 2  # the context's and the prompt's


def generate_as(**changes: object) -> bytes:
    """A Generate as raw msgpack, with fields of any kind."""
    return msgspec.msgpack.encode({"type": "Generate", "request_id": "bad", "prompt_token_ids": [1, 2]} | changes)


REJECTED = {
    "another version": [b"PK9", generate_as()],
    "wrong type": [PROTOCOL, generate_as(max_tokens="many")],
    "negative number": [PROTOCOL, generate_as(max_tokens=-1)],
    "huge number": [PROTOCOL, generate_as(max_tokens=2**63)],
    "negative token": [PROTOCOL, generate_as(prompt_token_ids=[-1])],
    "token outside the vocabulary": [PROTOCOL, generate_as(prompt_token_ids=[2**31 - 1])],
    "empty prompt": [PROTOCOL, generate_as(prompt_token_ids=[])],
    "no number": [PROTOCOL, generate_as(sampling={"temperature": float("nan")})],
    "unknown field": [PROTOCOL, generate_as(colour="red")],
    "unknown message": [PROTOCOL, msgspec.msgpack.encode({"type": "Explode", "request_id": "bad"})],
    "a worker's word": [PROTOCOL, msgspec.msgpack.encode({"type": "Tokens", "request_id": "bad", "offset": 0, "tokens": [1]})],
    "too long a prompt": [PROTOCOL, generate_as(prompt_token_ids=[1] * CTX)],
}
DROPPED = {
    "one frame": [b"hello"],
    "three frames": [PROTOCOL, generate_as(), b""],
    "empty frames": [b"", b""],
    "garbage": [PROTOCOL, os.urandom(5000)],
    "no id": [PROTOCOL, msgspec.msgpack.encode({"type": "Generate"})],
    "deep nesting": [PROTOCOL, b"\x91" * 100_000],
    "a size that lies": [PROTOCOL, b"\xdd\xff\xff\xff\xff"],
    "no msgpack at all": [PROTOCOL, b'{"type": "Generate"}'],
}
_DECODER: Decoder[RouterToClient] = Decoder(RouterToClient)


class Raw:
    """A bare socket to the router, for frames that the client would never send."""

    def __init__(self, stack: Stack) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(stack.address)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def ask(self, parts: list[bytes]) -> object:
        """Send, and the router's next word."""
        await self.socket.send_multipart(parts)
        return _DECODER.decode(await asyncio.wait_for(self.socket.recv_multipart(), ERROR_S))

    async def lives(self) -> None:
        """The router still answers on this socket, and to what was asked last."""
        status = await self.ask(frames(GetStatus("after")))
        assert isinstance(status, Status) and status.request_id == "after", status


def test_each_bad_frame_is_refused_or_dropped_and_the_stream_goes_on(stack):
    wrong = []

    async def send_all() -> None:
        before = stack.metric("parkade_bad_messages_total", sender="client")
        for name, parts in REJECTED.items():
            with Raw(stack) as raw:
                answer = await raw.ask(parts)
                code = "context_length_exceeded" if name == "too long a prompt" else "bad_request"
                if not isinstance(answer, Rejected) or (answer.request_id, answer.code) != ("bad", code) or not answer.message:
                    wrong.append((name, answer))
                await raw.lives()
        for parts in DROPPED.values():
            with Raw(stack) as raw:
                await raw.socket.send_multipart(parts)
                await raw.lives()  # its next word is the answer to this: nothing was said to the garbage
        counted = stack.metric("parkade_bad_messages_total", sender="client") - before
        if counted < len(DROPPED):
            wrong.append(("counted", counted))

    undisturbed(stack, send_all)
    assert wrong == []


def test_an_oversized_frame_costs_its_sender_the_connection_only(stack):
    async def send() -> None:
        with Raw(stack) as raw:
            monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await raw.socket.send_multipart([PROTOCOL, bytes(MAX_FRAME_BYTES + 1)])
            await asyncio.wait_for(monitor.recv_multipart(), ERROR_S)
            raw.socket.disable_monitor()
        with Raw(stack) as raw:
            await raw.lives()

    undisturbed(stack, send)


def memory_of(stack: Stack, module: str) -> int:
    return psutil.Process(stack.pid_of(module)).memory_info().rss


def test_a_message_of_very_many_frames_is_dropped_in_bounded_memory(stack):
    async def send() -> None:
        with Raw(stack) as raw:
            await raw.lives()
            before = memory_of(stack, "router")
            await raw.socket.send_multipart([b"x"] * MANY_PARTS)
            await raw.lives()
            assert memory_of(stack, "router") - before < MAX_GROWTH_BYTES

    undisturbed(stack, send)


def test_connections_that_say_nothing_or_never_end_are_no_burden(stack):
    """Half a request, half a greeting, a header without end: their senders wait, nobody else does."""

    async def send() -> None:
        host, port = stack.url.removeprefix("http://").split(":")
        silent = []
        for words in (
            b"",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
            b"GET / HTTP/1.1\r\nA: ",
        ):
            one = socket.create_connection((host, int(port)))
            one.sendall(words)
            silent.append(one)
        garbage = socket.create_connection((host, int(port)), timeout=ERROR_S)
        garbage.sendall(b"\x16\x03\x01\x00\xa5 this is no HTTP\r\n\r\n")
        assert b" 400 " in await asyncio.to_thread(garbage.recv, 100)
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(stack.address.removeprefix("ipc://"))
        unix.sendall(b"this is no greeting of ZeroMQ" * 10)
        silent += [garbage, unix]
        for one in silent:
            one.close()

    undisturbed(stack, send)
