"""A running server over HTTP, as the terminal commands see it: JSON answers, figures of /metrics, streams of chunks."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

ANSWER_S = 30.0
SILENCE_S = 120.0  # of a stream; the server sends something at least every 10 s


class ApiError(Exception):
    """No server, or it refused. The text is one line for people."""


class Chunk(Struct, frozen=True):
    """What one event of a stream brought, of its only choice."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    parkade: dict[str, Any] | None = None


class Note(Struct, frozen=True):
    """A comment in a stream: `preempted`, `resumed` or `keep-alive`."""

    text: str


class Api:
    """One server. Every method raises ApiError."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """The JSON answer of GET `path`."""
        return _json(self._request("GET", path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer of POST `path`."""
        return _json(self._request("POST", path, body))

    def metrics(self) -> dict[str, float]:
        """The figures of /metrics, e.g. `parkade_resume_total` or `parkade_kv_cells{state="free"}`."""
        response = self._request("GET", "/metrics")
        try:
            return figures(response.text)
        except ValueError:
            raise ApiError(_strange(response)) from None

    def model(self) -> str:
        """The id of the model it serves."""
        models = self.get("/v1/models")
        try:
            return models["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ApiError(f"{self.url} has no model; is that a Parkade server?") from None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Chunk | Note]:
        """The events of one streaming request with one choice; leaving the loop hangs up. ApiError if the stream breaks."""
        timeout = httpx.Timeout(ANSWER_S, read=SILENCE_S)
        with self._errors():
            async with (
                httpx.AsyncClient(headers=self._headers, timeout=timeout, trust_env=False) as client,
                client.stream("POST", self.url + path, json={**body, "stream": True}) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    raise ApiError(refusal(response))
                async for line in event_lines(response):
                    if line == "data: [DONE]":
                        return
                    if (event := parse(line)) is not None:
                        yield event
        raise ApiError("the stream broke off")

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        with self._errors():
            response = httpx.request(method, self.url + path, json=body, headers=self._headers, timeout=ANSWER_S, trust_env=False)
        if response.status_code != 200:
            raise ApiError(refusal(response))
        return response

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise ApiError(f"no server answers at {self.url}; `parkade serve` starts one, --url names another") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ApiError(f"--url {self.url}: {error}") from None
        except UnicodeError as error:  # a host or a key that no header can hold
            raise ApiError(f"--url or --api-key: {error}") from None
        except httpx.TimeoutException:
            raise ApiError(f"the server at {self.url} does not answer") from None
        except httpx.HTTPError as error:
            raise ApiError(f"the connection to {self.url} broke: {error}") from None


async def event_lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream of events. httpx's own also end at characters that may stand in a text, such as U+2028."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r").decode(errors="replace")


def parse(line: str) -> Chunk | Note | None:
    """One line of a stream; None for one that carries nothing. ApiError for an error event."""
    if line.startswith(":"):
        return Note(line[1:].strip())
    if not line.startswith("data: "):
        return None
    data = json.loads(line[6:])
    if error := data.get("error"):
        raise ApiError(error.get("message", "the stream failed"))
    usage, parkade = data.get("usage"), data.get("parkade")
    if not data.get("choices"):
        return Chunk(usage=usage, parkade=parkade)
    choice = data["choices"][0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return Chunk(text, choice.get("token_ids") or [], choice.get("finish_reason"), usage, parkade)


def figures(exposition: str) -> dict[str, float]:
    """Prometheus text as a flat table; labels are sorted and written as in the text."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def refusal(response: httpx.Response) -> str:
    """The server's own words for an answer that is an error."""
    try:
        return f"{response.json()['error']['message']} (HTTP {response.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answered with HTTP {response.status_code}; is that a Parkade server?"


def _json(response: httpx.Response) -> Any:
    """What it holds. ApiError if that is not JSON: somebody else serves there."""
    try:
        return response.json()
    except ValueError:
        raise ApiError(_strange(response)) from None


def _strange(response: httpx.Response) -> str:
    return f"{response.url} answered with something else; is that a Parkade server?"
