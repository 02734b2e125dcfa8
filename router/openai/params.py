"""From a decoded request to checked parameters: ranges, combinations that contradict each other, what is refused."""

import hashlib
import math
import struct
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from router.openai.errors import invalid, unsupported
from router.openai.schema import ChatMessage, ChatRequest, CompletionRequest, Number, ParkRequest, Refused, Request, neutral
from wire.messages import DEFAULT_PARK_S, MAX_LOGPROBS, MAX_PARK_S, MAX_PRIORITY, Sampling

MAX_N = 128
MAX_STREAMS = 1024  # prompts times n of one request
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
MAX_STOP_TOKENS = 1024
UNBOUNDED_TOKENS = 2**31  # beyond every context
DEFAULT_COMPLETION_TOKENS = 16
SMALLEST_TOP_P = 1e-9  # OpenAI allows 0: only the likeliest token
_INT64 = 2**63
_REFUSED = Refused.__struct_fields__
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Params(Struct, frozen=True):
    """How to generate, and how to show it. `logprobs` None: not shown. `echo` and `discard` only for completions."""

    n: int
    max_tokens: int
    min_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    ignore_eos: bool
    priority: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: int | None
    skip_special: bool
    continues: bool  # the text goes on behind the prompt: its first space counts
    echo: bool = False
    discard: bool = False  # max_tokens 0 with echo: one token is generated and not shown


def completion_params(request: CompletionRequest, vocab_size: int) -> Params:
    """Checked parameters of POST /v1/completions; ApiError 400 names the first wrong one."""
    logprobs = _optional_whole(request.logprobs, "logprobs", 0, MAX_LOGPROBS)
    echo = bool(request.echo)
    max_tokens = _max_tokens(request.max_tokens, "max_tokens", 0 if echo else 1)
    return _params(
        request,
        vocab_size,
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
        continues=True,
        echo=echo,
    )


def chat_params(request: ChatRequest, vocab_size: int) -> Params:
    """Checked parameters of POST /v1/chat/completions; ApiError 400 names the first wrong one."""
    if request.echo:
        raise unsupported("echo")
    top = _optional_whole(request.top_logprobs, "top_logprobs", 0, MAX_LOGPROBS)
    if top and not request.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    older = _max_tokens(request.max_tokens, "max_tokens", 1)
    newer = _max_tokens(request.max_completion_tokens, "max_completion_tokens", 1)
    return _params(
        request,
        vocab_size,
        max_tokens=newer or older or UNBOUNDED_TOKENS,
        logprobs=(top or 0) if request.logprobs else None,
        continues=False,
    )


def park_deadline_s(request: ParkRequest) -> float:
    """After how long a parked request comes back by itself; ApiError 400 for what is no such time."""
    deadline_s = DEFAULT_PARK_S if request.deadline_s is None else request.deadline_s
    if not 0 < deadline_s <= MAX_PARK_S:  # false for NaN too
        told = _short(deadline_s) if isinstance(deadline_s, int) else deadline_s
        raise invalid(f"'deadline_s' must be above 0 and at most {MAX_PARK_S:.0f} seconds, not {told}.", "deadline_s")
    return float(deadline_s)


def chat_messages(messages: list[ChatMessage] | None) -> list[dict[str, str]]:
    """The messages as a chat template takes them: text parts joined by line ends, developer as system, null as empty."""
    if not messages:
        raise invalid("'messages' must be a list of at least one message.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def token_ids(values: Iterable[Number], param: str, vocab_size: int) -> list[int]:
    """`values` as ids of the vocabulary; ApiError 400 for anything else."""
    ids = [value if type(value) is int else whole(value, param, 0, vocab_size - 1) for value in values]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(f"{param!r} has token id {wrong}; ids of this model are 0 to {vocab_size - 1}.", param)
    return ids


def whole(value: Number, param: str, low: int, high: int) -> int:
    """`value` as an int in [low, high]; 16.0 is 16. ApiError 400 names `param`."""
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        raise invalid(f"{param!r} must be a whole number, not {value}.", param)
    number = int(value)
    if not low <= number <= high:
        raise invalid(f"{param!r} must be {_range(low, high)}, not {_short(number)}.", param)
    return number


def sibling_seed(seed: int | None, i: int) -> int | None:
    """The seed of the i-th of n answers: the request's own for the first, hash(seed, i) for the others. None stays None."""
    if seed is None or i == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<qq", seed, i), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _params(
    request: Request, vocab_size: int, *, max_tokens: int, logprobs: int | None, continues: bool, echo: bool = False
) -> Params:
    _refuse(request)
    n = _optional_whole(request.n, "n", 1, MAX_N) or 1
    best_of = _optional_whole(request.best_of, "best_of", 1, MAX_N)
    if best_of is not None and best_of != n:
        raise unsupported("best_of", f"'best_of' is only supported when it equals 'n' ({n}).")
    min_tokens = _optional_whole(request.min_tokens, "min_tokens", 0, UNBOUNDED_TOKENS) or 0
    if min_tokens > max(max_tokens, 1):
        raise invalid(f"'min_tokens' ({min_tokens}) must not exceed 'max_tokens' ({max_tokens}).", "min_tokens")
    stop_ids = token_ids(request.stop_token_ids or (), "stop_token_ids", vocab_size)
    if len(stop_ids) > MAX_STOP_TOKENS:
        raise invalid(f"'stop_token_ids' may have at most {MAX_STOP_TOKENS} ids.", "stop_token_ids")
    return Params(
        n=n,
        max_tokens=max(max_tokens, 1),
        min_tokens=min_tokens,
        sampling=_sampling(request, logprobs, vocab_size),
        stop=_stop(request.stop),
        stop_token_ids=tuple(stop_ids),
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        priority=_optional_whole(request.priority, "priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        return_token_ids=bool(request.return_token_ids),
        logprobs=logprobs,
        skip_special=request.skip_special_tokens is not False,
        continues=continues,
        echo=echo,
        discard=max_tokens == 0,
    )


def _refuse(request: Request) -> None:
    for name in _REFUSED:
        if not neutral(getattr(request, name)):
            raise unsupported(name)
    if request.tools and request.tool_choice != "none":
        raise unsupported("tools", "Tools are not supported by this server; send no 'tools', or 'tool_choice': \"none\".")
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice")
    kind = request.response_format.get("type") if isinstance(request.response_format, dict) else request.response_format
    if kind not in (None, "text"):
        raise unsupported("response_format", 'Only \'response_format\': {"type": "text"} is supported by this server.')
    if any(modality != "text" for modality in request.modalities or ()):
        raise unsupported("modalities")


def _sampling(request: Request, logprobs: int | None, vocab_size: int) -> Sampling:
    top_k = _optional_whole(request.top_k, "top_k", -1, 2**31 - 1) or 0
    penalty = request.repeat_penalty if request.repetition_penalty is None else request.repetition_penalty
    return Sampling(
        temperature=_real(request.temperature, "temperature", 0, 100, 1.0),
        top_k=max(top_k, 0),
        top_p=max(_real(request.top_p, "top_p", 0, 1, 1.0), SMALLEST_TOP_P),
        min_p=_real(request.min_p, "min_p", 0, 1, 0.0),
        repetition_penalty=_real(penalty, "repetition_penalty", 0.01, 100, 1.0),
        presence_penalty=_real(request.presence_penalty, "presence_penalty", -100, 100, 0.0),
        frequency_penalty=_real(request.frequency_penalty, "frequency_penalty", -100, 100, 0.0),
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        seed=_optional_whole(request.seed, "seed", -_INT64, _INT64 - 1),
        logprobs=logprobs,
    )


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    found = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise invalid(f"'logit_bias' has key {key[:40]!r}; keys are token ids, 0 to {vocab_size - 1}.", "logit_bias")
        found[int(key)] = _real(value, "logit_bias", -100, 100, 0.0)
    return found


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"'stop' may have at most {MAX_STOP_STRINGS} strings, not {len(strings)}.", "stop")
    if any(not 0 < len(string) <= MAX_STOP_CHARS for string in strings):
        raise invalid(f"Each of 'stop' must have 1 to {MAX_STOP_CHARS} characters.", "stop")
    return strings


def _include_usage(request: Request) -> bool:
    if request.stream_options is None:
        return False
    if not request.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    return bool(request.stream_options.include_usage)


def _message(message: ChatMessage, where: str) -> dict[str, str]:
    if message.role in ("tool", "function") or not neutral(message.tool_calls) or not neutral(message.function_call):
        raise unsupported(where, f"{where}: tool calls and their results are not supported by this server.")
    if message.role not in _ROLES:
        raise invalid(f"{where}: role must be one of {', '.join(_ROLES)}, not {message.role[:40]!r}.", f"{where}.role")
    found = {"role": _ROLES[message.role], "content": _content(message, where)}
    return found if message.name is None else found | {"name": message.name}


def _content(message: ChatMessage, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise unsupported(f"{where}.content", f"{where}: content of type {part.type[:40]!r} is not supported, only text is.")
        if part.text is None:
            raise invalid(f"{where}: a text part needs 'text'.", f"{where}.content")
    return "\n".join(part.text or "" for part in message.content)


def _max_tokens(value: Number | None, param: str, low: int) -> int | None:
    found = None if value is None else whole(value, param, low, 10**400)
    return found if found is None else min(found, UNBOUNDED_TOKENS)


def _optional_whole(value: Number | None, param: str, low: int, high: int) -> int | None:
    return None if value is None else whole(value, param, low, high)


def _real(value: float | None, param: str, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:  # false for NaN too
        raise invalid(f"{param!r} must be between {low} and {high}, not {value}.", param)
    return float(value)


def _range(low: Any, high: Any) -> str:
    return f"at least {low}" if high >= UNBOUNDED_TOKENS else f"between {low} and {high}"


def _short(number: int) -> str:
    text = str(number) if abs(number) < 10**30 else f"{number:.3e}" if abs(number) < 10**300 else "a number of hundreds of digits"
    return text
