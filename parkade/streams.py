"""One stream followed from its request to its end, with the times and parks that a person wants to know about."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from parkade.api import Api, ApiError, Chunk, Note


@dataclass
class Followed:
    """What has been seen of a stream so far. Times are seconds of a monotonic clock."""

    name: str
    state: Literal["waiting", "running", "parked", "ended", "failed"] = "waiting"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    asked_at: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) of each chunk that had any
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    parks: int = 0
    parked_ms: int = 0
    recomputed_tokens: int = 0
    error: str = ""

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first token."""
        return self.arrivals[0][0] - self.asked_at if self.arrivals else None

    def gaps_s(self) -> list[float]:
        """Seconds between chunks with tokens; a chunk of several tokens counts as one arrival."""
        times = [at for at, _ in self.arrivals]
        return [later - earlier for earlier, later in zip(times, times[1:])]


async def follow(
    api: Api, path: str, body: dict[str, Any], stream: Followed, changed: Callable[[Followed], None] = lambda stream: None
) -> Followed:
    """Run one streaming request to its end. An error ends in `stream.error`; `changed` is told of each change of state."""
    body = {"stream_options": {"include_usage": True}, "return_token_ids": True, **body}
    stream.asked_at = time.monotonic()
    try:
        async for event in api.stream(path, body):
            before = stream.state
            take(stream, event, time.monotonic())
            if stream.state != before:
                changed(stream)
        stream.state = "ended"
    except ApiError as error:
        stream.state, stream.error = "failed", str(error)
    changed(stream)
    return stream


def take(stream: Followed, event: Chunk | Note, now: float) -> None:
    """Enter one event into what is known of the stream."""
    match event:
        case Note("preempted"):
            stream.state = "parked"
            stream.parks += 1
        case Note("resumed"):
            stream.state = "running"
        case Chunk():
            stream.text += event.text
            if event.token_ids:
                stream.state = "running"
                stream.token_ids += event.token_ids
                stream.arrivals.append((now, len(event.token_ids)))
            stream.finish_reason = event.finish_reason or stream.finish_reason
            stream.usage = event.usage or stream.usage
            if event.parkade:
                stream.parks = event.parkade["parks"]
                stream.parked_ms = event.parkade["parked_ms"]
                stream.recomputed_tokens = event.parkade["recomputed_tokens"]
