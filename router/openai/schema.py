"""What clients may send, as msgspec Structs, and how a body becomes one of them or one clear error.

Unknown fields are ignored, as OpenAI's clients send many. Fields that would change the answer and are not implemented are
named here, so that they can be refused rather than silently ignored. Ranges are checked in params.py.
"""

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from router.openai.errors import ApiError, invalid

Number = int | float  # JSON clients write 16.0 where 16 is meant
T = TypeVar("T")


class StreamOptions(Struct):
    include_usage: bool | None = None


class Refused(Struct, kw_only=True):
    """Parameters of OpenAI, vLLM and llama.cpp that are refused unless they say nothing (see `neutral`)."""

    store: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    suffix: Any = None
    grammar: Any = None
    json_schema: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    continue_final_message: Any = None
    documents: Any = None
    mirostat: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None


class Request(Refused, kw_only=True):
    """What both endpoints have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Number | None = None
    best_of: Number | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    seed: Number | None = None
    priority: Number | None = None  # vLLM's: a lower one runs first
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's name
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Number] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    modalities: list[str] | None = None


class CompletionRequest(Request, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Number | list[Number]] | None = None
    echo: bool | None = None
    logprobs: Number | None = None
    add_special_tokens: bool | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class ChatMessage(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatRequest(Request, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize in llama.cpp's shape (`content`) or vLLM's (`prompt` or `messages`)."""

    model: str | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Number] | None = None


class ParkRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /slots/{id}/park; no body at all is as good as an empty one. A typing error in it would go unnoticed for minutes."""

    deadline_s: Number | None = None


class ResumeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /slots/{id}/resume: nothing can be said."""


def neutral(value: Any) -> bool:
    """Whether a refused parameter asks for nothing."""
    return value is None or value is False or value == 0 or value in ([], {}, "")


_WHERE = re.compile(r" - at `(?:[^`]*` in `)?\$\.?([^`]*)`$")
_KINDS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, ParkRequest, ResumeRequest)
_decoders = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}


def decode(body: bytes, kind: type[T]) -> T:
    """The request in `body`. ApiError 400 says what is wrong and, for a wrong type, where (`param`)."""
    try:
        return _decoders[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", code="invalid_json") from None


def _wrong_type(told: str) -> ApiError:
    if not (where := _WHERE.search(told)):
        return invalid(f"The body must be a JSON object of this endpoint's parameters: {told}.", code="invalid_type")
    param = where[1] or None
    return invalid(f"Invalid value for {param!r}: {told[: where.start()]}.", param, "invalid_type")
