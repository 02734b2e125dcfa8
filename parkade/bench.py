"""`parkade bench`: equal streams at once against a server, and what they saw as a table."""

import asyncio
import contextlib
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from parkade.api import Api, ApiError
from parkade.drafts import Drafts
from parkade.local import started
from parkade.streams import Followed, follow

TEXT = (
    "the harbour lies quiet before dawn and the boats move with the tide while a keeper climbs the stairs of the old tower "
    "to put out the lamp that has burned all night for those who are still at sea and will not come home until the evening"
)


def bench(
    url: str, api_key: str, serve_flags: list[str] | None, streams: int, prompt_tokens: int, max_tokens: int, rounds: int
) -> int:
    """Run `rounds` rounds and print a line for each; status 1 if a stream failed. With `serve_flags` a server of its own."""
    with contextlib.ExitStack() as stack:
        if serve_flags is not None:
            url = stack.enter_context(started(serve_flags))
        api = Api(url, api_key)
        model = api.model()
        prompts = [prompt(api, stream, prompt_tokens) for stream in range(streams)]
        table = empty_table()
        failed = []
        for round_ in range(1, rounds + 1):
            body = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
            before, began = Drafts.of(api.metrics()), time.monotonic()
            seen = asyncio.run(_round(api, body, prompts))
            took_s = time.monotonic() - began
            table.add_row(str(round_), *figures(seen, took_s, Drafts.of(api.metrics()).since(before)))
            failed += [stream for stream in seen if stream.error]
        console = Console()
        console.print(
            f"{model} at {url}: {streams} streams, {prompt_tokens} prompt and {max_tokens} generated tokens each; times in ms; "
            f"tok/step: tokens that a stream gets in one step; accepted: of the drafts, by position"
        )
        console.print(table)
        for stream in failed[:5]:
            console.print(f"{stream.name}: {stream.error}", style="red", markup=False)
        return 1 if failed else 0


def prompt(api: Api, number: int, tokens: int) -> list[int]:
    """Exactly `tokens` token ids of plain words, different for each number from the start on."""
    known = TEXT.split()
    words = [f"{number}", *(known[(i * (number % 7 + 1) + number) % len(known)] for i in range(tokens))]
    ids = api.post("/tokenize", {"content": " ".join(words)})["tokens"]
    if len(ids) < tokens:
        raise ApiError(f"{tokens} words made only {len(ids)} tokens")
    return ids[:tokens]


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


async def _round(api: Api, body: dict[str, Any], prompts: list[list[int]]) -> list[Followed]:
    streams = [Followed(f"stream {number}") for number in range(len(prompts))]
    runs = (follow(api, "/v1/completions", {**body, "prompt": ids}, stream) for ids, stream in zip(prompts, streams, strict=True))
    return await asyncio.gather(*runs)


def empty_table() -> Table:
    """A line a round, in 80 columns."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in (
        "round", "tok/s", "tok/\nstep", "accepted", "TTFT\np50", "TTFT\np99", "gap\np50", "gap\np99", "gap\nmost", "parks",
        "recom-\nputed", "failed",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    return table


def figures(streams: list[Followed], took_s: float, drafts: Drafts) -> list[str]:
    """One round's cells of the table, without its number. `drafts` of the whole server in that time."""
    first = [1000 * stream.first_token_s for stream in streams if stream.first_token_s is not None]
    gaps = [1000 * gap for stream in streams for gap in stream.gaps_s()]
    tokens = sum(len(stream.token_ids) for stream in streams)
    times = [percentile(first, 50), percentile(first, 99), percentile(gaps, 50), percentile(gaps, 99), max(gaps, default=0.0)]
    counts = [sum(s.parks for s in streams), sum(s.recomputed_tokens for s in streams), sum(bool(s.error) for s in streams)]
    speed = [f"{tokens / took_s:.1f}", f"{drafts.tokens_per_step(tokens):.2f}", drafts.shares()]
    return [*speed, *(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in times), *map(str, counts)]
