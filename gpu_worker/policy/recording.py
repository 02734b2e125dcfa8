"""The format of a journal: what a scheduler was told and what it planned, so that another can be told the same.

A journal is MAGIC, then records, each its length (4 bytes, little-endian) and msgpack. The first is a Header. A scheduler with
its limits that hears the same events at the same times makes the same plans: that is what `digest` compares. Journals hold
prompts and texts as token ids. A worker that was killed leaves a torn record at the end: reading stops before it.
"""

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
from msgspec import Struct

from gpu_worker.policy.events import Event, Load, Plan, Save
from gpu_worker.policy.limits import Limits

MAGIC = b"PKJ1"
MOST_RECORD_BYTES = 1 << 28  # a longer one is no record: the file is damaged
LENGTH_BYTES = 4


class JournalError(ValueError):
    """A file that is no journal; the text is one line."""


class Record(Struct, frozen=True, tag=True, gc=False):
    """Base of what a journal holds."""


class Header(Record):
    """Who writes, and what a scheduler needs to begin like the one that was recorded."""

    limits: Limits
    worker: str = ""
    model: str = ""
    dtype: str = ""


class Heard(Record):
    """`event` was given to `handle` at `now`."""

    now: float
    event: Event


class RowSummary(Struct, frozen=True, array_like=True, gc=False):
    """What a reader wants to know of a row of a step."""

    request_id: str
    start: int
    count: int
    samples: bool
    draft: int


class Planned(Record):
    """`plan` was called at `now`, and this came of it. `copies` of its `actions` start a copy."""

    now: float
    digest: bytes
    rows: list[RowSummary]
    actions: int
    copies: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Header | Heard | Planned)


def planned(plan: Plan, now: float) -> Planned:
    """What is kept of a plan that was made at `now`."""
    rows = [RowSummary(row.request_id, row.start, row.count, row.samples, row.draft) for row in plan.rows]
    copies = sum(isinstance(action, Save | Load) for action in plan.actions)
    return Planned(now, plan_digest(plan), rows, len(plan.actions), copies)


def plan_digest(plan: Plan) -> bytes:
    """8 bytes that depend on all that a plan says: its actions in order, its epoch, and its rows but for their tokens, which
    the events say."""
    rows = [
        (
            row.request_id,
            row.start,
            row.count,
            row.samples,
            row.draft,
            row.state_slot,
            row.banned,
            row.prompt_logprobs,
            row.blocks,
        )
        for row in plan.rows
    ]
    return hashlib.blake2b(_ENCODER.encode((plan.epoch, plan.actions, rows)), digest_size=8).digest()


def framed(record: Record) -> bytes:
    """The bytes of a record in the file, its length first."""
    body = _ENCODER.encode(record)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read(file: BinaryIO) -> Iterator[Header | Heard | Planned]:
    """The records up to the end or the tear, the Header first. JournalError if the file is none or is damaged before its end."""
    if file.read(len(MAGIC)) != MAGIC:
        raise JournalError("this is no journal")
    first = True
    while (record := _next(file)) is not None:
        if first != isinstance(record, Header):
            raise JournalError("the journal is damaged: its first record, and no other, must be the header")
        first = False
        yield record
    if first:
        raise JournalError("the journal ends before its header")


def _next(file: BinaryIO) -> Header | Heard | Planned | None:
    """The next record, or None at the end and where the last one is torn."""
    prefix = file.read(LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES:
        return None
    if length > MOST_RECORD_BYTES:
        raise JournalError(f"the journal is damaged: a record of {length} bytes")
    body = file.read(length)
    if len(body) < length:
        return None
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise JournalError(f"the journal is damaged, or of another version: {error}") from None
