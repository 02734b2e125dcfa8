"""Garbage from peers: each gets an answer if one can be addressed, and every other stream goes on."""

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wire.sockets
from router.server import MAX_BAD_FRAMES
from tests.router.stage import RawReader, ids_of, stage, until
from wire.codec import Decoder, ProtocolError, frames, pack
from wire.messages import PROTOCOL, Cancel, ClientToRouter, Finished, Generate, Hello, Rejected, Submit, Tokens, Usage

encode = msgspec.msgpack.encode


def generate_as(**changes: object) -> bytes:
    """A Generate as raw msgpack, with fields of any kind."""
    return encode({"type": "Generate", "request_id": "bad", "prompt_token_ids": [1, 2]} | changes)


BAD = {
    "another version": [b"PK9", pack(Generate("bad", [1]))],
    "wrong type of a number": [PROTOCOL, generate_as(max_tokens="many")],
    "negative number": [PROTOCOL, generate_as(max_tokens=-1)],
    "huge number": [PROTOCOL, generate_as(max_tokens=2**63)],
    "token id of a wrong type": [PROTOCOL, generate_as(prompt_token_ids=["a"])],
    "negative token id": [PROTOCOL, generate_as(prompt_token_ids=[-1])],
    "null prompt": [PROTOCOL, generate_as(prompt_token_ids=None)],
    "empty prompt": [PROTOCOL, generate_as(prompt_token_ids=[])],
    "unknown field": [PROTOCOL, generate_as(colour="red")],
    "not a number": [PROTOCOL, generate_as(sampling={"temperature": float("nan")})],
    "unknown message": [PROTOCOL, encode({"type": "Explode", "request_id": "bad"})],
    "a worker's message": [PROTOCOL, encode({"type": "Tokens", "request_id": "bad", "offset": 0, "tokens": []})],
    "deep nesting": [PROTOCOL, encode({"request_id": "bad", "type": "Generate", "sampling": [[[[[[]]]]]]})],
}


@pytest.mark.parametrize("name", BAD)
def test_who_can_be_told_is_told(run, name):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("good", [1], max_tokens=2))
            submit = await worker.next(Submit)
            raw = s.raw()
            await raw.send_multipart(BAD[name])
            rejected = await RawReader(raw).next()
            assert isinstance(rejected, Rejected)
            assert (rejected.request_id, rejected.code) == ("bad", "bad_request")
            assert rejected.message
            await worker.play(submit)
            assert await ids_of(stream) == [0, 1]

    run(story())


def test_garbage_is_counted_and_dropped_and_streams_go_on(run):
    rng = random.Random(1)

    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("good", [1], max_tokens=2))
            submit = await worker.next(Submit)
            sent = 0
            for _ in range(10):
                raw = s.raw()
                for _ in range(20):
                    parts = [rng.randbytes(rng.choice((0, 1, 3, 100, 5000))) for _ in range(rng.choice((1, 2, 3, 50)))]
                    await raw.send_multipart(parts)
                    sent += 1
            garbage = s._peer(wire.sockets.worker_address(s.run_dir), b"cpu9-1-a")
            for _ in range(20):
                await garbage.send_multipart([PROTOCOL, rng.randbytes(50)])
            wanted = {f'bad_messages_total{{sender="client"}} {float(sent)}', 'bad_messages_total{sender="worker"} 20.0'}
            await until(client, lambda status: all(text in status.metrics for text in wanted))
            await worker.play(submit)
            assert await ids_of(stream) == [0, 1]

    run(story())


def test_a_peer_that_only_says_garbage_is_read_no_more(run):
    async def story():
        async with stage() as s, s.client() as client:
            raw = s.raw()
            for _ in range(MAX_BAD_FRAMES + 50):
                await raw.send_multipart([b"", b""])
            await raw.send_multipart(frames(Generate("r", [])))  # would be answered
            await until(client, lambda status: f'sender="client"}} {float(MAX_BAD_FRAMES)}' in status.metrics)
            other = s.raw()
            await other.send_multipart(frames(Generate("r", [])))
            assert (await RawReader(other).next()).code == "bad_request"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(raw.recv_multipart(), 0)

    run(story())


def test_a_client_whose_bad_requests_are_answered_is_still_heard(run):
    """The HTTP adapter is one client for many people: one of them cannot make the router deaf to the others."""

    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            worker.plays = True
            for _ in range(MAX_BAD_FRAMES + 10):
                client._socket.send_multipart([PROTOCOL, generate_as(max_tokens=-1)])
            assert await ids_of(client.generate([1], max_tokens=3)) == [0, 1, 2]

    run(story())


def test_bad_words_about_a_living_stream_do_not_end_it(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("bad", [1], max_tokens=2))
            submit = await worker.next(Submit)
            client._socket.send_multipart([PROTOCOL, generate_as(max_tokens=-1)])
            await until(client, lambda status: 'sender="client"} 1.0' in status.metrics)
            await worker.play(submit)
            assert await ids_of(stream) == [0, 1]

    run(story())


def test_an_oversized_frame_costs_its_sender_the_connection(run, monkeypatch):
    monkeypatch.setattr(wire.sockets, "MAX_FRAME_BYTES", 1 << 20)

    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            raw = s.raw()
            await raw.send_multipart(frames(Generate("doomed", [1])))
            await worker.next(Submit)
            await raw.send_multipart([PROTOCOL, bytes(2 << 20)])
            assert await worker.next(Cancel) == Cancel("doomed")
            worker.plays = True
            assert await ids_of(client.generate([1], max_tokens=20)) == list(range(20))

    run(story())


def test_a_worker_with_strange_words_about_unknown_streams_changes_nothing(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            await worker.say(Tokens("nobody's", 5, [1]))
            await worker.say(Finished("nobody's", "stop", Usage()))
            await worker.say(Hello("cpu0", 1, "m", "cpu", "f32", 65536, 16, 8, 4096, True))
            worker.plays = True
            assert await ids_of(client.generate([1], max_tokens=3)) == [0, 1, 2]

    run(story())


def outcome(decode: Callable, raw: object) -> object:
    """The message, or the one line that says why there is none."""
    try:
        return decode(raw)
    except ProtocolError as error:
        return str(error)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=200), max_size=4) | st.tuples(st.just(PROTOCOL), st.binary(max_size=200)).map(list))
def test_the_decoder_has_one_kind_of_error(parts):
    assert outcome(Decoder(ClientToRouter).decode, parts)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
        max_leaves=12,
    )
)
def test_well_formed_msgpack_of_any_shape_is_an_error_or_a_message(value):
    fields = {"type": "Generate", "request_id": "r", "prompt_token_ids": [1], "sampling": value}
    for candidate in (value, fields):
        assert outcome(Decoder(ClientToRouter).unpack, encode(candidate))
