"""Four chats that fit alone but not together: who finishes, with the same text as alone, and how fast, for each policy.

    python -m benchmarks.pressure [--policy watermark,lookahead,ondemand,off] [--over 1.5,2,4] [--park-ram 8GiB,0]
                                  [--resume-order most-parked,head] [--rounds 3] [--model bard] [--draft 2] [--json FILE]
                                  [--llama-server PATH/llama-server]

The pool holds what the four need together, divided by --over. In each round every server is started afresh, so that nothing can
be found again by hash, and the servers take turns; one has a pool that holds everything, and `of all` is the median of the ratios
to it within a round. A smaller pool batches fewer rows: that ratio is below 1 however cheap parks are. A llama-server binary gets
the same requests with one unified cache of the same size (SmolLM2).
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.server import free_port, parkade_command, server
from parkade.api import Api
from parkade.streams import Followed, follow
from wire.model_files import find_model

CHATS = 4
PROMPT_TOKENS = 260  # with GENERATED whole blocks: a pool of a fourth holds exactly one chat
GENERATED = 700
WANTED = CHATS * (PROMPT_TOKENS + GENERATED)  # cells
ROOMY = 8192  # cells of the pool in which nobody is ever parked
TEXT = "Story number {0} is about the year {1} and what a traveller saw on the road from the hills to the sea. "
Text = tuple[str, tuple[int, ...]]


class Server(Struct, frozen=True):
    """One configuration, with a name of its own; `binary` is a llama-server, which needs no other settings."""

    name: str
    ctx: int
    settings: dict[str, str] = {}
    binary: str = ""


class Round(Struct):
    """What four chats at once have given."""

    tokens_per_s: float
    whole: int
    equal: int  # to the text that each has alone; -1: not asked
    parks: int
    parked_s: float
    recomputed_tokens: int
    tokens_per_step: float  # 0: not told
    errors: list[str]


def pool(over: float) -> int:
    return int(WANTED / over) // 16 * 16


async def ask(url: str, prompts: list[list[int]], generated: int = GENERATED) -> list[Followed]:
    """Streams of these prompts, at once, to their ends."""

    async def one(number: int, prompt: list[int]) -> Followed:
        body = {"prompt": prompt, "max_tokens": generated, "temperature": 0, "ignore_eos": True}
        return await follow(api, "/v1/completions", body, Followed(f"chat {number}"))

    api = Api(url)
    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def is_whole(answer: Followed) -> bool:
    return answer.usage.get("completion_tokens") == GENERATED and not answer.error


def text_of(answer: Followed) -> Text:
    return answer.text, tuple(answer.token_ids)


def prompts_and_texts(url: str, rounds: int) -> list[tuple[list[list[int]], list[Text]]]:
    """For each round four prompts, none like another, and what each of them alone is answered with."""
    api = Api(url)
    found = []
    for first in range(0, CHATS * rounds, CHATS):
        texts = [TEXT.format(number, 1800 + 7 * number) * 20 for number in range(first, first + CHATS)]
        prompts = [api.post("/tokenize", {"content": text})["tokens"][:PROMPT_TOKENS] for text in texts]
        found.append((prompts, [text_of(asyncio.run(ask(url, [prompt]))[0]) for prompt in prompts]))
    return found


def measure(url: str, prompts: list[list[int]], alone: list[Text] | None) -> Round:
    """The four at once, after a word that wakes the server up. Without `alone` it is no parkade."""
    asyncio.run(ask(url, [prompts[0][::-1]], generated=8))
    steps = _steps(url) if alone else 0.0
    started = time.monotonic()
    answers = asyncio.run(ask(url, prompts))
    seconds = time.monotonic() - started
    tokens = sum(answer.usage.get("completion_tokens", 0) for answer in answers)
    return Round(
        tokens_per_s=tokens / seconds,
        whole=sum(map(is_whole, answers)),
        equal=sum(text_of(answer) == text for answer, text in zip(answers, alone, strict=True)) if alone else -1,
        parks=sum(answer.parks for answer in answers),
        parked_s=sum(answer.parked_ms for answer in answers) / 1000,
        recomputed_tokens=sum(answer.recomputed_tokens for answer in answers),
        tokens_per_step=tokens / (_steps(url) - steps) if alone else 0.0,
        errors=sorted({answer.error for answer in answers if answer.error}),
    )


def _steps(url: str) -> float:
    return Api(url).metrics()["parkade_steps_total"]


def table_of(results: dict[str, list[Round]]) -> Table:
    """A line for each server; the first one holds everything."""
    names = (
        "server",
        "whole",
        "as alone",
        "tok/s, each round",
        "of all",
        "tok a step",
        "parks",
        "s parked",
        "recomputed",
        "error",
    )
    table = Table(*names)
    whole_pool = next(iter(results.values()))
    for name, rounds in results.items():
        wanted = CHATS * len(rounds)
        ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(rounds, whole_pool, strict=True)]
        table.add_row(
            name,
            f"{sum(r.whole for r in rounds)} of {wanted}",
            f"{sum(r.equal for r in rounds)} of {wanted}" if rounds[0].equal >= 0 else "",
            ", ".join(f"{r.tokens_per_s:.0f}" for r in rounds),
            f"{statistics.median(ratios):.2f}",
            f"{statistics.mean(r.tokens_per_step for r in rounds):.2f}",
            ", ".join(str(r.parks) for r in rounds),
            f"{statistics.mean(r.parked_s for r in rounds):.1f}",
            ", ".join(str(r.recomputed_tokens) for r in rounds),
            "; ".join(sorted({error for r in rounds for error in r.errors}))[:80],
        )
    return table


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@click.command(
    help="Four chats that fit alone but not together: who is whole, equal to the solo run, and how fast. See the file."
)
@click.option("--policy", default="ondemand", show_default=True, help="a comma list")
@click.option("--over", default="2", show_default=True, help="how many times the pool is oversubscribed; a comma list")
@click.option("--park-ram", default="8GiB,16MiB,0", show_default=True, help="a comma list")
@click.option("--park-mode", default="save", show_default=True, help="a comma list")
@click.option("--resume-order", default="head", show_default=True, help="a comma list")
@click.option("--rounds", default=3, show_default=True)
@click.option("--model", default="smollm2", show_default=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="write every round there")
@click.option("--llama-server", type=click.Path(exists=True, dir_okay=False), help="a binary to compare with")
def main(policy: str, over: str, park_ram: str, park_mode: str, resume_order: str, rounds: int, model: str, draft: str,
         json_file: str | None, llama_server: str | None) -> None:  # fmt: skip
    servers = [Server("a pool for all", ROOMY)]
    for times in map(float, _list(over)):
        for one, ram, mode, order in itertools.product(*map(_list, (policy, park_ram, park_mode, resume_order))):
            settings = {"policy": one, "park_ram": ram, "park_mode": mode, "resume_order": order}
            how = "" if one == "off" else f", {mode} {ram}, {order}"
            servers.append(Server(f"{times:g} x, {one}{how}", pool(times), settings))
        if llama_server:
            servers.append(Server(f"{times:g} x, llama-server --kv-unified", pool(times), binary=llama_server))
    servers = list({one.name: one for one in servers}.values())  # without parking it does not matter how
    results = run(servers, rounds, {"model": model, "draft": draft, "slots": str(CHATS)})
    Console(width=150).print(table_of(results))
    if json_file:
        Path(json_file).write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def run(servers: list[Server], rounds: int, common: dict[str, str]) -> dict[str, list[Round]]:
    """Every server once in each round, each time afresh; what it gave, by its name."""
    folder, console = Path(tempfile.mkdtemp(prefix="parkade-pressure-")), Console(stderr=True)
    results: dict[str, list[Round]] = {one.name: [] for one in servers}
    with _started(servers[0], folder / "alone", common) as url:
        asked = prompts_and_texts(url, rounds)
    for number, (prompts, alone) in enumerate(asked):
        for index, one in enumerate(servers):
            with _started(one, folder / f"{number}-{index}", common) as url:
                found = measure(url, prompts, None if one.binary else alone)
            results[one.name].append(found)
            console.print(f"round {number + 1}: {one.name}: {found.whole} of {CHATS} whole, {found.tokens_per_s:.0f} tok/s")
    return results


def _started(one: Server, folder: Path, common: dict[str, str]) -> AbstractContextManager[str]:
    port = free_port()
    if one.binary:
        command = [
            one.binary, "-m", str(find_model("smollm2").path), "-c", str(one.ctx), "--parallel", str(CHATS), "--kv-unified",
            "--port", str(port), "--no-webui",
        ]  # fmt: skip
    else:
        command = parkade_command(port, folder, ctx=one.ctx, **common, **one.settings)
    return server(command, port, folder.with_suffix(".log"))


if __name__ == "__main__":
    main()
