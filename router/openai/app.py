"""The ASGI application: routes, request ids, and OpenAI's shape for every error.

Middleware is plain ASGI: Starlette's BaseHTTPMiddleware hides a client's hang-up from the endpoint.
"""

import logging
import re
import uuid

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai import info, slots, tokens
from router.openai.chat import chat_completions
from router.openai.completions import completions
from router.openai.errors import CLIENT_CLOSED_REQUEST, ApiError
from router.openai.keys import KeyCheck
from router.openai.serving import Serving
from router.openai.text import TextError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
log = logging.getLogger("parkade")


def create_app(serving: Serving) -> ASGIApp:
    """The application for one model."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", info.models, methods=["GET"]),
            Route("/v1/models/{model:path}", info.model, methods=["GET"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/health", info.health, methods=["GET"]),
            Route("/metrics", info.metrics, methods=["GET"]),
            Route("/slots", slots.slots, methods=["GET"]),
            Route("/slots/{id}/park", slots.park, methods=["POST"]),
            Route("/slots/{id}/resume", slots.resume, methods=["POST"]),
            Route("/props", info.props, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            TextError: _text_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _bug,
        },
    )
    app.state.serving = serving
    app.router.redirect_slashes = False
    return RequestIds(KeyCheck(app, serving.keys))


class RequestIds:
    """Gives every request the id that its answer carries, and answers with X-Request-Id: the client's own, or that one. Also
    leaves the server's own `send` in the scope's state as `send_body`, for answers of many pieces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer_id = uuid.uuid4().hex
        given = Headers(scope=scope).get("x-request-id", "")
        shown = given if _REQUEST_ID.fullmatch(given) else answer_id
        scope["state"] = {**scope.get("state", {}), "answer_id": answer_id, "send_body": send}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-request-id", shown)
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # After 408 and 413 the rest of the body may still be on its way: the connection cannot be used again.
    return error.response({"connection": "close"} if error.status in (408, 413) else None)


async def _text_error(request: Request, error: Exception) -> Response:
    return ApiError(400, str(error), param="messages").response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            told = ApiError(404, f"There is nothing at {request.url.path[:200]}.", code="not_found")
        case 405:
            told = ApiError(405, f"{request.method} is not allowed at {request.url.path[:200]}.", code="method_not_allowed")
        case status:
            told = ApiError(status, error.detail)
    return told.response(error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    return ApiError(500, "The server failed to answer. The log says why.", code="internal_error").response()
