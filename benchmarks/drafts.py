"""Drafts on against drafts off: tokens a second of one stream and of four, in rounds in turn, and how often the head was right.

    python -m benchmarks.drafts [--model bard] [--draft 2] [--temperature 0.8]

Both servers run all the time; a round asks one, then the other, for the same streams, so that a slow minute of the machine
hits both. The answers are compared too: drafts may change how fast a text comes, not the text.
"""

import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.server import free_port, parkade_command, server
from parkade.api import Api, event_lines
from parkade.drafts import Drafts

PROMPTS = [
    "The old king called his three sons before him and said to them that",
    "There was once a keeper of a lighthouse who had not spoken to anyone for",
    "In the beginning of that year the river rose above the fields, and the people",
    "My lord, the letter came this morning by a messenger who would not give his name, and",
]
WANTED = {("bard", 1): 1.4, ("smollm2", 1): 1.2}  # of the ratio; four streams: never slower than this
WANTED_OF_FOUR = 0.97


@dataclass
class Seen:
    """What one server gave for a number of streams, all rounds."""

    rates: list[float] = field(default_factory=list)  # tokens a second, prompts not counted
    tokens: int = 0
    drafts: list[Drafts] = field(default_factory=list)  # of each round
    ids: list[list[int]] = field(default_factory=list)  # of the last round, by stream


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int, temperature: float, seed: int) -> tuple[float, list[int]]:
    """(tokens a second from the first chunk on, ids)."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": seed, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    first, at_first, last = 0.0, 0, 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise click.ClickException((await response.aread()).decode()[:500])
        async for line in event_lines(response):
            if not line.startswith("data: {") or not (choices := json.loads(line[6:])["choices"]):
                continue
            if found := choices[0].get("token_ids"):
                ids += found
                last = time.perf_counter()
                first, at_first = (first, at_first) if first else (last, len(ids))
    return (len(ids) - at_first) / (last - first), ids


async def streams(url: str, count: int, tokens: int, temperature: float, round_: int) -> tuple[float, list[list[int]]]:
    """(tokens a second of all together, each counted from its own first chunk, ids by stream)."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        prompts = [PROMPTS[(round_ + number) % len(PROMPTS)] for number in range(count)]
        found = await asyncio.gather(*(stream(client, p, tokens, temperature, round_ * 10 + i) for i, p in enumerate(prompts)))
    return sum(rate for rate, _ in found), [ids for _, ids in found]


def measure(url: str, seen: Seen, count: int, tokens: int, temperature: float, round_: int) -> None:
    """One round of one server, added to what has been seen of it."""
    before = Drafts.of(Api(url).metrics())
    rate, seen.ids = asyncio.run(streams(url, count, tokens, temperature, round_))
    seen.drafts.append(Drafts.of(Api(url).metrics()).since(before))
    seen.rates.append(rate)
    seen.tokens += sum(map(len, seen.ids))


def ratio(with_drafts: Seen, without: Seen) -> list[str]:
    """Both rates, their ratio, and its spread over the rounds."""
    ratios = sorted(a / b for a, b in zip(with_drafts.rates, without.rates, strict=True))
    medians = [f"{statistics.median(seen.rates):.0f}" for seen in (with_drafts, without)]
    return [*medians, f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}..{ratios[-1]:.2f}"]


def drafts(seen: Seen) -> list[str]:
    """Tokens of a step and stream, and of the drafts at each position, how many were right."""
    drafted, accepted = (
        tuple(sum(values) for values in zip(*(getattr(one, name) for one in seen.drafts))) for name in ("drafted", "accepted")
    )
    total = Drafts(drafted, accepted)
    return [f"{total.tokens_per_step(seen.tokens):.2f}", total.shares()]


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--draft", default="auto", show_default=True, help="of the server with drafts")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--tokens", default=256, show_default=True, help="of each stream")
@click.option("--rounds", default=5, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", type=click.Path(), help="write the data here as JSON")
def main(model: str, draft: str, temperature: float, tokens: int, rounds: int, dtype: str, out: str | None) -> None:
    folder, console = Path(tempfile.mkdtemp(prefix="parkade-drafts-")), Console(width=120)
    on_port, off_port = free_port(), free_port()
    common = {"model": model, "ctx": 8192, "slots": 4, "dtype": dtype}
    on_command = parkade_command(on_port, folder / "on", draft=draft, **common)
    off_command = parkade_command(off_port, folder / "off", draft=0, **common)
    seen: dict[int, tuple[Seen, Seen]] = {count: (Seen(), Seen()) for count in (1, 4)}
    same = dict.fromkeys(seen, 0)
    with server(on_command, on_port, folder / "on.log") as on, server(off_command, off_port, folder / "off.log") as off:
        for url in (on, off):  # touch every page of code and memory once
            asyncio.run(streams(url, 4, 64, temperature, 0))
        for round_ in range(rounds):
            for count, (with_drafts, without) in seen.items():
                pairs = [(on, with_drafts), (off, without)]
                for url, what in pairs if round_ % 2 else reversed(pairs):  # nobody is always the second
                    measure(url, what, count, tokens, temperature, round_)
                same[count] += with_drafts.ids == without.ids
            console.print(f"round {round_ + 1} of {rounds}", style="dim")
    table = Table("streams", "tok/s on", "tok/s off", "ratio", "least..most", "wanted", "tokens a step", "accepted", "same ids")
    for count, (with_drafts, without) in seen.items():
        wanted = WANTED.get((model, 1)) if count == 1 else WANTED_OF_FOUR
        cells = [*ratio(with_drafts, without), f"{wanted or ''}", *drafts(with_drafts)]
        table.add_row(str(count), *cells, f"{same[count]} of {rounds}")
    console.print(f"{model}, --draft {draft} against 0, temperature {temperature}, {tokens} tokens a stream, {rounds} rounds")
    console.print(table)
    if out:
        data = {str(count): {"on": asdict(pair[0]), "off": asdict(pair[1])} for count, pair in seen.items()}
        Path(out).write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
