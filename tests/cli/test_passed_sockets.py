"""Sockets that systemd makes and keeps: a process listens on them, leaves them alone, and its next life goes on there."""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.client import Client
from router.openai.__main__ import feed_watchdog
from wire.service import passed_sockets, watchdog_s
from wire.sockets import client_address, worker_address

START = """import os, sys
passed, *command = sys.argv[1:]
for place, fd in enumerate(passed.split(","), 3):
    os.dup2(int(fd), place)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(place - 2)}
os.execv(sys.executable, [sys.executable, *command])"""
LIMIT_S = 30


@contextmanager
def started(listeners: list[socket.socket], module: str, run_dir: Path) -> Iterator[subprocess.Popen]:
    """The module with these sockets, as systemd would start it."""
    fds = [fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD, 100) for listener in listeners]  # clear of where they must lie
    command = [sys.executable, "-c", START, ",".join(map(str, fds)), "-m", module]
    environ = os.environ | {"PARKADE_RUN_DIR": str(run_dir), "PARKADE_MODEL": "bard"}
    with subprocess.Popen(command, env=environ, pass_fds=fds, stderr=subprocess.DEVNULL) as process:
        for fd in fds:
            os.close(fd)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.system
async def test_the_next_life_of_a_router_serves_on_the_same_sockets(tmp_path: Path) -> None:
    listeners = []
    for address in (client_address(tmp_path), worker_address(tmp_path)):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(address.removeprefix("ipc://"))
        listeners[-1].listen()
    async with Client(client_address(tmp_path)) as client:  # connects before anybody is there
        for how, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -9), (signal.SIGTERM, 0)):
            with started(listeners, "router", tmp_path) as router:
                assert not (await client.status(LIMIT_S)).draining
                router.send_signal(how)
                assert await asyncio.to_thread(router.wait, LIMIT_S) == status
    assert set(os.listdir(tmp_path)) == {"client.sock", "worker.sock"}
    for listener in listeners:
        listener.close()


@pytest.mark.system
async def test_http_waits_in_the_socket_for_the_adapter(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            with started([listener], "router.openai", tmp_path) as adapter:
                assert b" 200 " in await asyncio.wait_for(reader.readline(), LIMIT_S)
                writer.close()
                adapter.terminate()
                assert await asyncio.to_thread(adapter.wait, LIMIT_S) == 0


def test_sockets_of_another_process_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    assert passed_sockets() == []


async def test_the_adapter_feeds_the_watchdog_while_its_loop_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    assert watchdog_s() == 0.01
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        feeding = asyncio.ensure_future(feed_watchdog(watchdog_s()))
        for _ in range(3):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(systemd, 100), LIMIT_S) == b"WATCHDOG=1"
        feeding.cancel()


async def test_nobody_watches_where_systemd_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert watchdog_s() is None
    await asyncio.wait_for(feed_watchdog(watchdog_s()), LIMIT_S)
