"""What a hostile peer may send, for hypothesis: messages of a union, the same with bytes changed, msgpack of any shape."""

from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
from hypothesis import strategies as st

from wire.codec import pack

ODD = (-1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1)
_ints = st.sampled_from(ODD) | st.integers(-(2**63), 2**64 - 1)


@cache
def any_value() -> st.SearchStrategy[Any]:
    """Whatever msgpack can say, small."""
    return st.recursive(
        st.none() | st.booleans() | _ints | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
        max_leaves=10,
    )


def members(union: Any) -> tuple[type, ...]:
    """The messages of a union; a single one is a union of itself."""
    return get_args(union) or (union,)


@cache
def fields_of(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a message: each a value of any kind, or left out; sometimes one that it does not have."""
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    tag = {"type": kind.__struct_config__.tag}
    known = st.fixed_dictionaries({}, optional={name: any_value() for name in names})
    return st.tuples(known, st.dictionaries(st.text(max_size=8), any_value(), max_size=1)).map(
        lambda both: {**both[1], **both[0], **tag}
    )


@cache
def messages_of(union: Any) -> st.SearchStrategy[Any]:
    """Whole messages of a union, their values within their types, however odd."""
    return st.one_of([_struct(kind) for kind in members(union)])


def _struct(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    required = {field.name: _of(hints[field.name]) for field in msgspec.structs.fields(kind) if field.required}
    optional = {field.name: _of(hints[field.name]) for field in msgspec.structs.fields(kind) if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: kind(**values))


def _of(hint: Any) -> st.SearchStrategy[Any]:
    if hasattr(hint, "__metadata__"):
        return _of(get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint)
    simple = {int: _ints, float: st.floats(), str: st.text(max_size=20), bool: st.booleans(), bytes: st.binary(max_size=20),
              type(None): st.none()}  # fmt: skip
    if hint in simple:
        return simple[hint]
    match getattr(hint, "__origin__", None), get_args(hint):
        case (one, (item,)) if one is list:
            return st.lists(_of(item), max_size=4)
        case (one, (item, rest)) if one is tuple and rest is ...:
            return st.lists(_of(item), max_size=4).map(tuple)
        case (one, items) if one is tuple:
            return st.tuples(*map(_of, items))
        case (one, (key, value)) if one is dict:
            return st.dictionaries(_of(key), _of(value), max_size=3)
        case (_, choices) if choices and all(isinstance(choice, str | int) for choice in choices):  # a Literal
            return st.sampled_from(choices)
        case (_, choices) if choices:  # a union
            return st.one_of([_of(choice) for choice in choices])
    return any_value()


def shapes() -> st.SearchStrategy[bytes]:
    """Bytes: at random, or msgpack of any shape."""
    return st.binary(max_size=200) | any_value().map(msgspec.msgpack.encode)


def changed(messages: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Encoded messages of which a few bytes were changed, or the end is cut off."""

    def change(drawn: tuple[Any, list[tuple[int, int]], int]) -> bytes:
        payload = bytearray(pack(drawn[0]))
        for place, byte in drawn[1]:
            payload[place % len(payload)] = byte
        return bytes(payload[: len(payload) - drawn[2] % len(payload)])

    edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3)
    return st.tuples(messages, edits, st.just(0) | st.integers(0, 1 << 16)).map(change)
