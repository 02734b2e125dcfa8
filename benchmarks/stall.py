"""The worst stall of a stream while its neighbour is parked and resumed, again and again.

    python -m benchmarks.stall [--model bard] [--draft 2]

One stream decodes; beside it another with a long context is parked and resumed all the time, saved or recomputed. The table
shows the gaps between the first stream's tokens: alone, beside a neighbour that only decodes, and during parks. The bound is
one prefill chunk's step more than the usual gap: that step is measured too.
"""

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.server import free_port, parkade_command, server
from router.client import Client
from wire.messages import Notice, Tokens

LONG_PROMPT = [100 + i * 7919 % 1800 for i in range(3072)]  # ids that small vocabularies have too
SHORT_PROMPT = list(range(1000, 1064))


async def gaps_of(client: Client, count: int) -> list[float]:
    """Milliseconds between the tokens of one stream."""
    gaps, last = [], 0.0
    async for message in client.generate(SHORT_PROMPT, max_tokens=count, temperature=0, ignore_eos=True):
        if isinstance(message, Tokens):
            now = time.perf_counter()
            if last:
                gaps.append((now - last) * 1000)
            last = now
    return gaps


async def neighbour(client: Client, parks: bool, started: asyncio.Event, stop: asyncio.Event) -> int:
    """A stream with a long context; parked at once whenever it has resumed, resumed whenever it is parked. Counts its parks."""
    count, request_id = 0, f"neighbour-{time.monotonic_ns()}"
    async for message in client.generate(LONG_PROMPT, max_tokens=4000, temperature=0, ignore_eos=True, request_id=request_id):
        if isinstance(message, Tokens) and not started.is_set():
            started.set()
            if parks:
                await client.park(request_id)
        elif isinstance(message, Notice) and message.event == "parked":
            count += 1
            await client.resume(request_id)
        elif isinstance(message, Notice):
            await client.park(request_id)
        if stop.is_set():
            break
    return count


async def measure(address: str, tokens: int) -> dict[str, tuple[list[float], int]]:
    result = {}
    async with Client(address) as client:
        await gaps_of(client, 50)
        result["alone"] = await gaps_of(client, tokens), 0
        for name, parks in (("beside a decoding neighbour", False), ("while it is parked and resumed", True)):
            started, stop = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(neighbour(client, parks, started, stop))
            await started.wait()
            gaps = await gaps_of(client, tokens)
            stop.set()
            result[name] = gaps, await task
    return result


async def chunk_ms(address: str, step_tokens: int) -> float:
    """The step of the long prompt's last full chunk: the time to its first token less that of the prompt without the chunk."""

    async def first_token_ms(prompt: list[int]) -> float:
        sent = time.perf_counter()
        async for message in client.generate(prompt, max_tokens=1, temperature=0):
            if isinstance(message, Tokens):
                return (time.perf_counter() - sent) * 1000
        raise click.ClickException("a stream ended without a token")

    async with Client(address) as client:
        pairs = [(await first_token_ms(LONG_PROMPT), await first_token_ms(LONG_PROMPT[:-step_tokens])) for _ in range(3)]
        return statistics.median(longer - shorter for longer, shorter in pairs)


@click.command()
@click.option("--tokens", default=400, show_default=True)
@click.option("--step-tokens", default=256, show_default=True)
@click.option("--model", default="smollm2", show_default=True)
@click.option("--draft", default="0", show_default=True)
@click.option("--out", type=click.Path(), help="write the data here as JSON")
def main(tokens: int, step_tokens: int, model: str, draft: str, out: str | None) -> None:
    console, folder, data = Console(width=120), Path(tempfile.mkdtemp(prefix="parkade-stall-")), {}
    table = Table("parks are", "gaps between tokens, ms", "p50", "p90", "p99", "worst", "parks", "one chunk's step")
    for mode, park_ram in (("saved", "8GiB"), ("recomputed", "0")):
        port, run_dir = free_port(), folder / mode
        settings = {"ctx": 8192, "slots": 4, "park_ram": park_ram, "step_tokens": step_tokens, "no_reuse": True}
        settings |= {"model": model, "draft": draft}
        with server(parkade_command(port, run_dir, **settings), port, folder / f"{mode}.log"):
            address = f"ipc://{run_dir}/client.sock"
            chunk = asyncio.run(chunk_ms(address, step_tokens))
            for name, (gaps, parks) in asyncio.run(measure(address, tokens)).items():
                data[f"{mode}: {name}"] = gaps
                cuts = statistics.quantiles(gaps, n=100)
                figures = [f"{x:.1f}" for x in (cuts[49], cuts[89], cuts[98], max(gaps))]
                table.add_row(mode, name, *figures, str(parks), f"{chunk:.0f}")
    console.print(table)
    if out:
        Path(out).write_text(json.dumps(data))


if __name__ == "__main__":
    main()
