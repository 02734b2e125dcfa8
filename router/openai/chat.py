"""POST /v1/chat/completions: messages through the model's template, and the shapes of chat answers."""

import time

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from router.openai.answer import Answer, Prompt
from router.openai.choice import Choice, Piece, TokenEntry
from router.openai.errors import finite, invalid
from router.openai.limits import read_body
from router.openai.params import Params, chat_messages, chat_params
from router.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatReplyMessage,
    Delta,
    ParkadeReply,
    TokenLogprob,
    TopLogprob,
    UsageReply,
)
from router.openai.schema import ChatMessage, ChatRequest, decode
from router.openai.serving import Serving
from router.openai.text import Text


async def chat_completions(request: Request) -> Answer:
    """The endpoint."""
    serving: Serving = request.app.state.serving
    asked = decode(await read_body(request), ChatRequest)
    serving.check_model(asked.model)
    params = chat_params(asked, serving.vocab_size)
    extra = dict(asked.chat_template_kwargs or {})
    if asked.add_generation_prompt is not None:
        extra["add_generation_prompt"] = asked.add_generation_prompt
    ids = await chat_tokens(serving, asked.messages, extra)
    answer_id = f"chatcmpl-{request.scope['state']['answer_id']}"
    return Answer(serving, answer_id, params, [Prompt(ids)], ChatFormat(serving, answer_id, params))


async def chat_tokens(serving: Serving, messages: list[ChatMessage] | None, extra: dict[str, object]) -> list[int]:
    """The prompt of a chat. ApiError or TextError (400) if there is no template or it refuses the messages."""
    plain = chat_messages(messages)
    if not serving.text.has_chat_template:
        raise invalid(f"The model {serving.name!r} has no chat template; use /v1/completions.", code="no_chat_template")
    nbytes = sum(len(message["content"].encode()) for message in plain)
    try:
        return await serving.tokens(nbytes, lambda: serving.text.chat_prompt(plain, **extra), "messages")
    except TypeError as error:  # a name in chat_template_kwargs that the template's function already has
        raise invalid(f"'chat_template_kwargs': {error}", "chat_template_kwargs") from None


class ChatFormat:
    """Chunks and bodies of one chat answer."""

    def __init__(self, serving: Serving, answer_id: str, params: Params) -> None:
        self._text = serving.text
        self._params = params
        self._head = (answer_id, int(time.time()), serving.name, serving.fingerprint)
        self._no_usage = None if params.include_usage else UNSET

    def opening_chunk(self, choice: Choice) -> ChatChunk:
        """The role, with empty content: clients fail where the first delta has none."""
        prompt = choice.prompt_ids if self._params.return_token_ids and choice.index == 0 else UNSET
        shown = ChatChunkChoice(choice.index, Delta("", "assistant"), token_ids=self._token_ids([]))
        return ChatChunk(*self._head, [shown], self._no_usage, UNSET, prompt)

    def chunk(self, choice: Choice, piece: Piece) -> ChatChunk:
        """What was generated since the last chunk."""
        logprobs = chat_logprobs(self._text, piece.entries) if piece.entries else None
        shown = ChatChunkChoice(choice.index, Delta(piece.text), logprobs, None, self._token_ids(piece.tokens))
        return ChatChunk(*self._head, [shown], self._no_usage)

    def finish_chunk(self, choice: Choice, parkade: ParkadeReply | UnsetType) -> ChatChunk:
        """The chunk that says why the choice ended."""
        shown = ChatChunkChoice(choice.index, Delta(""), None, choice.finish_reason, self._token_ids([]))
        return ChatChunk(*self._head, [shown], self._no_usage, parkade)

    def usage_chunk(self, usage: UsageReply, parkade: ParkadeReply) -> ChatChunk:
        """The chunk without choices that `include_usage` asks for."""
        return ChatChunk(*self._head, [], usage, parkade)

    def body(self, choices: list[tuple[Choice, Piece]], usage: UsageReply, parkade: ParkadeReply) -> ChatReply:
        """The whole answer."""
        shown = [
            ChatChoice(
                index=choice.index,
                message=ChatReplyMessage(piece.text),
                finish_reason=choice.finish_reason,
                logprobs=None if self._params.logprobs is None else chat_logprobs(self._text, piece.entries),
                token_ids=self._token_ids(piece.tokens),
            )
            for choice, piece in choices
        ]
        prompt = choices[0][0].prompt_ids if self._params.return_token_ids else UNSET
        return ChatReply(*self._head, shown, usage, parkade, prompt)

    def _token_ids(self, tokens: list[int]) -> list[int] | UnsetType:
        return tokens if self._params.return_token_ids else UNSET


def chat_logprobs(text: Text, entries: list[TokenEntry]) -> ChatLogprobs:
    """Log probabilities of tokens in the shape of chat answers."""
    return ChatLogprobs([_token_logprob(text, entry) for entry in entries])


def _token_logprob(text: Text, entry: TokenEntry) -> TokenLogprob:
    told = entry.logprob
    assert told is not None  # only an echoed prompt has entries without one
    top = [TopLogprob(text.token_text(i), finite(logprob), list(text.token_bytes(i))) for i, logprob in told.top]
    return TokenLogprob(text.token_text(entry.token), finite(told.logprob), list(text.token_bytes(entry.token)), top)
