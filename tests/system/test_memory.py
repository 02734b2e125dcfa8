"""What the processes hold: no more than was promised, nothing once nobody needs it, and no work when nobody is parked."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from router.client import Client
from tests.system.stack import READY_TIMEOUT_S, STREAM_TIMEOUT_S, Answer, Stack, each, prompt, stream, together
from wire.memory import total_bytes
from wire.messages import Finished, Tokens

CTX = 512
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 2  # cells x layers x (keys, values) x heads x size of a head x bytes of bf16
HEAD_BYTES = BLOCK_BYTES // 30 + 4096  # where the model's head drafts: its own layer, and a hidden row rounded up
SPARE_BYTES = 500 << 20
MIB = 1 << 20


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("memory") / "run", ctx=CTX, slots=4, park_ram="256MiB") as stack:
        yield stack


def chats(stack: Stack, count: int, tokens: int) -> list[Answer]:
    return together(*(stream(stack.url, prompt=prompt(i, 60), max_tokens=tokens, temperature=0) for i in range(count)))


def turns(stack: Stack, module: str) -> int:
    """How often the process has gone to sleep: each message and each deadline wakes it, and nothing else does."""
    return psutil.Process(stack.pid_of(module)).num_ctx_switches().voluntary


def test_below_the_watermark_the_host_cache_hears_nothing_and_nobody_is_told_anything(stack):
    async def scenario() -> list:
        async with Client(stack.address) as client:
            return [m async for m in client.generate(list(range(500, 600)), max_tokens=100, ignore_eos=True, temperature=0)]

    chats(stack, 1, 2)  # warm
    stack.until(lambda: stack.metric("parkade_hostcache_held_bytes") == 0, "nothing is held")
    before = turns(stack, "hostcache")
    said = asyncio.run(asyncio.wait_for(scenario(), STREAM_TIMEOUT_S))
    quiet = chats(stack, 2, 60)
    assert turns(stack, "hostcache") == before
    assert {type(message) for message in said} == {Tokens, Finished}  # no Notice
    assert (said[-1].usage.parks, said[-1].usage.completion_tokens) == (0, 100)
    assert all(not answer.parkade["parks"] and not answer.comments for answer in quiet)
    parked = chats(stack, 4, 150)  # and that it would have been seen
    assert sum(answer.parkade["parks"] for answer in parked) > 0
    assert turns(stack, "hostcache") > before


def test_the_host_cache_gives_its_memory_back_after_the_last_lease(stack):
    names = set(os.listdir("/dev/shm"))
    held = []

    def look(_: Answer) -> None:
        held.append((stack.metric("parkade_hostcache_held_bytes"), arena_bytes(stack)))

    bodies = [{"prompt": prompt(i, 60), "max_tokens": 150, "temperature": 0} for i in range(4)]
    answers = together(stream(stack.url, on_tokens=each(10, look), **bodies[0]), *(stream(stack.url, **b) for b in bodies[1:]))
    assert sum(answer.parkade["parks"] for answer in answers) > 0
    assert 0 < max(figure for figure, _ in held) <= 256 * MIB
    assert 0 < max(nbytes for _, nbytes in held) <= 256 * MIB
    assert set(os.listdir("/dev/shm")) == names
    assert stack.metric("parkade_hostcache_used_bytes") == 0
    stack.until(lambda: stack.metric("parkade_hostcache_held_bytes") == 0, "what was held is given back")
    assert stack.metric("parkade_hostcache_budget_bytes") == 256 * MIB
    assert arena_bytes(stack) == 0


def arena_bytes(stack: Stack) -> int:
    """Memory that the kernel holds for the arena, whatever the host cache says."""
    folder = Path(f"/proc/{stack.pid_of('hostcache')}/fd")
    (arena,) = [file for file in folder.iterdir() if "memfd:" in os.readlink(file)]
    return arena.stat().st_blocks * 512


def shared_bytes(stack: Stack, module: str) -> int:
    """Resident pages of shared memory: those of the arena that the process has touched."""
    status = Path(f"/proc/{stack.pid_of(module)}/status").read_text()
    return int(re.search(r"RssShmem:\s+(\d+) kB", status)[1]) * 1024


def test_a_worker_holds_its_weights_and_its_pool_and_little_more(stack):
    chats(stack, 4, 100)
    weights, pool = re.search(r"weights (\d+) MiB, pool \d+ cells in (\d+) MiB", stack.log).groups()
    block = BLOCK_BYTES + HEAD_BYTES * bool(stack.http.get("/props").json()["draft"])
    assert int(pool) == CTX // 16 * block // MIB
    assert f"pool       {CTX} cells, {CTX // 16} blocks of 16" in stack.log  # the block about capacity
    assert len(re.findall("holds so many parks", stack.log)) == 1
    own = psutil.Process(stack.pid_of("gpu_worker")).memory_full_info()
    assert own.uss <= (int(weights) + int(pool)) * MIB + SPARE_BYTES, f"{own.uss // MIB} MiB, weights {weights}, pool {pool}"
    private = own.rss - shared_bytes(stack, "gpu_worker")
    assert private <= (int(weights) + int(pool)) * MIB + SPARE_BYTES, f"{private // MIB} MiB, weights {weights}, pool {pool}"


def test_a_budget_of_one_block_takes_one_block(tmp_path):
    with Stack(tmp_path / "run", ctx=CTX, slots=2, park_ram=BLOCK_BYTES, park_every=6, draft=0) as stack:
        one = together(stream(stack.url, prompt=[1000, 1001, 1002], max_tokens=10, temperature=0))[0]
        assert (one.parkade["parks"], one.parkade["recomputed_tokens"]) == (1, 0)
        more = together(stream(stack.url, prompt=[1000, 1001, 1002], max_tokens=40, temperature=0))[0]
        assert (more.parkade["parks"], more.ids[:10]) == (6, one.ids)
        assert more.parkade["recomputed_tokens"] > 16
        assert stack.metric("parkade_park_denied_total", reason="full") > 0
        assert stack.metric("parkade_hostcache_budget_bytes") == BLOCK_BYTES


@pytest.mark.parametrize("park_ram", ["100TiB", str(total_bytes() + 1)])
def test_a_budget_beyond_the_memory_is_refused_with_the_numbers(tmp_path, park_ram):
    command = [sys.executable, "-m", "parkade", "serve", "--park-ram", park_ram, "--port", "0", "--run-dir", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=READY_TIMEOUT_S)
    assert ended.returncode not in (0, None)
    assert ended.stdout == ""  # never ready
    said = ended.stderr.splitlines()[-1]
    wanted = 100 << 40 if park_ram == "100TiB" else int(park_ram)
    assert f"--park-ram {park_ram}" in said and str(wanted) in said and str(total_bytes()) in said
