"""One answer from its requests to its last byte: submit, wait until the router has accepted, stream or collect, account.

What is particular to an endpoint (the shape of chunks and bodies) is in chat.py and completions.py, behind `Format`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.client import RejectedError, Stream
from router.openai.choice import Choice, Piece
from router.openai.errors import ApiError, from_rejected, router_lost, shutting_down
from router.openai.params import Params, sibling_seed
from router.openai.replies import ParkadeReply, UsageReply, parkade_reply, usage_reply
from router.openai.serving import Serving
from router.openai.streaming import DONE, ClientGoneError, EventStream, all_of, event, hang_up, unless
from wire.messages import Finished, Generate, Notice, Tokens

ACCEPT_TIMEOUT_S = 1.8  # an error has to be out within 2 s
_encode = msgspec.json.Encoder().encode
_MARK = "\0"  # a text that stands nowhere else in a chunk


class Format(Protocol):
    """How an endpoint shows choices. Chunks and bodies are Structs of replies.py."""

    def opening_chunk(self, choice: Choice) -> Struct | None: ...

    def chunk(self, choice: Choice, piece: Piece) -> Struct: ...

    def finish_chunk(self, choice: Choice, parkade: ParkadeReply | UnsetType) -> Struct: ...

    def usage_chunk(self, usage: UsageReply, parkade: ParkadeReply) -> Struct: ...

    def body(self, choices: list[tuple[Choice, Piece]], usage: UsageReply, parkade: ParkadeReply) -> Struct: ...


class Prompt(Struct, frozen=True):
    """Token ids, and the text they came from where that is known (for `echo`)."""

    token_ids: list[int]
    text: str | None = None


class TextChunks:
    """The events of one choice that bring text and nothing else: encoded once, then written around each text. Not for choices
    whose chunks tell token ids: there the first is unlike the others."""

    def __init__(self, form: Format, choice: Choice) -> None:
        self._before, _, self._after = event(_encode(form.chunk(choice, Piece(_MARK)))).partition(_encode(_MARK))

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + _encode(text) + self._after


class Answer:
    """An ASGI response: the choices of one HTTP request. Hanging up cancels every stream of it, at any stage."""

    def __init__(self, serving: Serving, answer_id: str, params: Params, prompts: Sequence[Prompt], form: Format) -> None:
        self._serving = serving
        self._params = params
        self._form = form
        self._num_prompts = len(prompts)
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._choices = [
            Choice(p * params.n + i, prompt.token_ids, prompt.text, params, serving.text, self._end_ids())
            for p, prompt in enumerate(prompts)
            for i in range(params.n)
        ]
        self._answer_id = answer_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. ApiError is raised only before the headers are out; later errors are events of the stream."""
        key = scope["state"]["key"]
        self._requests = [_generate(self._answer_id, choice, self._params, key) for choice in self._choices]
        out = EventStream(send, scope["state"]["send_body"])
        work = self._stream(out) if self._params.stream else self._collect(scope, receive, send)
        try:
            with self._serving.answering():
                await unless(hang_up(receive), work, ClientGoneError())
        except ClientGoneError:
            pass
        finally:
            work.close()  # draining: it was never started

    async def _collect(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = [Piece() for _ in self._choices]
        async with self._accepted() as streams:
            await self._follow(
                self._collect_one(stream, choice, piece)
                for stream, choice, piece in zip(streams, self._choices, pieces, strict=True)
            )
        body = self._form.body(list(zip(self._choices, pieces, strict=True)), *self._account())
        await Response(_encode(body), media_type="application/json")(scope, receive, send)

    async def _collect_one(self, stream: Stream, choice: Choice, whole: Piece) -> None:
        whole.add(choice.opening())
        async for message in stream:
            match message:
                case Tokens():
                    whole.add(choice.take(message))
                    if choice.matched:
                        stream.cancel()
                case Finished():
                    whole.add(choice.finish(message))

    async def _stream(self, out: EventStream) -> None:
        async with self._accepted() as streams:
            await out.start()
            warm = asyncio.ensure_future(out.keep_alive())
            try:
                await self._follow(
                    self._stream_one(stream, choice, out) for stream, choice in zip(streams, self._choices, strict=True)
                )
            except (ApiError, ConnectionError) as error:
                told = error if isinstance(error, ApiError) else router_lost()
                await out.end(event(told.body()) + DONE)
                return
            finally:
                warm.cancel()
            await out.end(self._last_events() + DONE)

    async def _stream_one(self, stream: Stream, choice: Choice, out: EventStream) -> None:
        plain = None if self._params.return_token_ids else TextChunks(self._form, choice)
        await out.write(self._events(choice, choice.opening(), plain))
        async for message in stream:
            match message:
                case Tokens():
                    await out.write(self._events(choice, choice.take(message), plain))
                    if choice.matched:
                        stream.cancel()
                case Notice(event="parked"):
                    await out.pause(choice.index)
                case Notice(event="resumed"):
                    await out.go_on(choice.index)
                case Finished():
                    await out.write(self._events(choice, choice.finish(message), plain, last=True))

    async def _follow(self, work: Iterable[Awaitable[None]]) -> None:
        """All choices to their ends; the first error, or the end of a drain, ends all of them."""
        await unless(self._serving.cut.wait(), all_of(work), shutting_down())

    def _events(self, choice: Choice, piece: Piece, plain: TextChunks | None, last: bool = False) -> bytes:
        """What there is to see. The last choice's finish waits for `_last_events`, which know the sums."""
        events = b""
        if plain is not None and piece.text and not piece.entries:
            events = self._opening(choice) + plain.event(piece.text)
        elif piece.text or piece.entries or (piece.tokens and self._params.return_token_ids):
            events = self._opening(choice) + event(_encode(self._form.chunk(choice, piece)))
        if last and all(other.finish_reason for other in self._choices):
            self._latest = choice
        elif last:
            events += self._opening(choice) + event(_encode(self._form.finish_chunk(choice, UNSET)))
        return events

    def _opening(self, choice: Choice) -> bytes:
        if choice.opened:
            return b""
        choice.opened = True
        chunk = self._form.opening_chunk(choice)
        return b"" if chunk is None else event(_encode(chunk))

    def _last_events(self) -> bytes:
        usage, parkade = self._account()
        opening = self._opening(self._latest)
        if not self._params.include_usage:
            return opening + event(_encode(self._form.finish_chunk(self._latest, parkade)))
        finish = event(_encode(self._form.finish_chunk(self._latest, UNSET)))
        return opening + finish + event(_encode(self._form.usage_chunk(usage, parkade)))

    def _account(self) -> tuple[UsageReply, ParkadeReply]:
        """The prompt counts once, and so do its cached tokens: siblings always find what the first has computed."""
        usages = [choice.usage for choice in self._choices]
        cached = sum(usage.cached_tokens for usage in usages[:: self._params.n])
        completion = sum(usage.completion_tokens for usage in usages)
        return usage_reply(self._prompt_tokens, completion, cached), parkade_reply(usages)

    @asynccontextmanager
    async def _accepted(self) -> AsyncIterator[list[Stream]]:
        """The streams, once the router has accepted all of them. Whatever happens, none is left running behind."""
        streams: list[Stream] = []
        try:
            try:
                for request in self._requests:
                    streams.append(self._serving.client.submit(request))
                async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                    await all_of(stream.accepted() for stream in streams)
            except (TimeoutError, ConnectionError):
                raise router_lost() from None
            except RejectedError as error:
                raise from_rejected(error.code, error.message, error.numbers) from None
            yield streams
        finally:
            for stream in streams:
                stream.close()

    def _end_ids(self) -> frozenset[int]:
        own = frozenset(self._params.stop_token_ids)
        return own if self._params.ignore_eos else own | self._serving.end_ids


def _generate(answer_id: str, choice: Choice, params: Params, key: str) -> Generate:
    """The request of one choice. The i-th of n has a seed of its own and starts once the first has computed the prompt."""
    of_prompt = choice.index % params.n
    first = choice.index - of_prompt
    return Generate(
        request_id=_request_id(answer_id, choice.index),
        prompt_token_ids=choice.prompt_ids,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        sampling=msgspec.structs.replace(params.sampling, seed=sibling_seed(params.sampling.seed, of_prompt)),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        prompt_logprobs=params.logprobs if params.echo else None,
        priority=params.priority,
        sibling_of=_request_id(answer_id, first) if of_prompt else "",
        key=key,
    )


def _request_id(answer_id: str, index: int) -> str:
    return f"{answer_id}-{index}" if index else answer_id
