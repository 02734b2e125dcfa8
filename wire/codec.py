"""Frames on the wire: the protocol's name, then msgpack. Anything else is a ProtocolError, never an exception of another kind."""

from typing import Any, Generic, TypeVar

import msgspec

from wire.messages import PROTOCOL, Message

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


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


class _AnyMessage(msgspec.Struct):
    request_id: Any = ""


class Decoder(Generic[T]):
    """Decodes one direction's union, e.g. `Decoder(ClientToRouter)`."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._loose = msgspec.msgpack.Decoder(_AnyMessage)

    def unpack(self, payload: bytes | memoryview) -> T:
        """The message in `payload`; ProtocolError with one line that says what is wrong."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
            raise ProtocolError(str(error), self._request_id(payload)) from None
        except UnicodeDecodeError as error:
            raise ProtocolError(f"not UTF-8: {error.reason}") from None

    def decode(self, parts: list[bytes]) -> T:
        """The message in the frames after the identity."""
        if len(parts) != 2:
            raise ProtocolError(f"{len(parts)} frames instead of 2")
        if parts[0] != PROTOCOL:
            raise ProtocolError(f"protocol {bytes(parts[0][:8])!r} instead of {PROTOCOL!r}")
        return self.unpack(parts[1])

    def _request_id(self, payload: bytes | memoryview) -> str:
        try:
            found = self._loose.decode(payload).request_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""
        return found[:64] if isinstance(found, str) else ""
