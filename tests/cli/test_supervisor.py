"""The supervisor with small scripted programs: what dies starts again, what is said is gathered, and all end in their order."""

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from parkade.supervisor import Failure, Program, Supervisor, next_delay_s
from wire.service import USER_ERROR, log

LIMIT_S = 20
TRIES = 3  # to start what cannot be started
SLEEPER = "import signal, sys; {before}\nprint('up', flush=True)\nwhile True: signal.pause()"


def program(name: str, code: str, wave: int = 0) -> Program:
    return Program(name, (sys.executable, "-c", code), dict(os.environ), wave)


def sleeper(name: str, wave: int = 0, before: str = "") -> Program:
    return program(name, SLEEPER.format(before=before), wave)


class Said:
    """The lines of all children and of the supervisor, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.news = asyncio.Event()

    def put(self, line: str) -> None:
        self.lines.append(line)
        self.news.set()

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition(self.lines):
                self.news.clear()
                await self.news.wait()

    def count(self, *words: str) -> int:
        return sum(all(word in line for word in words) for line in self.lines)


@pytest.fixture
async def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    said = Said()
    monkeypatch.setattr("parkade.supervisor.log_raw", said.put)
    handler = logging.Handler()
    handler.emit = lambda record: said.put(f"{record.levelname} {record.getMessage()}")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    return said


@asynccontextmanager
async def running(*programs: Program, settled: bool = True) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(list(programs))
    supervisor.settled = settled
    supervisor.start()
    try:
        yield supervisor
    finally:
        async with asyncio.timeout(LIMIT_S):
            await supervisor.kill()


def pid(supervisor: Supervisor, name: str) -> int:
    return next(child.process.pid for child in supervisor.children if child.program.name == name)


async def test_what_dies_starts_again(said: Said) -> None:
    async with running(sleeper("one"), sleeper("two")) as supervisor:
        await said.until(lambda _: said.count(" one ", "up") == said.count(" two ", "up") == 1)
        other = pid(supervisor, "two")
        for life in range(2, 4):
            os.kill(pid(supervisor, "one"), signal.SIGKILL)
            await said.until(lambda _, life=life: said.count(" one ", "up") == life)
        assert said.count("one was killed by SIGKILL; starts again in 0.1 s") == 1
        assert said.count("one was killed by SIGKILL; starts again in 0.2 s") == 1
        assert pid(supervisor, "two") == other


def test_the_delay_doubles_up_to_two_seconds_and_is_forgotten_after_a_healthy_life() -> None:
    delays = [0.0]
    for _ in range(7):
        delays.append(next_delay_s(delays[-1], 1.0, 1))
    assert delays[1:] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert next_delay_s(2.0, 60.0, -9) == 0.1
    assert next_delay_s(0.0, 0.1, USER_ERROR) == 2.0


async def test_a_failure_before_ready_is_told_with_its_last_line(said: Said) -> None:
    code = "import sys; print('first', file=sys.stderr); raise OSError('no luck')"
    async with running(sleeper("good"), program("bad", code), settled=False) as supervisor:
        async with asyncio.timeout(LIMIT_S):
            assert await supervisor.failed == Failure("bad", 1, "OSError: no luck")
        assert said.count(" bad ", "first") == 1


async def test_a_users_mistake_before_ready_is_told_once(said: Said) -> None:
    code = "import sys; print('error: --x is wrong', file=sys.stderr); sys.exit(78)"
    async with running(program("bad", code), settled=False) as supervisor:
        async with asyncio.timeout(LIMIT_S):
            assert await supervisor.failed == Failure("bad", USER_ERROR, "--x is wrong")
        assert said.count("--x is wrong") == 0


async def test_a_signal_before_ready_is_no_failure(said: Said) -> None:
    async with running(sleeper("one"), settled=False) as supervisor:
        await said.until(lambda _: said.count("up") == 1)
        os.kill(pid(supervisor, "one"), signal.SIGKILL)
        await said.until(lambda _: said.count("up") == 2)
        assert not supervisor.failed.done()


@contextmanager
def descriptors(free: int) -> Iterator[None]:
    """This process may open no more than so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.close(first := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("free", [0, 2, 3])  # none; for the pipe; for what the child reads, too, and not to hear of its start
async def test_what_cannot_start_without_a_descriptor_is_tried_until_it_can(said: Said, free: int) -> None:
    wrong: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    async with running(sleeper("one")) as supervisor:
        await said.until(lambda _: said.count(" one ", "up") == 1)
        used = len(os.listdir("/proc/self/fd"))
        with descriptors(
            0
        ):  # before it ends, so that no try comes earlier; its own two, which are free then, are too few for one
            os.kill(pid(supervisor, "one"), signal.SIGKILL)
            await said.until(lambda _: said.count("one was killed by SIGKILL") == 1)
            with descriptors(free):
                tries = {supervisor.children[0].started_at}
                async with asyncio.timeout(LIMIT_S):
                    while len(tries) <= TRIES:
                        await asyncio.sleep(0.01)
                        tries.add(supervisor.children[0].started_at)
                refused = "one cannot be started: Too many open files; trying until"
                assert said.count("cannot be started") == said.count(refused) == 1
        await said.until(lambda _: said.count(" one ", "up") == 2)
        assert len(os.listdir("/proc/self/fd")) == used
    assert not wrong


async def test_waves_end_one_after_the_other(said: Said) -> None:
    words = "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))"
    async with running(sleeper("last", 2, words), sleeper("first", 0, words), sleeper("middle", 1, words)) as supervisor:
        await said.until(lambda _: said.count("up") == 3)
        await supervisor.stop(LIMIT_S, asyncio.Event())
    assert [line.split()[2] for line in said.lines if line.endswith("bye")] == ["first", "middle", "last"]


async def test_a_worker_that_dies_while_others_finish_starts_again(said: Said) -> None:
    wait = (
        "signal.signal(signal.SIGTERM, lambda *_: print('draining', flush=True)); "
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))"
    )
    async with running(sleeper("router", 0, wait), sleeper("worker", 1)) as supervisor:
        await said.until(lambda _: said.count("up") == 2)
        stopping = asyncio.ensure_future(supervisor.stop(LIMIT_S, asyncio.Event()))
        await said.until(lambda _: said.count("draining") == 1)
        os.kill(pid(supervisor, "worker"), signal.SIGKILL)
        await said.until(lambda _: said.count(" worker ", "up") == 2)
        os.kill(pid(supervisor, "router"), signal.SIGUSR1)
        async with asyncio.timeout(LIMIT_S):
            await stopping


async def test_a_second_signal_ends_what_does_not_want_to_end(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parkade.supervisor.HURRY_S", 0.0)
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))"
    async with running(sleeper("stubborn", 0, stubborn)) as supervisor:
        await said.until(lambda _: said.count("up") == 1)
        hurry = asyncio.Event()
        stopping = asyncio.ensure_future(supervisor.stop(10 * LIMIT_S, hurry))
        await said.until(lambda _: said.count(" no") == 1)
        hurry.set()
        async with asyncio.timeout(LIMIT_S):
            await stopping
        assert said.count("stubborn does not end; killed") == 1


async def test_a_child_that_floods_stderr_is_neither_blocked_nor_believed(said: Said, tmp_path: Path) -> None:
    code = "import os; text = b'x' * 3_000_000 + b'\\n12:34:56.789 I flood      tidy\\n\\xff\\xfe'; open(2, 'wb').write(text)"
    async with running(program("flood", code)):
        await said.until(lambda _: said.count("flood ended with status 0") >= 1)
        assert said.count("12:34:56.789 I flood      tidy") >= 1
        assert max(map(len, said.lines)) < 9000
        assert sum(line.count("x") for line in said.lines) >= 3_000_000


def test_children_are_in_our_session_and_die_with_us_even_by_sigkill(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from parkade.supervisor import *\n"
        "async def main():\n"
        "    supervisor = Supervisor([Program('child', (sys.executable, '-c', 'import signal; signal.pause()'), {})])\n"
        "    supervisor.start()\n"
        "    print(supervisor.children[0].process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with psutil.Popen([sys.executable, "-c", code], stdout=-1) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.ppid() == parent.pid
        assert os.getsid(child.pid) == os.getsid(parent.pid)
        parent.kill()
        parent.wait()
    assert psutil.wait_procs([child], timeout=LIMIT_S)[1] == []
