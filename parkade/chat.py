"""`parkade chat`: a conversation in the terminal, one streamed answer after another."""

import asyncio
import contextlib
from typing import Any

from rich.console import Console

from parkade.api import Api, ApiError, Chunk, Note

HELP = "Enter sends, /new starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(url: str, api_key: str, system: str, max_tokens: int, temperature: float, seed: int | None) -> int:
    """Talk until the end of input. ApiError if no server answers at the start, or if its model has no chat template; later
    errors are shown and the talk goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    console = Console(highlight=False)
    api = Api(url, api_key)
    model = api.model()
    if not api.get("/props").get("has_chat_template", True):
        raise ApiError(f"the model {model!r} has no chat template, so it completes text and does not chat; use /v1/completions")
    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    console.print(f"{options['model']} at {api.url}. {HELP}", style="dim")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return 0
            case "/new":
                messages = list(opening)
                continue
        messages.append({"role": "user", "content": line})
        try:
            answer = asyncio.run(_answer(console, api, {**options, "messages": messages}))
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
            messages.pop()
        except ApiError as error:
            console.print(f"error: {error}", style="red")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


async def _answer(console: Console, api: Api, body: dict[str, Any]) -> str:
    """Print one answer while it comes; its whole text."""
    text = ""
    parkade: dict[str, Any] = {}
    finish_reason = None
    async for event in api.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}):
        match event:
            case Note("preempted"):
                console.print("[parked: the cache is full, this answer goes on soon]", style="yellow", markup=False)
            case Chunk():
                console.out(event.text, end="", highlight=False)
                text += event.text
                parkade = event.parkade or parkade
                finish_reason = event.finish_reason or finish_reason
    console.print()
    if parkade.get("parks"):
        console.print(f"(parked {parkade['parks']} times for {parkade['parked_ms']} ms in all)", style="dim")
    if finish_reason == "length":
        console.print("(cut off: the token limit or the context is reached)", style="dim")
    return text
