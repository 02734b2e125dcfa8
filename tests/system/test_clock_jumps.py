"""The time of day jumps in the middle of streams, by an hour and back by a day: nothing times out, and every figure is sane."""

import asyncio
import math
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from router.client import Client
from tests.system.stack import Heard, Stack, by_zeromq, hear, prompt_ids
from tests.system.test_faults import GENERATED, SETTINGS, all_right, quiet, sampling

SOURCE = Path(__file__).with_name("clock_shift.cpp")
PROCESSES = ("hostcache", "router", "gpu_worker", "router.openai")
HOUR_S, DAY_S = 3600, 24 * 3600
HELD_S = 600.0  # longer than the test, shorter than the jumps
STREAMS = 4


class Clock:
    """The time of day of processes that are started with `environ`."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None:
            pytest.skip("no C++ compiler")
        self.library = folder / "clock_shift.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", self.library, SOURCE], check=True)
        self._shift = folder / "shift"
        self.jump(0)
        self.environ = {"LD_PRELOAD": str(self.library), "CLOCK_SHIFT_FILE": str(self._shift)}

    def jump(self, shift_s: int) -> None:
        """To so many seconds from the true time."""
        with self._shift.open("r+b" if self._shift.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=q", shift_s * 10**9))

    def of(self, pid: int) -> bool:
        """Whether the process has this clock."""
        return str(self.library) in Path(f"/proc/{pid}/maps").read_text()


def shown_s(stack: Stack) -> float:
    """How far the time that an answer shows is from the true one."""
    answer = stack.http.post("/v1/completions", json={"prompt": [11, 12, 13], "max_tokens": 1})
    return answer.json()["created"] - time.time()


def test_a_clock_that_jumps_moves_no_timeout(tmp_path):
    clock = Clock(tmp_path)
    with Stack(tmp_path / "run", clock.environ, **SETTINGS) as stack:
        assert all(clock.of(stack.pid_of(name)) for name in PROCESSES) and clock.of(stack.process.pid)
        pids = [stack.pid_of(name) for name in PROCESSES]
        began = time.monotonic()

        async def scenario(client: Client) -> list[Heard]:
            def on_message(heard: Heard) -> None:
                for share, shift_s in ((4, HOUR_S), (2, -DAY_S)):
                    if len(heard.ids) >= GENERATED // share and shift_s not in jumps:
                        jumps.append(shift_s)
                        clock.jump(shift_s)

            held = asyncio.create_task(one(client, 0, request_id="held"))
            await held_back(client)
            heard = [one(client, number, on_message if number == 1 else None) for number in range(1, STREAMS)]
            others = await asyncio.gather(*heard)
            assert not held.done()  # its time has not come, whatever the clock says
            assert (await client.resume("held")).code == ""
            return [await held, *others]

        jumps: list[int] = []
        heard = by_zeromq(stack, scenario)
        took_s = time.monotonic() - began
        assert jumps == [HOUR_S, -DAY_S]
        all_right(heard)
        for each in heard:
            pauses_ms = [notice.parked_ms for notice in each.notices if notice.event == "resumed"]
            assert pauses_ms and each.finished.usage.parks == len(pauses_ms)
            assert all(0 <= ms <= 1000 * took_s for ms in pauses_ms)
            assert 0 <= each.finished.usage.parked_ms <= 1000 * took_s
        assert abs(shown_s(stack) + DAY_S) < HOUR_S / 2
        clock.jump(HOUR_S)
        assert abs(shown_s(stack) - HOUR_S) < HOUR_S / 2
        sane(stack, took_s)
        quiet(stack)
        assert [stack.pid_of(name) for name in PROCESSES] == pids
        assert stack.stop() == 0


async def one(client: Client, number: int, on_message=None, **options: object) -> Heard:
    return await hear(client, prompt_ids(number, 60), max_tokens=GENERATED, on_message=on_message, **sampling(number), **options)


async def held_back(client: Client) -> None:
    """The request "held" is set aside; it may not have been accepted yet."""
    while (await client.park("held", HELD_S)).code:
        pass


def sane(stack: Stack, took_s: float) -> None:
    """No figure tells of a jump."""
    figures = {}
    for line in stack.http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            figures[name] = float(value)
    assert all(math.isfinite(value) and value >= 0 for value in figures.values())
    for name in ("parked", "time_to_first_token", "token_gap"):
        assert figures[f"parkade_{name}_seconds_count"] > 0
        assert figures[f"parkade_{name}_seconds_sum"] < (STREAMS + 2) * (took_s + 60) < HOUR_S, name
    for name in ("workers_lost_total", "requests_replayed_total", 'requests_finished_total{reason="error"}'):
        assert figures[f"parkade_{name}"] == 0, name
    assert figures["parkade_hostcache_up"] == figures["parkade_workers"] == 1
