"""The router's process and more connections than it has descriptors for: streams go on, it does not spin or end, and when they
leave others are served. ZeroMQ ends the process at the last descriptor, so that one must never be taken.
"""

import asyncio
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.client import Client
from router.door import BURST, OTHER_DESCRIPTORS
from tests.descriptors import LIMIT_S, ended, goes_on, knock
from tests.router.stage import Stage, ids_of, until
from wire.messages import Submit, Tokens

pytestmark = pytest.mark.system

MOST_CLIENTS = BURST + 8
DESCRIPTORS = OTHER_DESCRIPTORS + BURST + MOST_CLIENTS
BACKLOG = 100  # connections that wait to be accepted, at the most
QUIET_S = 1.0  # nobody has been let in for so long: ZeroMQ takes no more, however busy the machine is
STALLING = """
import asyncio, signal, sys, time
from router import __main__ as router
serve = router.serve
async def stalling(server):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, sys.stdin.read)
    await serve(server)
router.serve = stalling
sys.exit(router.run("router", router.main))
"""  # a router whose loop stands still from SIGUSR1 on, until its stdin is closed, as in a long turn


class Router:
    """A router with room for MOST_CLIENTS connections of clients. `systemd` hears what it says to systemd."""

    def __init__(self, run_dir: Path) -> None:
        self.path = f"{run_dir}/client.sock"
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.bind(f"{run_dir}/notify")
        self.systemd.settimeout(LIMIT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-c", STALLING, "--run-dir", str(run_dir)],
            stdin=subprocess.PIPE,
            env=os.environ | {"NOTIFY_SOCKET": f"{run_dir}/notify"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )

    def wait_until_ready(self) -> None:
        assert b"READY=1" in self.systemd.recv(1000)

    def fed(self) -> bool:
        """Whether it goes on to tell systemd that it lives."""
        while select.select([self.systemd], [], [], 0)[0]:
            self.systemd.recv(1000)
        return self.systemd.recv(1000) == b"WATCHDOG=1"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.systemd.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * DESCRIPTORS:
        pytest.skip(f"{DESCRIPTORS} connections need as many descriptors here, too")
    router = Router(tmp_path)
    try:
        router.wait_until_ready()
        yield router
    finally:
        router.close()


async def in_time(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_however_many_come_at_once_the_last_descriptor_is_not_taken(router, tmp_path):
    async def story():
        stage = Stage(None, str(tmp_path), None)
        async with Client(stage.address) as client:
            worker = await stage.worker()
            stream = client.generate([1], max_tokens=10_000, request_id="r")
            first = asyncio.ensure_future(anext(stream))
            await worker.next(Submit)
            await worker.say(Tokens("r", 0, [0]))
            assert (await first).tokens == [0]

            async def token(offset: int) -> None:
                await worker.say(Tokens("r", offset, [offset]))
                message = await anext(stream)
                assert (message.offset, message.tokens) == (offset, [offset])

            socks = []
            while not any(map(ended, socks[-BACKLOG:])):  # until no more may stay
                socks += knock(router.path, BACKLOG)
                await client.status()
            router.process.send_signal(signal.SIGUSR1)
            burst = knock(router.path, 2 * BURST, QUIET_S)
            assert BURST / 2 < len(burst) < BURST + BACKLOG
            router.process.stdin.close()
            await in_time(lambda: sum(map(ended, burst)) > len(burst) - 8)  # some may have taken the place of one that left
            offset = await goes_on(router.process.pid, token, 1)
            assert router.process.poll() is None
            assert router.fed()

            for sock in (*socks, *burst):
                sock.close()
            async with Client(stage.address) as new:
                await until(new, lambda status: status.ready)
                other = asyncio.ensure_future(ids_of(new.generate([1], max_tokens=1, request_id="n")))
                await worker.next(Submit)
                await worker.say(Tokens("n", 0, [0]))
                await worker.finish("n", "length", 1)
                assert await other == [0]
            await goes_on(router.process.pid, token, offset)
            await stream.aclose()
        await stage.close()

    asyncio.run(story())
