"""Frames on the wire: the protocol's name, then msgpack. Anything else is a ProtocolError, never an exception of another kind."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from wire.messages import PROTOCOL, Message

T = TypeVar("T")
MAX_BUNDLE_BYTES = 64 << 10  # of several messages in one frame
_encoder = msgspec.msgpack.Encoder()
_bundles = msgspec.msgpack.Decoder(list[msgspec.Raw])


class ProtocolError(ValueError):
    """What arrived is not a message that this peer may send. `request_id` is set where it could still be read."""

    def __init__(self, text: str, request_id: str = "") -> None:
        super().__init__(text)
        self.request_id = request_id


def pack(message: Message) -> bytes:
    """One message as msgpack, without the protocol frame (the host cache's datagrams)."""
    return _encoder.encode(message)


def frames(message: Message) -> list[bytes]:
    """One message as the two ZeroMQ frames that follow the identity."""
    return [PROTOCOL, _encoder.encode(message)]


def bundles(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """Packed messages for one peer as payloads of few frames, in order: a message alone, or a msgpack array of several, of up to
    about MAX_BUNDLE_BYTES. What a frame costs is then paid once for all that is said at one moment."""
    together: list[bytes] = []
    nbytes = 0
    for payload in payloads:
        if together and nbytes + len(payload) > MAX_BUNDLE_BYTES:
            yield _bundle(together)
            together, nbytes = [], 0
        together.append(payload)
        nbytes += len(payload)
    if together:
        yield _bundle(together)


def _bundle(payloads: list[bytes]) -> bytes:
    return payloads[0] if len(payloads) == 1 else _encoder.encode([msgspec.Raw(payload) for payload in payloads])


def unbundle(parts: Sequence[bytes]) -> list[bytes] | list[msgspec.Raw]:
    """The packed messages in the frames after the identity; ProtocolError with one line that says what is wrong. Nothing is known
    yet about what they hold, but for their lengths."""
    payload = _payload(parts)
    if not _is_array(payload):
        return [payload]
    try:
        messages = _bundles.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a bundle: {error}") from None
    if not messages:
        raise ProtocolError("a bundle of nothing")
    return messages


def _payload(parts: Sequence[bytes]) -> bytes:
    if len(parts) != 2:
        raise ProtocolError(f"{len(parts)} frames instead of 2")
    if parts[0] != PROTOCOL:
        raise ProtocolError(f"protocol {bytes(parts[0][:8])!r} instead of {PROTOCOL!r}")
    return parts[1]


def _is_array(payload: bytes) -> bool:
    """Whether msgpack's first byte says so: up to 15 elements, or up to 65,535. No bundle needs more."""
    return bool(payload) and (payload[0] & 0xF0 == 0x90 or payload[0] == 0xDC)


class _AnyMessage(msgspec.Struct):
    request_id: Any = ""


class Decoder(Generic[T]):
    """Decodes one direction's union, e.g. `Decoder(ClientToRouter)`."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._loose = msgspec.msgpack.Decoder(_AnyMessage)

    def unpack(self, payload: bytes | memoryview | msgspec.Raw) -> T:
        """The message in `payload`; ProtocolError with one line that says what is wrong."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
            raise ProtocolError(str(error), self._request_id(payload)) from None
        except UnicodeDecodeError as error:
            raise ProtocolError(f"not UTF-8: {error.reason}") from None

    def decode(self, parts: Sequence[bytes]) -> T:
        """The one message in the frames after the identity. Bundles are for those who hear from many streams: see `unbundle`."""
        return self.unpack(_payload(parts))

    def _request_id(self, payload: bytes | memoryview | msgspec.Raw) -> str:
        try:
            found = self._loose.decode(payload).request_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""
        return found[:64] if isinstance(found, str) else ""
