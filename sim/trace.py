"""Traces: what arrives when, how long its prompt and its answer are. JSON Lines, one request a line.

    {"id": "a", "arrival_s": 0.0, "prompt_tokens": 200, "output_tokens": 150}
    {"id": "b", "arrival_s": 0.4, "prompt_tokens": 80, "output_tokens": 40, "priority": -1}
    {"id": "a2", "prompt_tokens": 400, "output_tokens": 90, "after": "a", "think_s": 3.0}

`after`: it arrives `think_s` after that request has ended, not before `arrival_s`, and its prompt begins with that request's
whole text, which its `prompt_tokens` count too, and has more to say. `priority` as in requests: lower runs first.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

_Count = Annotated[int, Meta(ge=1, le=2**31)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class TraceError(ValueError):
    """A trace that the user must change; the text is one line that names the place."""


class Request(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. It ends when it has `output_tokens`, never by itself."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    prompt_tokens: _Count
    output_tokens: _Count
    arrival_s: _Seconds = 0.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    after: str = ""
    think_s: _Seconds = 0.0

    @property
    def cells(self) -> int:
        """Tokens it has in the end."""
        return self.prompt_tokens + self.output_tokens


def read(path: str) -> list[Request]:
    """The trace in a file. TraceError names the file and the line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    try:
        return parse(lines)
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from None


def write(path: str, trace: Iterable[Request]) -> None:
    """The trace as a file that `read` takes."""
    encode = msgspec.json.encode
    try:
        Path(path).write_bytes(b"".join(encode(request) + b"\n" for request in trace))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def parse(lines: Iterable[bytes]) -> list[Request]:
    """Requests of lines of JSON; empty lines are skipped. TraceError names the line."""
    decoder = msgspec.json.Decoder(Request)
    trace: list[Request] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number}: {error}") from None
        if request.id in line_of:
            raise TraceError(f"line {number}: the id {request.id!r} is that of line {line_of[request.id]} already")
        line_of[request.id] = number
        trace.append(request)
    if not trace:
        raise TraceError("line 1: no request")
    _check_after(trace, line_of)
    return trace


def _check_after(trace: list[Request], line_of: dict[str, int]) -> None:
    """Whoever comes after another names one that exists, includes its text, and none waits for itself."""
    by_id = {request.id: request for request in trace}
    ends = set()  # those that are known to begin by themselves sooner or later
    for request in trace:
        path = []
        at = request
        while at.after and at.id not in ends:
            where = f"line {line_of[at.id]}: {at.id!r}"
            if at.after not in by_id:
                raise TraceError(f"{where} comes after {at.after!r}, which is not in the trace")
            before = by_id[at.after]
            if at.prompt_tokens <= before.cells:
                text = f"{where} comes after {at.after!r} and includes its {before.cells} tokens and one more at least"
                raise TraceError(f"{text}, but has {at.prompt_tokens} prompt_tokens")
            path.append(at.id)
            at = before
            # a circle needs no check of its own: from one to the next, prompts only grow
        ends.update(path)
