"""Clients on other machines: who gets in with which key, whose requests a guest may touch, mistakes in the settings."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace
from zmq.utils.monitor import recv_monitor_message

from router.client import Client, RejectedError
from router.gate import Gate
from router.keys import KeyLimits
from router.server import Server
from tests.router.stage import PATIENCE_S, RawReader, Stage, ids_of, until
from wire.codec import frames
from wire.config import Config, ConfigError
from wire.keys import new_pair, read_secret
from wire.messages import Accepted, Cancel, Generate, HoldAnswer, Park, Resume, Submit
from wire.service import USER_ERROR
from wire.sockets import dealer_socket, router_socket

ANYWHERE = "tcp://127.0.0.1:*"
SERVER, ANN, BOB, EVE = (new_pair() for _ in range(4))


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="parkade-") as path:
        yield Path(path)


@pytest.fixture
def config(folder: Path) -> Config:
    """Ann and Bob may come in."""
    (folder / "secret").write_bytes(SERVER[1])
    (folder / "secret").chmod(0o600)
    (folder / "clients").write_bytes(b"# who\nann " + ANN[0] + b"\nbob " + BOB[0] + b"\n")
    return Config(listen=ANYWHERE, curve_file=str(folder / "secret"), curve_clients=str(folder / "clients"))


@asynccontextmanager
async def gated(folder: Path, config: Config, limits: KeyLimits = KeyLimits()) -> AsyncIterator[Stage]:  # noqa: B008
    """A server with a gate; `stage.server._gate.address` is where it is."""
    server = Server(folder, 100, 5.0, limits, Gate(config))
    server.open()
    server.open_gate()
    running = asyncio.create_task(server.run())
    stage = Stage(server, str(folder), running)
    try:
        yield stage
    finally:
        await stage.close()
        server.stop()
        server.stop()
        await running


def guest(stage: Stage, pair: tuple[bytes, bytes] | None, server: bytes = SERVER[0]) -> Client:
    return Client(stage.server._gate.address, curve=pair and (server, pair[1]))


async def gets_in(stage: Stage, curve: tuple[bytes, bytes] | None) -> bool:
    """How the handshake of a peer ends."""
    peer = dealer_socket(zmq.Context.instance(), "inproc://nobody", curve=curve)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
    monitor = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failed | ended)
    peer.connect(stage.server._gate.address)  # not before the monitor is there
    try:
        assert await asyncio.to_thread(monitor.poll, PATIENCE_S * 1000)
        return recv_monitor_message(monitor, zmq.NOBLOCK)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        peer.disable_monitor()
        monitor.close(linger=0)
        peer.close(linger=0)


def test_with_the_right_keys_a_stream_comes_through(run, folder, config):
    async def story():
        async with gated(folder, config) as s, guest(s, ANN) as ann, guest(s, BOB) as bob:
            worker = await s.worker(plays=True)
            assert await ids_of(ann.generate([1], max_tokens=3)) == [0, 1, 2]
            assert await ids_of(bob.generate([1], max_tokens=3, key="ann")) == [0, 1, 2]
            assert [(await worker.next(Submit)).generate.key for _ in "ab"] == ["ann", "bob"]  # whatever they say

    run(story())


def test_with_another_key_or_none_nobody_gets_in(run, folder, config):
    async def story():
        async with gated(folder, config) as s, s.client() as local:
            assert not await gets_in(s, (SERVER[0], EVE[1]))
            assert not await gets_in(s, (EVE[0], ANN[1]))  # another's server key
            assert not await gets_in(s, None)
            assert await gets_in(s, (SERVER[0], ANN[1]))
            assert (await local.status()).metrics.count('parkade_bad_messages_total{sender="client"} 0.0') == 1

    run(story())


def test_the_list_is_read_again_and_a_bad_one_changes_nothing(run, folder, config):
    async def story():
        clients = Path(config.curve_clients)
        async with gated(folder, config) as s, guest(s, ANN) as ann:
            await s.worker(plays=True)
            assert await ids_of(ann.generate([1], max_tokens=2)) == [0, 1]
            clients.write_bytes(b"eve " + EVE[0])  # noqa: ASYNC240
            s.server.read_again()
            assert await gets_in(s, (SERVER[0], EVE[1]))
            assert not await gets_in(s, (SERVER[0], BOB[1]))
            clients.write_bytes(b"nothing")  # noqa: ASYNC240
            s.server.read_again()
            assert await gets_in(s, (SERVER[0], EVE[1]))
            assert await ids_of(ann.generate([1], max_tokens=2)) == [0, 1]  # she was in before

    run(story())


def test_a_guest_acts_on_its_own_requests_only(run, folder, config):
    async def story():
        async with gated(folder, config) as s, s.client() as local, guest(s, ANN) as ann, guest(s, BOB) as bob:
            worker = await s.worker()
            stream = ann.submit(Generate("r", [1], max_tokens=1))
            await worker.next(Submit)
            await bob.cancel("r")
            answer = HoldAnswer("r", "unknown_request", "no living request has this id")
            assert replace(await bob.park("r"), ask=0) == replace(await bob.resume("r"), ask=0) == answer
            await worker.say_load()
            assert (await until(local, lambda status: status.slots)).slots[0].request_id == "r"
            status = await bob.status()
            assert status.ready and status.slots == []
            assert not s.server.ledger.requests["r"].cancelled
            await ann.cancel("r")
            assert await worker.next(Cancel, Park, Resume) == Cancel("r")
            await worker.finish("r", "cancelled", 0)
            assert [message.reason async for message in stream] == ["cancelled"]

    run(story())


def test_limits_count_by_the_name_of_the_guests_key(run, folder, config):
    async def story():
        async with gated(folder, config, KeyLimits(requests=1)) as s, guest(s, ANN) as ann, guest(s, BOB) as bob:
            assert await ann.submit(Generate("a", [1])).accepted()
            assert await bob.submit(Generate("b", [1], key="ann")).accepted()
            with pytest.raises(RejectedError) as no:
                await ann.submit(Generate("c", [1], key="bob")).accepted()
            assert no.value.code == "key_limit"

    run(story())


def test_on_this_machine_it_goes_without_keys_but_as_a_guest(run, folder):
    async def story():
        async with gated(folder, Config(listen=ANYWHERE)) as s, guest(s, None) as one, s.client() as local:
            assert await one.submit(Generate("a", [1])).accepted()
            assert s.server.ledger.requests["a"].generate.key == "tcp"
            assert await local.submit(Generate("b", [1])).accepted()
            assert (await one.park("b")).code == "unknown_request"
            assert (await local.park("a")).code == ""  # an operator's

    run(story())


def test_no_client_takes_the_place_of_another(run, folder):
    """Or one that guesses an identity would get the other's streams."""

    async def story():
        async with gated(folder, Config(listen=ANYWHERE)) as s:
            first = dealer_socket(zmq.asyncio.Context.instance(), s.address, b"same")
            await first.send_multipart(frames(Generate("r", [1])))
            reader = RawReader(first)
            assert (await reader.next(Accepted)).request_id == "r"
            second = dealer_socket(zmq.asyncio.Context.instance(), "inproc://nobody", b"same")
            monitor = second.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            second.connect(s.address)
            await monitor.recv_multipart()
            second.disable_monitor()
            async with s.client() as other:
                await other.status()  # by then the router knows of the second
            await first.send_multipart(frames(Generate("again", [1])))
            assert (await reader.next(Accepted)).request_id == "again"
            first.close(linger=0)
            second.close(linger=0)

    run(story())


def test_sockets_are_for_this_user_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        bound = router_socket(zmq.Context.instance(), f"ipc://{folder}/client.sock")
        assert (folder / "client.sock").stat().st_mode & 0o777 == 0o700
        assert os.umask(0) == 0
        bound.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"listen": "ipc:///tmp/x"}, "--listen ipc:///tmp/x is not an address"),
        ({"listen": "tcp://127.0.0.1"}, "is not an address"),
        ({"listen": "tcp://127.0.0.1:1 "}, "is not an address"),
        ({"curve_clients": ""}, "together"),
        ({"curve_file": ""}, "together"),
        ({"curve_file": "/nowhere"}, "--curve-file /nowhere"),
        ({"curve_clients": "/nowhere"}, "--curve-clients /nowhere"),
        *(
            ({"listen": f"tcp://{host}:5555", "curve_file": "", "curve_clients": ""}, "are needed, or anybody could come in")
            for host in ("0.0.0.0", "*", "10.0.0.1", "[::]", "eth0", "localhost", "127.0.0.1.example.com")
        ),
    ],
)
def test_a_mistake_in_the_settings_is_one_line(config: Config, changes: dict, told: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        Gate(replace(config, **changes))
    assert told in str(wrong.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert len(Gate(Config(listen=f"tcp://{host}:5555"))) == 0


@pytest.mark.parametrize("text", [b"", b"short", b"x" * 40 + b"\ny" + b"x" * 39, b"~" * 40, b"#" * 40, b"one two", b"%nSc1" * 8])
def test_a_secret_that_is_none_is_not_repeated(config: Config, text: bytes) -> None:
    Path(config.curve_file).write_bytes(text)
    with pytest.raises(ConfigError) as wrong:
        Gate(config)
    assert "--curve-file" in str(wrong.value) and "xxx" not in str(wrong.value) and "short" not in str(wrong.value)


def test_a_secret_for_all_to_read_is_none(config: Config) -> None:
    Path(config.curve_file).chmod(0o604)
    with pytest.raises(ConfigError, match="chmod"):
        Gate(config)


@pytest.mark.system
@pytest.mark.parametrize("in_use", [True, False])
def test_the_process_says_what_is_wrong_in_one_line(folder: Path, in_use: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"tcp://127.0.0.1:{other.getsockname()[1]}" if in_use else "tcp://0.0.0.0:5555"
        command = [sys.executable, "-m", "router", "--run-dir", str(folder), "--listen", listen]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == USER_ERROR
    assert done.stderr.splitlines()[-1].startswith(f"error: --listen {listen}: ")
    assert "Traceback" not in done.stderr


def test_keygen_makes_keys_that_fit(run, folder: Path, config: Config) -> None:
    command = [sys.executable, "-m", "parkade", "keygen", str(folder / "mine")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert (folder / "mine").stat().st_mode & 0o777 == 0o600
    Path(config.curve_clients).write_text(f"me {done.stdout}")
    secret = read_secret(str(folder / "mine"), "")

    async def story():
        async with gated(folder, config) as s, Client(s.server._gate.address, curve=(SERVER[0], secret)) as me:
            await s.worker(plays=True)
            assert await ids_of(me.generate([1], max_tokens=2)) == [0, 1]

    run(story())
    again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (again.returncode, again.stdout) == (1, "")  # it does not write over a key
    assert read_secret(str(folder / "mine"), "") == secret
