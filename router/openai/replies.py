"""What clients receive, as msgspec Structs. Keys that OpenAI's clients require are always written; UNSET ones are left out."""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from starlette.responses import Response

from wire.messages import Usage as WireUsage


class PromptTokensDetails(Struct):
    cached_tokens: int


class UsageReply(Struct):
    """OpenAI's usage. The prompt counts once, however many answers were asked for."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ParkadeReply(Struct):
    """What parking did to this answer: sums over all of its streams; `exact` only if every one of them was."""

    parks: int
    parked_ms: int
    recomputed_tokens: int
    exact: bool


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Delta(Struct):
    content: str
    role: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | None | UnsetType = UNSET
    parkade: ParkadeReply | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class ChatReplyMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatReplyMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply
    parkade: ParkadeReply
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: str = "chat.completion"


class CompletionLogprobs(Struct):
    """OpenAI's older shape: four lists, one entry a token; the very first token of an echoed prompt has null."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)


class CompletionChoice(Struct):
    """A choice of a chunk or of a whole reply; `finish_reason` is null until the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionReply(Struct):
    """A chunk of a stream or the whole reply: both are called text_completion."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageReply | None | UnsetType = UNSET
    parkade: ParkadeReply | UnsetType = UNSET
    object: str = "text_completion"


def usage_reply(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> UsageReply:
    """OpenAI's usage with its total."""
    return UsageReply(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens))


def parkade_reply(usages: list[WireUsage]) -> ParkadeReply:
    """The sums over the streams of one answer."""
    return ParkadeReply(
        parks=sum(usage.parks for usage in usages),
        parked_ms=sum(usage.parked_ms for usage in usages),
        recomputed_tokens=sum(usage.recomputed_tokens for usage in usages),
        exact=all(usage.exact for usage in usages),
    )


def json_response(content: Any) -> Response:
    """200 with the content as JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")
