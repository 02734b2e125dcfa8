"""The decoders of all unions under fuzz: a message of the union or a ProtocolError, never anything else, never a peer's word."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.shapes import changed, fields_of, members, messages_of, shapes
from wire.codec import MAX_BUNDLE_BYTES, Decoder, ProtocolError, bundles, frames, pack, unbundle
from wire.messages import (
    PROTOCOL,
    Cancel,
    ClientToRouter,
    FromHostCache,
    RouterToClient,
    RouterToWorker,
    ToHostCache,
    WorkerToRouter,
)

UNIONS = {
    "client to router": ClientToRouter,
    "router to client": RouterToClient,
    "router to worker": RouterToWorker,
    "worker to router": WorkerToRouter,
    "to host cache": ToHostCache,
    "from host cache": FromHostCache,
}
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
FUZZ = settings(max_examples=20, deadline=None, suppress_health_check=CHECKS)
LIES = [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
each_union = pytest.mark.parametrize("name", UNIONS)


def outcome(name: str, parts: list[bytes]) -> Any:
    """The message, which then is one of the union and survives being sent again; None if it was refused with a line of text."""
    union = UNIONS[name]
    try:
        message = Decoder(union).decode(parts)
    except ProtocolError as caught:
        message, error = None, caught
    if message is None:
        assert str(error)
        assert isinstance(error.request_id, str)
        assert len(error.request_id) <= 64
        return None
    assert type(message) in members(union)
    assert pack(Decoder(union).decode(frames(message))) == pack(message)
    return message


@each_union
@FUZZ
@given(data=st.data())
def test_what_a_peer_may_say_is_understood_or_is_out_of_range(name: str, data: st.DataObject) -> None:
    message = data.draw(messages_of(UNIONS[name]))
    heard = outcome(name, frames(message))
    assert heard is None or pack(heard) == pack(message)


@each_union
@FUZZ
@given(data=st.data())
def test_changed_bytes_and_any_msgpack(name: str, data: st.DataObject) -> None:
    one_of_them(name, data)


@pytest.mark.long
@each_union
@settings(FUZZ, max_examples=2000)
@given(data=st.data())
def test_changed_bytes_and_any_msgpack_at_length(name: str, data: st.DataObject) -> None:
    one_of_them(name, data)


def one_of_them(name: str, data: st.DataObject) -> None:
    union = UNIONS[name]
    kinds = st.sampled_from(members(union)).flatmap(fields_of).map(msgspec.msgpack.encode)
    outcome(name, [PROTOCOL, data.draw(changed(messages_of(union)) | kinds | shapes())])


@each_union
@FUZZ
@given(parts=st.lists(st.binary(max_size=40) | st.just(PROTOCOL), max_size=4))
def test_frames_of_any_number(name: str, parts: list[bytes]) -> None:
    outcome(name, parts)


@pytest.mark.parametrize(("name", "other"), [(name, other) for name in UNIONS for other in UNIONS if name != other])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_words_of_other_peers_are_refused(name: str, other: str, data: st.DataObject) -> None:
    theirs = set(members(UNIONS[other])) - set(members(UNIONS[name]))
    foreign = {kind.__struct_config__.tag for kind in theirs} - {kind.__struct_config__.tag for kind in members(UNIONS[name])}
    message = data.draw(messages_of(UNIONS[other]))
    if type(message).__struct_config__.tag in foreign:
        assert outcome(name, frames(message)) is None


@pytest.mark.parametrize("payload", LIES)
@each_union
def test_depths_and_sizes_that_lie(name: str, payload: bytes) -> None:
    assert outcome(name, [PROTOCOL, payload]) is None


@FUZZ
@given(data=st.data())
def test_what_is_told_together_is_heard_in_order(data: st.DataObject) -> None:
    told = [pack(message) for message in data.draw(st.lists(messages_of(WorkerToRouter), max_size=30))]
    assert [bytes(payload) for frame in bundles(told) for payload in unbundle([PROTOCOL, frame])] == told


def test_a_message_alone_goes_as_it_is_and_a_bundle_is_of_a_size() -> None:
    alone, large = pack(Cancel("r")), pack(Cancel("x" * MAX_BUNDLE_BYTES))
    assert list(bundles([])) == []
    assert list(bundles([alone])) == [alone]
    cut = list(bundles([alone, alone, large, alone]))
    assert [len(unbundle([PROTOCOL, frame])) for frame in cut] == [2, 1, 1]
    many = list(bundles([alone] * 10_000))
    assert sum(len(unbundle([PROTOCOL, frame])) for frame in many) == 10_000
    assert all(len(frame) <= MAX_BUNDLE_BYTES + 3 for frame in many)


@FUZZ
@given(shapes() | st.binary(max_size=60) | st.sampled_from([b"", b"\x90", b"\xdc\xff\xff", b"\xdc\x00", *LIES]))
def test_bundles_of_anything_are_payloads_or_refused(payload: bytes) -> None:
    try:
        found = unbundle([PROTOCOL, payload])
    except ProtocolError:
        return
    assert found and sum(map(len, found)) <= len(payload)


@FUZZ
@given(st.sampled_from([math.nan, math.inf, -math.inf]))
def test_numbers_that_are_none_are_refused(number: float) -> None:
    generate = {"type": "Generate", "request_id": "r", "prompt_token_ids": [1], "sampling": {"temperature": number}}
    assert outcome("client to router", [PROTOCOL, msgspec.msgpack.encode(generate)]) is None
