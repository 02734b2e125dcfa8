"""Errors as OpenAI clients know them: one exception, one JSON shape, and which status each code of the router becomes."""

import math
from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.responses import Response

from wire.messages import Finished

CLIENT_CLOSED_REQUEST = 499  # not retried by OpenAI's clients, unlike 408, 409, 429 and 5xx


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error; the user reads `message`, his program reads `code` and `param`."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error as JSON in OpenAI's shape."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, _type_name(self.status), self.param, self.code)))

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The error as a whole HTTP response."""
        extra = dict(headers or {})
        if self.retry_after_s is not None:
            extra["retry-after"] = str(self.retry_after_s)
        return Response(self.body(), self.status, extra, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself must change."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str | None = None) -> ApiError:
    """400: a parameter that would change the answer and that is not implemented."""
    return invalid(message or f"{param!r} is not supported by this server.", param, "unsupported_parameter")


def context_too_small(tokens: str, max_context: int, param: str) -> ApiError:
    """400 with the numbers; `tokens` says how large the prompt is, e.g. "3000 tokens"."""
    return invalid(
        f"This model's maximum context length is {max_context} tokens here, and at least one of them is for the answer. "
        f"However, your prompt has {tokens}. Please reduce its length.",
        param,
        "context_length_exceeded",
    )


def router_lost() -> ApiError:
    """503: the router does not answer."""
    return ApiError(503, "The router does not answer.", code="router_lost", retry_after_s=2)


def shutting_down() -> ApiError:
    """503: no new answers, and no more time for this one."""
    return ApiError(503, "The server is shutting down.", code="draining", retry_after_s=2)


def from_rejected(code: str, message: str, numbers: Mapping[str, int]) -> ApiError:
    """The HTTP error for a request that the router refused."""
    told = ", ".join(f"{name} {number}" for name, number in numbers.items())
    if told and not all(str(number) in message for number in numbers.values()):
        message = f"{message} ({told})"
    match code:
        case "queue_full" | "key_limit":
            return ApiError(429, message, code=code, retry_after_s=1)
        case "context_length_exceeded":
            return invalid(message, None, code)
        case "bad_request":
            return invalid(message, None, code)
        case "draining" | "router_lost" | "not_ready":
            return ApiError(503, message, code=code, retry_after_s=2)
        case _:
            return ApiError(500, message, code=code)


def from_finished(finished: Finished) -> ApiError:
    """The HTTP error for an accepted request that ended without an answer."""
    code = finished.code or finished.reason
    message = finished.error or f"The request ended: {code}."
    match code:
        case "context_length_exceeded" | "bad_request":
            return invalid(message, None, code)
        case "cancelled":
            return ApiError(CLIENT_CLOSED_REQUEST, finished.error or "The request was cancelled.", code=code)
        case "kv_cache_full":
            return ApiError(503, message, code=code, retry_after_s=1)
        case "worker_lost" | "router_lost" | "drain_timeout":
            return ApiError(503, message, code=code, retry_after_s=2)
        case "slow_client":
            return ApiError(408, message, code=code)
        case _:
            return ApiError(500, message, code=code)


def finite(number: float) -> float:
    """A log probability that JSON can carry; OpenAI writes -9999.0 for an impossible token."""
    return number if math.isfinite(number) else -9999.0


def _type_name(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
