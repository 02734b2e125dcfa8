"""Side by side with a llama-server binary: same model file, same requests, over HTTP, rounds in turn.

    python -m benchmarks.peer --llama-server PATH/llama-server

Three figures: prompt tokens a second, generated tokens a second of one stream, and of four streams together. Each round
measures both servers one after the other, so that a slow minute of the machine hits both. parkade runs in exact mode and, unless
`--draft` says otherwise, without drafts: the prompts are random ids, and what a head makes of them says nothing.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.server import free_port, parkade_command, server
from parkade.api import event_lines
from wire.model_files import find_model

PROMPT_TOKENS = 1024
GENERATED = 256
CTX = 8192
TARGETS = {"prompt": 2.0, "one stream": 0.8, "four streams": 1.5}


async def stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> tuple[float, float, float, int]:
    """(sent, first token, last token, tokens): times in seconds."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "cache_prompt": False, "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise click.ClickException((await response.aread()).decode()[:500])
        async for line in event_lines(response):
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if chunk["choices"]:
                last = time.perf_counter()
                first = first or last
    return sent, first, last, tokens


class Prompts:
    """Token ids that never repeat, so that no server finds a prompt computed already."""

    def __init__(self) -> None:
        self.count = 0

    def next(self, length: int) -> list[int]:
        self.count += 1
        return [1000 + (self.count * 7919 + i * 104729) % 40000 for i in range(length)]


async def measure(url: str, prompts: Prompts) -> dict[str, float]:
    """The three rates of one server, tokens a second."""
    async with httpx.AsyncClient(base_url=url, timeout=300, headers={"connection": "close"}) as client:
        sent, first, _, _ = await stream(client, prompts.next(PROMPT_TOKENS), 1)
        _, one_first, one_last, one = await stream(client, prompts.next(64), GENERATED)
        four = await asyncio.gather(*(stream(client, prompts.next(64), GENERATED) for _ in range(4)))
    return {
        "prompt": PROMPT_TOKENS / (first - sent),
        "one stream": (one - 1) / (one_last - one_first),
        "four streams": sum((n - 1) / (last - first) for _, first, last, n in four),  # each from its own first token
    }


@click.command()
@click.option("--llama-server", required=True, type=click.Path(exists=True, dir_okay=False), help="the binary to measure against")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=os.cpu_count(), show_default=True, help="threads of llama-server; parkade uses all cores")
@click.option("--draft", default="0", show_default=True, help="of parkade")
@click.option("--out", type=click.Path(), help="write the data here as JSON")
def main(llama_server: str, rounds: int, threads: int, draft: str, out: str | None) -> None:
    model = find_model("smollm2").path
    folder = Path(tempfile.mkdtemp(prefix="parkade-peer-"))
    ours, theirs = free_port(), free_port()
    ours_command = parkade_command(ours, folder / "run", ctx=CTX, slots=4, draft=draft)
    theirs_command = [
        llama_server, "-m", str(model), "-c", str(CTX), "--parallel", "4", "--kv-unified", "-t", str(threads),
        "-tb", str(threads), "--port", str(theirs), "--no-webui",
    ]  # fmt: skip
    results: dict[str, dict[str, list[float]]] = {"parkade": {}, "llama-server": {}}
    console, prompts = Console(), Prompts()
    for number in range(rounds + 1):  # the first round warms up and is not counted
        for name, command, port in (("parkade", ours_command, ours), ("llama-server", theirs_command, theirs)):
            with server(command, port, folder / f"{name}.log") as url:
                asyncio.run(stream_once(url, prompts))
                rates = asyncio.run(measure(url, prompts))
            if number:
                for figure, rate in rates.items():
                    results[name].setdefault(figure, []).append(rate)
        console.print(f"round {number} of {rounds}" + (" (warm-up)" if not number else ""), style="dim")
    table = Table("tokens a second", "parkade", "llama-server", "ratio", "least..most", "target")
    for figure, target in TARGETS.items():
        a, b = results["parkade"][figure], results["llama-server"][figure]
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        table.add_row(
            figure, f"{statistics.median(a):.0f}", f"{statistics.median(b):.0f}", f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f}..{ratios[-1]:.2f}", f"{target}",
        )  # fmt: skip
    console.print(table)
    if out:
        Path(out).write_text(json.dumps(results, indent=1))


async def stream_once(url: str, prompts: Prompts) -> None:
    """Touch every page of code and memory once."""
    async with httpx.AsyncClient(base_url=url, timeout=300, headers={"connection": "close"}) as client:
        await stream(client, prompts.next(300), 20)


if __name__ == "__main__":
    main()
