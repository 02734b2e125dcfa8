"""Clients of a run: each asks for one stream after the other and writes down all it sees. They judge nothing."""

import asyncio
import json
import ssl
from collections.abc import Callable

import httpx
import msgspec

from parkade.api import event_lines
from router.client import Client, RejectedError
from tests.system.nemesis.history import History
from tests.system.nemesis.plan import Ask
from wire.messages import Finished, Notice, Tokens

END_S = 90.0  # a stream that says nothing new for so long never ends
PAUSE_S = 0.1  # before a server that is not there is asked again
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used; otherwise each HTTP client makes one of its own, which is large


def submitted(history: History, ask: Ask, how: str) -> None:
    history.record(
        "submit", id=ask.id, how=how, prompt=ask.prompt, max_tokens=ask.max_tokens, sampling=msgspec.to_builtins(ask.sampling)
    )


async def zeromq_client(address: str, history: History, asks: Callable[[int], Ask | None]) -> None:
    """Until `asks(number)` has no more."""
    number = 0
    while True:
        async with Client(address) as client:
            while (ask := asks(number)) is not None:
                number += 1
                if await zeromq_stream(client, history, ask):
                    break  # it goes away, and comes back as another
            else:
                return


async def zeromq_stream(client: Client, history: History, ask: Ask) -> bool:
    """Whether the client is to go away."""
    submitted(history, ask, "zeromq")
    count = 0
    parking: asyncio.Task | None = None
    stream = client.generate(
        ask.prompt, request_id=ask.id, max_tokens=ask.max_tokens, ignore_eos=True, priority=ask.priority,
        **msgspec.structs.asdict(ask.sampling),
    )  # fmt: skip
    try:
        while True:
            async with asyncio.timeout(END_S):
                message = await anext(stream)
            match message:
                case Tokens(offset=offset, tokens=tokens):
                    history.record("tokens", id=ask.id, offset=offset, tokens=tokens)
                    before, count = count, count + len(tokens)
                    if before < ask.park_at <= count:
                        parking = asyncio.create_task(_park(client, history, ask))
                    if before < ask.leave_at <= count:
                        history.record("leave", id=ask.id, how=ask.leave_how)
                        if ask.leave_how == "vanish":
                            history.record("end", id=ask.id, outcome="left")
                            return True
                        await client.cancel(ask.id)
                case Notice(event=event, kind=kind, mode=mode, reason=reason):
                    history.record(event, id=ask.id, kind=kind, mode=mode, reason=reason)
                case Finished(reason=reason, usage=usage, error=error, code=code):
                    outcome = "lost" if code == "router_lost" else reason
                    history.record("end", id=ask.id, outcome=outcome, tokens=usage.completion_tokens, code=code, error=error)
    except StopAsyncIteration:
        return False
    except RejectedError as error:
        history.record("end", id=ask.id, outcome="rejected", code=error.code, error=error.message)
        await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        history.record("end", id=ask.id, outcome="never", error=f"nothing new for {END_S:.0f} s after {count} tokens")
    finally:
        await stream.aclose()
        if parking is not None:
            await parking
    return False


async def _park(client: Client, history: History, ask: Ask) -> None:
    """Set it aside and bring it back; whether that could be done is no matter, only that its stream ends as it should."""
    try:
        answer = await client.park(ask.id, 5.0, timeout_s=ask.park_s + 0.5)
        history.record("set_aside", id=ask.id, code=answer.code)
        await asyncio.sleep(ask.park_s)
        await client.resume(ask.id, timeout_s=1.0)
    except (TimeoutError, ConnectionError, asyncio.CancelledError) as error:
        history.record("set_aside", id=ask.id, code=type(error).__name__)


async def http_client(url: str, history: History, asks: Callable[[int], Ask | None]) -> None:
    """Until `asks(number)` has no more."""
    number = 0
    while (ask := asks(number)) is not None:
        number += 1
        async with httpx.AsyncClient(base_url=url, timeout=END_S, verify=TLS) as client:
            submitted(history, ask, "http")
            try:
                await http_stream(client, history, ask)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                history.record("end", id=ask.id, outcome="unreached", error=repr(error))
                await asyncio.sleep(PAUSE_S)
            except httpx.ReadTimeout as error:
                history.record("end", id=ask.id, outcome="never", error=repr(error))
            except httpx.HTTPError as error:
                history.record("end", id=ask.id, outcome="lost", error=repr(error))


async def http_stream(client: httpx.AsyncClient, history: History, ask: Ask) -> None:
    body = {
        "prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "ignore_eos": True, "temperature": ask.sampling.temperature, "seed": ask.sampling.seed,
    }  # fmt: skip
    count, reason, tokens, error, done = 0, "", 0, None, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode()
            history.record("end", id=ask.id, outcome="rejected", code=str(response.status_code), error=said[:300])
            await asyncio.sleep(PAUSE_S)
            return
        async for line in event_lines(response):
            if line.startswith(": ") and "preempt" in line:
                history.record("comment", id=ask.id, text=line[2:])
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[6:])
            error = chunk.get("error") or error
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk.get("choices", ()):
                ids = choice.get("token_ids") or []
                reason = choice.get("finish_reason") or reason
                if ids:
                    history.record("tokens", id=ask.id, offset=count, tokens=ids)
                before, count = count, count + len(ids)
                if before < ask.leave_at <= count:
                    history.record("leave", id=ask.id, how="vanish")
                    history.record("end", id=ask.id, outcome="left")
                    return
    if error:
        outcome = "lost" if error.get("code") == "router_lost" else "error"
        history.record("end", id=ask.id, outcome=outcome, code=error.get("code"), error=error.get("message"))
    else:
        history.record("end", id=ask.id, outcome=reason if done else "lost", tokens=tokens, error="" if done else "no [DONE]")
