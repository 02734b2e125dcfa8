"""Four chats that fit alone but not together: who finishes, here and with a llama-server binary on the same model file.

    python -m benchmarks.pressure [--llama-server PATH/llama-server] [--model bard] [--draft 2]

Three rounds for each park budget; then the same requests to llama-server with one unified cache of the same size (SmolLM2).
"""

import asyncio
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.server import free_port, parkade_command, server
from parkade.api import Api
from parkade.streams import Followed, follow
from wire.model_files import find_model

CTX = 2048
GENERATED = 700
PROMPT = "Story number {0} is about the year {1} and what a traveller saw on the road from the hills to the sea. "


async def chats(url: str) -> list[Followed]:
    """Four streams of about 250 prompt and 700 generated tokens, at once, to their ends."""

    async def one(number: int) -> Followed:
        prompt = PROMPT.format(number, 1800 + 7 * number) * 10
        body = {
            "prompt": prompt,
            "max_tokens": GENERATED,
            "temperature": 0,
            "ignore_eos": True,
        }
        return await follow(api, "/v1/completions", body, Followed(f"chat {number}"))

    api = Api(url)
    return await asyncio.gather(*(one(number) for number in range(4)))


def row(name: str, round_number: int, seconds: float, answers: list[Followed]) -> tuple[str, ...]:
    whole = [answer for answer in answers if answer.usage.get("completion_tokens") == GENERATED and not answer.error]
    errors = {answer.error for answer in answers if answer.error}
    tokens = sum(answer.usage.get("completion_tokens", 0) for answer in answers)
    figures = (sum(a.parks for a in answers), sum(a.parked_ms for a in answers), sum(a.recomputed_tokens for a in answers))
    return (
        name,
        str(round_number),
        f"{len(whole)} of 4",
        f"{tokens / seconds:.0f}",
        *map(str, figures),
        "; ".join(sorted(errors))[:60],
    )


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--llama-server", type=click.Path(exists=True, dir_okay=False), help="a binary to compare with")
@click.option("--model", default="smollm2", show_default=True)
@click.option("--draft", default="auto", show_default=True)
def main(rounds: int, llama_server: str | None, model: str, draft: str) -> None:
    folder, console = Path(tempfile.mkdtemp(prefix="parkade-pressure-")), Console(width=120)
    table = Table("server", "round", "whole", "tok/s", "parks", "ms parked", "recomputed", "error")
    for park_ram in ("8GiB", "16MiB", "0"):
        port = free_port()
        settings = {"model": model, "draft": draft, "ctx": CTX, "slots": 4, "park_ram": park_ram}
        with server(parkade_command(port, folder / park_ram, **settings), port, folder / f"{park_ram}.log") as url:
            measure(url, f"parkade --park-ram {park_ram}", rounds, table)
    if llama_server:
        port = free_port()
        command = [
            llama_server, "-m", str(find_model("smollm2").path), "-c", str(CTX), "--parallel", "4", "--kv-unified",
            "--port", str(port), "--no-webui",
        ]  # fmt: skip
        with server(command, port, folder / "llama.log") as url:
            measure(url, "llama-server --kv-unified", rounds, table)
    console.print(table)


def measure(url: str, name: str, rounds: int, table: Table) -> None:
    for number in range(1, rounds + 1):
        started = time.monotonic()
        answers = asyncio.run(chats(url))
        table.add_row(*row(name, number, time.monotonic() - started, answers))


if __name__ == "__main__":
    main()
