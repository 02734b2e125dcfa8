"""POST /v1/completions: prompts as text or token ids, one or several, and the shapes of their answers."""

import time

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from router.openai.answer import Answer, Prompt
from router.openai.choice import Choice, Piece, TokenEntry
from router.openai.errors import finite, invalid
from router.openai.limits import read_body
from router.openai.params import MAX_STREAMS, Params, completion_params, token_ids
from router.openai.replies import CompletionChoice, CompletionLogprobs, CompletionReply, ParkadeReply, UsageReply
from router.openai.schema import CompletionRequest, Number, decode
from router.openai.serving import Serving
from router.openai.text import Text


async def completions(request: Request) -> Answer:
    """The endpoint."""
    serving: Serving = request.app.state.serving
    asked = decode(await read_body(request), CompletionRequest)
    serving.check_model(asked.model)
    params = completion_params(asked, serving.vocab_size)
    given = _prompts(asked.prompt)
    if len(given) * params.n > MAX_STREAMS:
        raise invalid(f"The number of prompts times 'n' must not exceed {MAX_STREAMS}.", "prompt")
    prompts = [await _prompt(serving, one, asked.add_special_tokens is not False) for one in given]
    answer_id = f"cmpl-{request.scope['state']['answer_id']}"
    return Answer(serving, answer_id, params, prompts, CompletionFormat(serving, answer_id, params))


class CompletionFormat:
    """Chunks and bodies of one completion."""

    def __init__(self, serving: Serving, answer_id: str, params: Params) -> None:
        self._text = serving.text
        self._params = params
        self._head = (answer_id, int(time.time()), serving.name, serving.fingerprint)
        self._no_usage = None if params.include_usage else UNSET
        self._told_prompt: set[int] = set()

    def opening_chunk(self, choice: Choice) -> None:
        """Completions have nothing to say before their text."""
        return None

    def chunk(self, choice: Choice, piece: Piece) -> CompletionReply:
        """What was generated (or echoed) since the last chunk."""
        return CompletionReply(*self._head, [self._choice(choice, piece, None)], self._no_usage)

    def finish_chunk(self, choice: Choice, parkade: ParkadeReply | UnsetType) -> CompletionReply:
        """The chunk that says why the choice ended."""
        return CompletionReply(*self._head, [self._choice(choice, Piece(), choice.finish_reason)], self._no_usage, parkade)

    def usage_chunk(self, usage: UsageReply, parkade: ParkadeReply) -> CompletionReply:
        """The chunk without choices that `include_usage` asks for."""
        return CompletionReply(*self._head, [], usage, parkade)

    def body(self, choices: list[tuple[Choice, Piece]], usage: UsageReply, parkade: ParkadeReply) -> CompletionReply:
        """The whole answer."""
        shown = [self._choice(choice, piece, choice.finish_reason) for choice, piece in choices]
        return CompletionReply(*self._head, shown, usage, parkade)

    def _choice(self, choice: Choice, piece: Piece, finish_reason: str | None) -> CompletionChoice:
        whole = finish_reason is not None and not self._params.stream
        logprobs = None
        if self._params.logprobs is not None and (piece.entries or whole):
            logprobs = completion_logprobs(self._text, piece.entries)
        shown = CompletionChoice(choice.index, piece.text, logprobs, finish_reason)
        if self._params.return_token_ids:
            shown.token_ids = piece.tokens
            if choice.index not in self._told_prompt:
                self._told_prompt.add(choice.index)
                shown.prompt_token_ids = choice.prompt_ids
        return shown


def completion_logprobs(text: Text, entries: list[TokenEntry]) -> CompletionLogprobs:
    """Log probabilities of tokens in the shape of completions."""
    found = CompletionLogprobs()
    for entry in entries:
        name = _token_name(text, entry.token)
        found.tokens.append(name)
        found.text_offset.append(entry.offset)
        if entry.logprob is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(finite(entry.logprob.logprob))
        top = {_token_name(text, token): finite(logprob) for token, logprob in reversed(entry.logprob.top)}
        found.top_logprobs.append({name: finite(entry.logprob.logprob)} | top)
    return found


def _token_name(text: Text, token: int) -> str:
    """The token's text; bytes that are no text of their own as OpenAI writes them, so that no two of them look the same."""
    raw = text.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _prompts(prompt: str | list[str | Number | list[Number]] | None) -> list[str | list[Number]]:
    """One entry a prompt."""
    match prompt:
        case None:
            raise invalid("'prompt' is required.", "prompt")
        case str():
            return [prompt]
        case []:
            raise invalid("'prompt' must not be empty.", "prompt")
    for kind in (str, list):
        if all(isinstance(one, kind) for one in prompt):
            return prompt
    if any(isinstance(one, str | list) for one in prompt):
        raise invalid("'prompt' mixes texts and token ids.", "prompt")
    return [prompt]


async def _prompt(serving: Serving, given: str | list[Number], add_special: bool) -> Prompt:
    if not given:
        raise invalid("'prompt' must not be empty.", "prompt")
    if isinstance(given, str):
        ids = await serving.tokens(len(given.encode()), lambda: serving.text.encode(given, add_special), "prompt")
        if not ids:
            raise invalid("'prompt' has no tokens.", "prompt")
        return Prompt(ids, given)
    serving.check_fits(len(given), "prompt")
    return Prompt(token_ids(given, "prompt", serving.vocab_size))
