"""The command `parkade`: its options come from the settings, its errors are one line."""

import socket
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from parkade.api import Api, ApiError, Chunk, Note, event_lines, figures, parse
from parkade.bench import percentile
from parkade.cli import main
from parkade.demo import verdict
from parkade.status import pool_bar
from parkade.streams import Followed, take
from wire.config import FIELDS, flag_name


def run(*arguments: str, **environ: str):
    return CliRunner().invoke(main, arguments, env=environ)


def test_serve_has_a_flag_for_every_setting() -> None:
    text = run("serve", "--help").output
    assert [field.name for field in FIELDS if flag_name(field.name) not in text] == []
    assert "--config FILE.toml" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ctx", "4"], "--ctx 4"),
        (["--device", "tpu"], "--device 'tpu' is not known"),
        (["--model", "/no/such.gguf"], "/no/such.gguf"),
        (["--config", "/no/such.toml"], "/no/such.toml"),
        (["--park-ram", "much"], "--park-ram 'much'"),
        (["--park-ram", "9" * 400], "--park-ram 9999"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1"),
        (["--host", "a..b"], "--host 'a..b'"),
        (["--host", "\udcff"], "--host '\\udcff'"),
    ],
)
def test_a_mistake_ends_serve_with_one_line_before_anything_starts(arguments: list[str], words: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")


def test_a_port_in_use_is_refused_early(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), "--run-dir", str(tmp_path / "run"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"--port {port} on 127.0.0.1" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["status", "top", "chat", "bench", "park 0", "resume 0"])
def test_without_a_server_the_commands_say_so(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    result = run(*command.split(), "--url", url)
    assert result.exit_code == 1
    assert f"no server answers at {url}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_url_that_is_none_is_one_line() -> None:
    result = run("status", "--url", "somewhere")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def test_a_key_that_no_header_can_hold_is_one_line() -> None:
    result = run("status", "--api-key", "schlüssel", "--url", "http://127.0.0.1:1")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "--api-key" in result.stderr


@pytest.mark.parametrize("body", ["<html>", "{}", "null", '{"data": []}'])
@pytest.mark.parametrize("command", ["status", "top", "bench", "chat"])
def test_somebody_elses_server_is_one_line(monkeypatch: pytest.MonkeyPatch, command: str, body: str) -> None:
    monkeypatch.setattr(
        httpx, "request", lambda method, url, **_: httpx.Response(200, text=body, request=httpx.Request(method, url))
    )
    result = run(command, "--url", "http://127.0.0.1:1")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "Parkade server" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["park", "0", "--deadline-s", "nan"],
        ["park", "0", "--deadline-s", "inf"],
        ["top", "--every", "nan"],
        ["top", "--every", "inf"],
        ["chat", "--temperature", "nan"],
        ["sim", "--workload", "uniform", "--load", "nan"],
        ["sim", "--workload", "uniform", "--load", "1e-300"],
        ["sim", "--workload", "uniform", "--rate", "nan"],
    ],
)
def test_what_is_in_no_range_is_refused(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in result.stderr


def test_events_of_a_stream() -> None:
    assert parse(": preempted") == Note("preempted")
    assert parse("") is None
    chat = parse('data: {"choices":[{"index":0,"delta":{"content":"hi"},"token_ids":[5],"finish_reason":null}]}')
    assert chat == Chunk("hi", [5])
    last = parse('data: {"choices":[],"usage":{"prompt_tokens":1},"parkade":{"parks":2}}')
    assert last == Chunk(usage={"prompt_tokens": 1}, parkade={"parks": 2})
    with pytest.raises(ApiError, match="too full"):
        parse('data: {"error":{"message":"too full"}}')


async def test_a_line_of_a_stream_ends_where_the_server_ends_it() -> None:
    """Not at a line separator in the text, nor where one piece of the body does."""
    text = "a\u2028b\x85c\u00e4"
    body = f'data: {{"text": "{text}"}}\r\n\ndata: [DONE]\n'.encode()

    async def pieces():
        for at in range(len(body)):
            yield body[at : at + 1]

    lines = [line async for line in event_lines(httpx.Response(200, content=pieces()))]
    assert lines == [f'data: {{"text": "{text}"}}', "", "data: [DONE]"]


def test_a_stream_is_followed_through_its_parks() -> None:
    stream = Followed("one", asked_at=10.0)
    for now, event in (
        (11.0, Chunk("a", [1])),
        (11.5, Chunk("b", [2, 3])),
        (12.0, Note("preempted")),
    ):
        take(stream, event, now)
    assert (stream.state, stream.parks, stream.first_token_s, stream.gaps_s()) == ("parked", 1, 1.0, [0.5])
    take(stream, Note("resumed"), 14.0)
    take(stream, Chunk("c", [4], "length"), 14.5)
    take(stream, Chunk(parkade={"parks": 3, "parked_ms": 900, "recomputed_tokens": 7}), 14.5)
    assert (stream.state, stream.text, stream.token_ids, stream.finish_reason) == ("running", "abc", [1, 2, 3, 4], "length")
    assert (stream.parks, stream.parked_ms, stream.recomputed_tokens) == (3, 900, 7)


class Detokenizer(Api):
    """A server that only detokenizes."""

    def post(self, path: str, body: dict) -> dict:
        return {"content": "".join("<|im_end|>" if token == 0 else chr(token) for token in body["tokens"])}


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (Followed("", text="abc", token_ids=[97, 98, 0, 99], finish_reason="length"), "whole"),
        (Followed("", text="abc", token_ids=[97, 98, 99], finish_reason="stop"), "3 of 4 tokens, finish_reason stop"),
        (Followed("", text="abcd", token_ids=[97, 98, 98, 99], finish_reason="length"), "the text is not what the token ids say"),
        (Followed("", error="gone"), "gone"),
    ],
)
def test_the_demo_calls_whole_only_what_is_whole(stream: Followed, said: str) -> None:
    assert verdict(Detokenizer("http://nowhere"), stream, 4) == said


def test_figures_of_the_metrics() -> None:
    text = (
        '# TYPE parkade_preempt_total counter\nparkade_preempt_total{kind="forced"} 3.0\n'
        '# TYPE parkade_kv_cells gauge\nparkade_kv_cells{state="free"} 16\n'
    )
    assert figures(text) == {'parkade_preempt_total{kind="forced"}': 3, 'parkade_kv_cells{state="free"}': 16}


def test_the_bar_of_the_pool_is_as_long_as_it_should_be() -> None:
    cells = {"active": 1, "parking": 0, "resuming": 33, "reusable": 400, "free": 66}
    line = pool_bar({f'parkade_kv_cells{{state="{state}"}}': count for state, count in cells.items()}).plain
    assert line.count("█") + line.count("░") == 50
    assert "34 of 500 cells" in line
    assert "0 of 0 cells" in pool_bar({}).plain


def test_percentiles() -> None:
    values = [float(i) for i in range(100)]
    assert (percentile(values, 50), percentile(values, 99), percentile([3.0], 99), percentile([], 50)) == (50, 99, 3, 0)


def test_an_answer_of_something_else_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(502, request=httpx.Request("GET", "http://h/slots")))
    with pytest.raises(ApiError, match="HTTP 502; is that a Parkade server"):
        Api("http://h").get("/slots")
