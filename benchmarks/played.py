"""Plays a trace on a running server, as its ZeroMQ client, and says what the clients saw, in the figures of the simulator."""

import asyncio
import random
import time
from collections.abc import Iterable

from msgspec import Struct

from router.client import Client
from sim.figures import percentile
from sim.trace import Request
from wire.messages import Finished, Notice, Tokens

LEAST_ID, MOST_ID = 1000, 40_000  # plain tokens of the models that come along


class Played(Struct, frozen=True):
    """Seconds of a real clock, as the clients saw them; `wait` and `gap` as in sim.figures."""

    makespan_s: float
    requests: int
    failed: int
    output_tokens: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    longest_wait_s: float
    p99_wait_s: float
    p99_gap_s: float
    parks: int
    requests_parked: int
    tokens_recomputed: int
    errors: list[str]


class _Seen:
    """What all clients have seen so far."""

    def __init__(self) -> None:
        self.ttft: list[float] = []
        self.waits: list[float] = []
        self.gaps: list[float] = []
        self.tokens = self.parks = self.requests_parked = self.recomputed = 0
        self.errors: list[str] = []
        self.began_s = self.ended_s = 0.0


def play(address: str, trace: Iterable[Request], seed: int = 0) -> Played:
    """Run the trace to its end against the router at `address`, its client socket. Prompts are random tokens, draws greedy; no
    token ends a text; the prompt of one that comes after another begins with its text."""
    return asyncio.run(_play(address, list(trace), seed))


async def _play(address: str, trace: list[Request], seed: int) -> Played:
    seen = _Seen()
    texts: dict[str, asyncio.Future[list[int]]] = {}
    loop = asyncio.get_running_loop()
    async with Client(address) as client:
        for request in trace:
            texts[request.id] = loop.create_future()
        seen.began_s = time.monotonic()
        await asyncio.gather(*(_one(client, request, texts, seen, seed) for request in trace))
    span_s = seen.ended_s - seen.began_s
    return Played(
        makespan_s=span_s,
        requests=len(trace),
        failed=len(seen.errors),
        output_tokens=seen.tokens,
        tokens_per_s=seen.tokens / span_s if span_s else 0.0,
        ttft_p50_s=percentile(seen.ttft, 50),
        ttft_p99_s=percentile(seen.ttft, 99),
        longest_wait_s=max(seen.waits, default=0.0),
        p99_wait_s=percentile(seen.waits, 99),
        p99_gap_s=percentile(seen.gaps, 99),
        parks=seen.parks,
        requests_parked=seen.requests_parked,
        tokens_recomputed=seen.recomputed,
        errors=seen.errors[:5],
    )


async def _one(client: Client, request: Request, texts: dict[str, asyncio.Future[list[int]]], seen: _Seen, seed: int) -> None:
    prompt: list[int] = []
    if request.after:
        prompt += await texts[request.after]
        await asyncio.sleep(request.think_s)
    await asyncio.sleep(max(0.0, seen.began_s + request.arrival_s - time.monotonic()))
    rng = random.Random(f"{seed} {request.id}")
    prompt += [rng.randrange(LEAST_ID, MOST_ID) for _ in range(request.prompt_tokens - len(prompt))]
    text = list(prompt)
    asked_s = time.monotonic()
    last_s = parked_s = None
    options = {"max_tokens": request.output_tokens, "temperature": 0.0, "ignore_eos": True, "priority": request.priority}
    async for message in client.generate(prompt, request_id=request.id, **options):
        now = time.monotonic()
        match message:
            case Tokens(tokens=tokens):
                text += tokens
                seen.tokens += len(tokens)
                if last_s is None:
                    seen.ttft.append(now - asked_s)
                else:
                    seen.gaps += [now - last_s, *[0.0] * (len(tokens) - 1)]
                last_s = now
            case Notice(event="parked"):
                parked_s = now
            case Notice(event="resumed") if parked_s is not None:
                seen.waits.append(now - parked_s)
                parked_s = None
            case Finished(reason=reason, usage=usage, error=error):
                if parked_s is not None:
                    seen.waits.append(now - parked_s)
                seen.ended_s = max(seen.ended_s, now)
                seen.parks += usage.parks
                seen.requests_parked += usage.parks > 0
                seen.recomputed += usage.recomputed_tokens
                if reason == "error":
                    seen.errors.append(f"{request.id}: {error}")
    texts[request.id].set_result(text)
