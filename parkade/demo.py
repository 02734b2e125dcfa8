"""`parkade demo`: four chats that fit alone but not together, through real processes; all four must come out whole."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parkade.api import Api, ApiError
from parkade.local import started
from parkade.status import STATES, pool_bar
from parkade.streams import Followed, follow

LOOK_S = 0.25
BAR_CHARS = 24
TAIL_CHARS = 46
_SPECIAL = re.compile(r"<\|\w+\|>")

CHATS = {
    "lighthouse": (
        "I am writing a long story about a lighthouse keeper named Maren who lives alone on a small rock far out at sea. Her "
        "lamp has burned every night for thirty years. She keeps a thick blue book in which she writes the name of each ship "
        "that passes, the colour of its sails, the direction of the wind and one thing that made her smile that day. One "
        "autumn evening a boat without a name and without any crew drifts against the rocks below her tower. In its cabin she "
        "finds a table laid for two, a kettle that is still warm, and a letter that begins with her own name. "
    ),
    "railway": (
        "Please help me to plan a railway for a wooden valley town. The valley has a river, two steep hills, a sawmill, a market "
        "square, a school and about four hundred houses. In winter the road over the pass is closed for three months, and then "
        "the train is the only way to bring flour, medicine and letters. The track has to cross the river twice, the engine is "
        "small and cannot climb more than three metres in a hundred, and the people of the town will build everything with their "
        "own hands in two summers. The carpenter wants tunnels, the teacher wants bridges, and the baker only wants the train to "
        "be on time. "
    ),
    "garden": (
        "My grandmother left me a garden with a high wall around it. There are nine old apple trees, a well with clear water, a "
        "greenhouse with broken windows, a row of beehives that nobody has opened for five years, and a shed full of tools whose "
        "names I do not know. The soil is dark near the well and sandy near the gate. Spring is three weeks away, I have every "
        "Saturday free, a little money, and two neighbours who know a lot but never agree with each other: one of them says that "
        "everything must be dug over before the first rain, the other one says that a spade is the worst enemy of a garden. "
    ),
    "museum": (
        "We want to open a small museum of ordinary things in a former post office. It shall show what people carried in their "
        "pockets, what stood on their kitchen shelves, which songs they hummed while they washed the dishes and how they counted "
        "money, time and children. There are six rooms, a cellar, a counter with brass bars, one hundred and twenty letter boxes "
        "with little doors, and a clock that has stopped at ten past four. Visitors of every age should be allowed to touch "
        "almost everything. School classes will come in the morning, pensioners in the afternoon, and on Fridays we stay open "
        "until midnight. "
    ),
}
TASK = (
    "Think about it step by step and then write as much as you can. Describe the people and the places, explain what happens "
    "first and what happens next, say what could go wrong and what to do about it, and give many small details: what is heard "
    "and seen and smelled, who speaks with whom and in which words, how the weather changes, and what everybody remembers "
    "of it many years later. Never stop early."
)


def demo(ctx: int, max_tokens: int, park_ram: str) -> int:
    """Run it; status 0 if every chat is whole. ApiError if the server does not start."""
    console = Console()
    wanted = len(CHATS) * (250 + max_tokens)
    console.print(
        f"Starting a server: SmolLM2-135M-Instruct, one pool of {ctx} cells. Then four chats of about 250 prompt and\n"
        f"{max_tokens} generated tokens each. They want {wanted} cells in the end: each fits alone, together they do not.",
        soft_wrap=True,
    )
    flags = ["--model", "smollm2", "--ctx", str(ctx), "--park-ram", park_ram]
    with started(flags) as url:
        api = Api(url)
        console.print(f"Ready at {url}.")
        chats = asyncio.run(_run(console, api, max_tokens))
        verdicts = [verdict(api, chat, max_tokens) for chat in chats]
    console.print(_result(chats, verdicts))
    whole = sum(verdict == "whole" for verdict in verdicts)
    parks = sum(chat.parks for chat in chats)
    console.print(
        f"{whole} of {len(chats)} chats whole, {parks} parks.", style="bold green" if whole == len(chats) else "bold red"
    )
    return 0 if whole == len(chats) else 1


def verdict(api: Api, chat: Followed, max_tokens: int) -> str:
    """`whole`, or what is wrong: every token there, and the text just what the token ids say."""
    if chat.error:
        return chat.error
    if len(chat.token_ids) != max_tokens or chat.finish_reason != "length":
        return f"{len(chat.token_ids)} of {max_tokens} tokens, finish_reason {chat.finish_reason}"
    said = api.post("/detokenize", {"tokens": chat.token_ids})["content"]
    if _SPECIAL.sub("", said) != chat.text:
        return "the text is not what the token ids say"
    return "whole"


async def _run(console: Console, api: Api, max_tokens: int) -> list[Followed]:
    """The four chats at once, with something to look at meanwhile."""
    chats = [Followed(name) for name in CHATS]
    model = api.model()

    def body(number: int, prompt: str) -> dict[str, Any]:
        return {
            "model": model, "messages": [{"role": "user", "content": prompt + TASK}], "max_tokens": max_tokens,
            "ignore_eos": True, "min_tokens": max_tokens, "temperature": 0.8, "top_p": 0.95, "seed": number,
        }  # fmt: skip

    with _view(console, api, chats, max_tokens) as changed:
        runs = (
            follow(api, "/v1/chat/completions", body(number, prompt), chat, changed)
            for number, (chat, prompt) in enumerate(zip(chats, CHATS.values(), strict=True))
        )
        return list(await asyncio.gather(*runs))


@contextlib.contextmanager
def _view(console: Console, api: Api, chats: list[Followed], max_tokens: int) -> Iterator[Any]:
    """A live picture on a terminal, one line for each change elsewhere. Yields what is to be told of changes."""
    if not console.is_terminal:
        yield lambda chat: console.print(f"{chat.name}: {chat.state}, {len(chat.token_ids)} tokens", markup=False)
        return
    metrics: dict[str, float] = {}
    with Live(_picture(chats, metrics, max_tokens), console=console, auto_refresh=False, transient=True) as live:

        async def draw() -> None:
            while True:
                with contextlib.suppress(ApiError):  # the picture shows what was seen last
                    metrics.update(await asyncio.to_thread(api.metrics))
                live.update(_picture(chats, metrics, max_tokens), refresh=True)
                await asyncio.sleep(LOOK_S)

        drawing = asyncio.ensure_future(draw())
        try:
            yield lambda chat: None
        finally:
            drawing.cancel()


def _picture(chats: list[Followed], metrics: dict[str, float], max_tokens: int) -> RenderableType:
    table = Table("chat", "state", "", "tokens", "parks", "text", box=None, header_style="dim")
    for chat in chats:
        count = len(chat.token_ids)
        done = round(BAR_CHARS * count / max_tokens)
        bar = Text.assemble(("█" * done, STATES.get(chat.state, "blue")), ("░" * (BAR_CHARS - done), "bright_black"))
        tail = " ".join(chat.text.split())[-TAIL_CHARS:]
        state = Text(chat.state, STATES.get(chat.state, ""))
        table.add_row(chat.name, state, bar, f"{count}/{max_tokens}", str(chat.parks), Text(tail, "dim", no_wrap=True))
    return Group(pool_bar(metrics), table)


def _result(chats: list[Followed], verdicts: list[str]) -> Table:
    table = Table("chat", "tokens", "parks", "ms parked", "recomputed", "whole or not")
    for chat, said in zip(chats, verdicts, strict=True):
        style = "green" if said == "whole" else "red"
        parked = f"{chat.parked_ms}", f"{chat.recomputed_tokens}"
        table.add_row(chat.name, str(len(chat.token_ids)), str(chat.parks), *parked, Text(said, style))
    return table
