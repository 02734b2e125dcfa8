"""Keys over HTTP: whose they are, what only an admin may do, what is open without any, and files that are read again."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from router.client import RejectedError
from router.openai.errors import ApiError
from router.openai.keys import Keys
from tests.openai.conftest import Adapter, Start
from tests.openai.test_bad_input import error_of
from tests.openai.test_process import process, run_dir, wire_router  # noqa: F401
from wire.config import Config, ConfigError
from wire.messages import Accepted, Finished, Generate, Tokens, Usage

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
ADMIN_PATHS = (("GET", "/slots"), ("POST", "/slots/1/park"), ("POST", "/slots/1/resume"))


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {key}".encode()}


def write(file: Path, text: str | None) -> None:
    """The file's new text, or its end."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("# comment\nfirst\n\n  ann sécond \n")
    return file


@pytest.fixture
def admins(tmp_path: Path) -> Path:
    file = tmp_path / "admins"
    file.write_text("root-key\n")
    return file


async def test_without_a_key_nothing_but_health(start: Start, keys: Path) -> None:
    adapter = await start(api_key_file=str(keys))
    assert (await adapter.http.get("/health")).status_code == 200
    wrong = (
        {},
        bearer("wrong"),
        {"authorization": "first"},
        {"authorization": "Basic first"},
        {"authorization": "Bearer"},
        bearer("#"),
    )
    for headers in wrong:
        for path in ("/v1/models", "/metrics", "/slots", "/nothing", "/health/"):
            answer = await adapter.http.get(path, headers=headers)
            assert error_of(answer, 401)["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
    for key in (bearer("first"), {"authorization": "bearer first"}, bearer("sécond")):
        assert (await adapter.http.get("/v1/models", headers=key)).status_code == 200


async def test_a_key_may_end_in_any_letter(start: Start, keys: Path) -> None:
    text = "voil\u00e0"  # its last byte is a space in Latin-1, in which headers come
    write(keys, text)
    adapter = await start(api_key_file=str(keys))
    assert (await adapter.http.get("/v1/models", headers=bearer(text))).status_code == 200


async def test_the_router_is_told_the_keys_name_and_never_the_key(start: Start, keys: Path, admins: Path) -> None:
    adapter = await start(api_key_file=str(keys), admin_key_file=str(admins))
    adapter.say("Hello")

    async def told(key: str) -> str:
        assert (await adapter.http.post(CHAT, json=HELLO | {"n": 2}, headers=bearer(key))).status_code == 200
        (name,) = {stream.generate.key for stream in adapter.router.streams[-2:]}
        return name

    assert await told("sécond") == "ann"
    unnamed = await told("first")
    assert unnamed.startswith("key-") and "first" not in unnamed
    assert await told("root-key") == ""  # no limits


async def test_a_key_at_its_limit_is_told_to_come_again(adapter: Adapter) -> None:
    adapter.router.rejections = {0: RejectedError("key_limit", "2 already", {"requests": 2, "key_requests": 2})}
    answer = await adapter.http.post(CHAT, json=HELLO)
    assert error_of(answer, 429)["code"] == "key_limit"
    assert answer.headers["retry-after"] == "1"


async def test_what_is_everybodys_is_for_admins(start: Start, keys: Path, admins: Path) -> None:
    adapter = await start(api_key_file=str(keys), admin_key_file=str(admins))
    for method, path in ADMIN_PATHS:
        error_of(await adapter.http.request(method, path), 401)
        error_of(await adapter.http.request(method, path, headers=bearer("wrong")), 401)
        answer = await adapter.http.request(method, path, headers=bearer("first"))
        assert error_of(answer, 403)["code"] == "admin_key_required"
        assert adapter.router.holds == []
    for method, path in ADMIN_PATHS:
        assert (await adapter.http.request(method, path, headers=bearer("root-key"))).status_code == 200
    assert (await adapter.http.get("/v1/models", headers=bearer("root-key"))).status_code == 200


async def test_api_keys_alone_open_nothing_of_an_admins(start: Start, keys: Path) -> None:
    adapter = await start(api_key_file=str(keys))
    for method, path in ADMIN_PATHS:
        answer = await adapter.http.request(method, path, headers=bearer("first"))
        assert "--admin-key-file" in error_of(answer, 403)["message"]


async def test_an_admin_key_alone_leaves_the_rest_open(start: Start, admins: Path) -> None:
    adapter = await start(admin_key_file=str(admins))
    for headers in ({}, bearer("none"), bearer("root-key")):
        assert (await adapter.http.get("/v1/models", headers=headers)).status_code == 200
    error_of(await adapter.http.get("/slots"), 401)
    assert (await adapter.http.get("/slots", headers=bearer("root-key"))).status_code == 200


@pytest.mark.parametrize(
    ("client", "headers", "allowed"),
    [
        (("127.0.0.1", 5), {}, True),
        (("127.1.2.3", 5), {}, True),
        (("::1", 5), {}, True),
        (("::ffff:127.0.0.1", 5), {}, True),
        (("10.0.0.1", 5), {}, False),
        (("::ffff:10.0.0.1", 5), {}, False),
        (("fe80::1%eth0", 5), {}, False),
        (("localhost", 5), {}, False),
        (None, {}, False),
        (("127.0.0.1", 5), {"x-forwarded-for": "10.0.0.1"}, False),
        (("127.0.0.1", 5), {"forwarded": "for=10.0.0.1"}, False),
    ],
)
def test_without_any_key_slots_are_for_this_machine(client: tuple | None, headers: dict, allowed: bool) -> None:
    keys = Keys(Config())
    scope = {"type": "http", "client": client, "headers": [(n.encode(), v.encode()) for n, v in headers.items()]}
    assert keys.name_of(scope | {"path": "/v1/models"}) == ""
    for _, path in ADMIN_PATHS:
        if allowed:
            assert keys.name_of(scope | {"path": path}) == ""
        else:
            with pytest.raises(ApiError) as refused:
                keys.name_of(scope | {"path": path})
            assert (refused.value.status, refused.value.code) == (403, "admin_key_required")


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "no key"), ("# only a comment\n", "no key"), ("one two three", "line 1"), ("a key\nb key", "line 2 is there twice")],
)
def test_a_file_that_does_not_do_is_one_line_without_a_key(keys: Path, text: str, told: str) -> None:
    held = Keys(Config(api_key_file=str(keys)))
    keys.write_text(text)
    with pytest.raises(ConfigError, match=told) as wrong:
        held.reload()
    assert str(keys) in str(wrong.value) and "three" not in str(wrong.value)
    assert len(held) == 2  # those from before
    for flag in ("api_key_file", "admin_key_file"):
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} /nowhere"):
            Keys(Config(**{flag: "/nowhere"}))


def test_no_file_is_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    files = {pipe: "it is no plain file", tmp_path: "Is a directory", Path("/dev/zero"): "it is no plain file"}
    for path, why in files.items():
        with pytest.raises(ConfigError, match=f"--api-key-file {path}: {why}"):
            Keys(Config(api_key_file=str(path)))


async def test_a_hangup_reads_the_keys_again_and_drops_no_stream(run_dir: Path, keys: Path) -> None:  # noqa: F811
    async with (
        wire_router(run_dir) as router,
        process(run_dir, "--api-key-file", str(keys)) as (running, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):

        async def read_again(text: str | None, said: bytes) -> None:
            write(keys, text)
            running.send_signal(signal.SIGHUP)
            while said not in (line := await running.stderr.readline()):
                assert line, "it ended"

        asking = asyncio.ensure_future(http.post(CHAT, json=HELLO, headers=bearer("first")))
        asked = await router.next()
        assert isinstance(asked, Generate)
        await router.say(Accepted(asked.request_id, 1))
        await read_again("ann third\n", b"read again: 1 keys")
        error_of(await http.get("/v1/models", headers=bearer("first")), 401)
        assert (await http.get("/v1/models", headers=bearer("third"))).status_code == 200
        await read_again(None, b"the keys from before stay in force")
        assert (await http.get("/v1/models", headers=bearer("third"))).status_code == 200
        await router.say(Tokens(asked.request_id, 0, [19556]))
        await router.say(Finished(asked.request_id, "stop", Usage(3, 1, exact=True)))
        assert (await asking).json()["choices"][0]["finish_reason"] == "stop"
