"""What the ledger wants done: messages to clients and to workers. Values only."""

from msgspec import Struct

from wire.messages import Message, RouterToWorker


class ToClient(Struct, frozen=True):
    """`payload` is the encoded `message`. `probe`: it may be dropped where it cannot go out at once."""

    client: bytes
    message: Message
    payload: bytes
    probe: bool = False


class ToWorker(Struct, frozen=True):
    worker: bytes
    message: RouterToWorker
    probe: bool = False


Action = ToClient | ToWorker
