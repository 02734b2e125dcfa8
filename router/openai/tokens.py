"""POST /tokenize and /detokenize, in the shapes of llama.cpp and of vLLM."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.openai.chat import chat_tokens
from router.openai.errors import invalid
from router.openai.limits import read_body
from router.openai.params import token_ids
from router.openai.replies import json_response
from router.openai.schema import DetokenizeRequest, TokenizeRequest, decode
from router.openai.serving import Serving

MAX_TEXT_BYTES = 4 << 20  # of one text to be tokenised: some seconds of work beside the event loop


async def tokenize(request: Request) -> Response:
    """Token ids of `content` (llama.cpp: without special tokens unless asked), `prompt` or `messages` (vLLM)."""
    serving: Serving = request.app.state.serving
    asked = decode(await read_body(request), TokenizeRequest)
    serving.check_model(asked.model)
    if asked.messages is not None:
        extra = dict(asked.chat_template_kwargs or {})
        if asked.add_generation_prompt is not None:
            extra["add_generation_prompt"] = asked.add_generation_prompt
        ids = await chat_tokens(serving, asked.messages, extra)
    elif asked.prompt is not None:
        ids = await _encode(serving, asked.prompt, asked.add_special_tokens is not False, "prompt")
    elif asked.content is not None:
        ids = await _encode(serving, asked.content, bool(asked.add_special), "content")
    else:
        raise invalid("One of 'content', 'prompt' and 'messages' is required.", "content")
    shown = [_piece(serving, token) for token in ids] if asked.with_pieces else ids
    return json_response({"tokens": shown, "count": len(ids), "max_model_len": serving.max_context})


async def detokenize(request: Request) -> Response:
    """The text of `tokens`, special ones included, as `content` (llama.cpp) and `prompt` (vLLM)."""
    serving: Serving = request.app.state.serving
    asked = decode(await read_body(request), DetokenizeRequest)
    serving.check_model(asked.model)
    if asked.tokens is None:
        raise invalid("'tokens' is required.", "tokens")
    ids = token_ids(asked.tokens, "tokens", serving.vocab_size)
    text = await serving.beside(4 * len(ids), lambda: serving.text.decode(ids, skip_special=False))
    return json_response({"content": text, "prompt": text})


async def _encode(serving: Serving, text: str, add_special: bool, param: str) -> list[int]:
    nbytes = len(text.encode())
    if nbytes > MAX_TEXT_BYTES:
        raise invalid(f"{param!r} has {nbytes} bytes; at most {MAX_TEXT_BYTES} are tokenised here.", param)
    return await serving.beside(nbytes, lambda: serving.text.encode(text, add_special))


def _piece(serving: Serving, token: int) -> dict[str, Any]:
    """llama.cpp's shape: the text of a token, or its bytes if they are no text of their own."""
    raw = serving.text.token_bytes(token)
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}
