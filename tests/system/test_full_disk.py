"""A disk that is full under the log, the journal and the run directory: lines are lost, and no stream, process or end is."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from parkade.serve import free_port, programs
from router.client import Client
from tests.system.stack import Heard, Stack, by_zeromq
from tests.system.test_faults import SETTINGS, all_right, answers, quiet, streams
from wire.config import Config
from wire.sockets import client_address

LIMIT_S = 60
PAGE_BYTES = 4096
FULL = Path("/dev/full")  # each write fails as on a full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One of half a MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """With a file, to the last page."""
    done = subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'filler'}", "bs=4k"], capture_output=True, text=True)
    assert "No space left" in done.stderr
    return disk / "filler"


def one_stream(client: Client) -> Awaitable[list[Heard]]:
    return streams(client, count=1)


def is_back(stack: Stack, module: str, former: int) -> bool:
    pids = [process.pid for process in stack.processes(module)]
    return bool(pids) and former not in pids and answers(stack)


def test_a_disk_that_fills_up_costs_lines_and_the_journal_only(disk):
    log = disk / "run.log"
    with Stack(disk / "run", journal=disk / "journal", **SETTINGS) as stack:
        filler = fill(disk)
        sizes = [path.stat().st_size for path in (log, disk / "journal")]
        all_right(by_zeromq(stack, streams))
        for module in ("gpu_worker", "router"):  # the one makes a journal there, the other a socket
            before = stack.pid_of(module)
            stack.kill(module)
            stack.until(lambda module=module, before=before: is_back(stack, module, before), f"{module} is back")
        all_right(by_zeromq(stack, one_stream))
        now = [path.stat().st_size for path in (log, disk / "journal")]
        assert all(before <= size < before + PAGE_BYTES for before, size in zip(sizes, now, strict=True))  # the rest of a page
        assert stack.process.poll() is None
        filler.unlink()
        all_right(by_zeromq(stack, one_stream))
        stack.until(lambda: "lines dropped" in stack.log, "the log goes on, and tells of the loss")
        quiet(stack)
        assert stack.stop() == 0


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.long)], ids=["parkade serve", "each by itself"])
def test_with_a_full_disk_from_the_beginning_it_serves_and_ends_with_status_0(tmp_path, alone):
    port = free_port("127.0.0.1", 0)
    config = Config(**SETTINGS | {"park_ram": 8 << 20}, run_dir=str(tmp_path / "run"), port=port)
    started = [(program.command, program.environ) for program in programs(config)]
    if alone:
        (tmp_path / "run").mkdir(mode=0o700)
    else:
        started = [((sys.executable, "-m", "parkade", "serve"), started[0][1])]
    with FULL.open("w") as full, ExitStack() as all_of_them:
        running = []
        for command, environ in started:
            process = subprocess.Popen(command, env=environ | {"PARKADE_LOG": "debug"}, stdout=full, stderr=full)
            all_of_them.callback(process.wait)
            all_of_them.callback(process.kill)
            running.append(process)
        asyncio.run(until_it_answers(f"http://127.0.0.1:{port}/health"))
        all_right(asyncio.run(heard_at(client_address(config.run_dir))))
        for process in reversed(running):  # the clients' side first, as serve does
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, process.args


async def until_it_answers(url: str) -> None:
    async with httpx.AsyncClient() as http, asyncio.timeout(LIMIT_S):
        while True:
            try:
                if (await http.get(url)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.05)


async def heard_at(address: str) -> list[Heard]:
    async with Client(address) as client, asyncio.timeout(LIMIT_S):
        return await streams(client)
