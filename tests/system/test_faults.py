"""Rows of the fault matrix (docs/faults.md) that need whole processes and no luck: SIGSTOP, SIGKILL and SIGTERM of each process.

The toy model's oracle knows each text, so one token that is lost, doubled or wrong is a plain inequality.
"""

import asyncio
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from gpu_worker.model.load import load_model
from gpu_worker.model.toy import Oracle, ToyModel
from router.client import Client
from tests.system.stack import Heard, Stack, by_zeromq, hear, prompt_ids, stream, together
from wire.failpoints import POINTS, VARIABLE
from wire.messages import Sampling
from wire.model_files import find_model

STREAMS, GENERATED = 4, 400
SETTINGS = {"model": "toy", "ctx": 1024, "slots": 4, "park_ram": "8MiB", "park_every": 60, "park_mode": "save"}
# a process whose main thread hangs as in a CUDA call that never returns: it holds the lock of the interpreter, and the threads of
# ZeroMQ go on answering for it. Loaded by every Python that the test starts.
HANG = """
import signal, sys
if sys.orig_argv[-2:] == ["-m", "gpu_worker"]:
    import ctypes
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(600))
"""


@functools.cache
def toy() -> ToyModel:
    return load_model(find_model("toy"))


@functools.cache
def text(number: int) -> list[int]:
    return Oracle(toy(), prompt_ids(number, 60)).text(GENERATED, Sampling(**sampling(number)))


def sampling(number: int) -> dict:
    return {"temperature": 0.6 * (number % 2), "seed": number}


def all_right(heard: list[Heard]) -> None:
    for number, each in enumerate(heard):
        assert each.ids == text(number), number
        assert each.finished.reason == "length" and each.finished.error == ""


def once(tokens: int, call: Callable[[], None]) -> Callable[[Heard], None]:
    """An `on_message` that calls when the stream has so many tokens."""
    done: list[bool] = []

    def on_message(heard: Heard) -> None:
        if len(heard.ids) >= tokens and not done:
            done.append(True)
            call()

    return on_message


def streams(client: Client, on_message: Callable[[Heard], None] | None = None, count: int = STREAMS):
    return asyncio.gather(
        *(
            hear(client, prompt_ids(i, 60), max_tokens=GENERATED, on_message=on_message if i == 0 else None, **sampling(i))
            for i in range(count)
        )
    )


def quiet(stack: Stack) -> None:
    """Nobody has anything any more."""
    stack.until(lambda: all(slot["state"] == "idle" for slot in stack.slots()), "no seat is taken")
    for name in ("parkade_hostcache_used_bytes", "parkade_requests_running", "parkade_requests_preempted"):
        stack.until(lambda name=name: stack.metric(name) == 0, f"{name} is 0")


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """The folder of failpoints: see wire/failpoints.py."""
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def stack(tmp_path_factory, points) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("faults") / "run", {VARIABLE: f"@{points}"}, **SETTINGS) as stack:
        yield stack


def next_life(stack: Stack, module: str, former: int) -> None:
    """Wait until it has been started again and everybody serves."""

    def serves() -> bool:
        pids = [process.pid for process in stack.processes(module)]
        return bool(pids) and former not in pids and stack.metric("parkade_workers") == stack.metric("parkade_hostcache_up") == 1

    stack.until(serves, f"{module} is back")


# SIGSTOP --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", ["gpu_worker", "hostcache", "router"])
def test_a_process_that_stands_still_for_a_while_costs_a_gap(stack, module):
    pid = stack.pid_of(module)
    lost = stack.metric("parkade_workers_lost_total")

    async def scenario(client: Client) -> list[Heard]:
        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGCONT)

        return await streams(client, once(GENERATED // 4, stop))

    try:
        all_right(by_zeromq(stack, scenario))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stack.pid_of(module) == pid
    assert stack.metric("parkade_workers_lost_total") == lost
    quiet(stack)


def test_an_http_adapter_that_stands_still_for_a_while_costs_a_gap(stack):
    pid = stack.pid_of("router.openai")
    stopped: list[bool] = []

    async def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    def on_tokens(answer) -> None:
        if len(answer.ids) >= GENERATED // 4 and not stopped:
            stopped.append(True)
            tasks.append(asyncio.get_running_loop().create_task(stop()))

    tasks: list[asyncio.Task] = []
    bodies = [{"prompt": prompt_ids(i, 60), "max_tokens": GENERATED, **sampling(i)} for i in range(2)]
    try:
        answers = together(stream(stack.url, on_tokens=on_tokens, **bodies[0]), stream(stack.url, **bodies[1]))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stopped and stack.pid_of("router.openai") == pid
    for i, answer in enumerate(answers):
        assert (answer.ids, answer.finish_reason, answer.done) == (text(i), "length", True)


# a worker that is silent for ever -------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGUSR1], ids=["stopped", "hangs with a live I/O thread"])
def test_the_streams_of_a_silent_worker_go_on_in_the_other_and_what_it_says_later_is_dropped(tmp_path, how):
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HANG)
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "hook"), *sys.path[:1], os.getcwd()])}
    with Stack(tmp_path / "run", environ, **SETTINGS | {"device": "cpu,cpu", "slots": 2}) as stack:
        first = stack.pid_of("gpu_worker")
        done: list[int] = []

        async def scenario(client: Client) -> list[Heard]:
            return await streams(client, once(GENERATED // 4, lambda: (done.append(first), os.kill(first, how))))

        all_right(by_zeromq(stack, scenario))
        assert done and stack.metric("parkade_workers_lost_total") == 1
        assert stack.metric("parkade_requests_replayed_total") >= 1
        if how == signal.SIGSTOP:  # it goes on with what it had, and is told to end it
            os.kill(first, signal.SIGCONT)
            stack.until(lambda: stack.metric("parkade_workers") == 2, "it is heard again")
            all_right(by_zeromq(stack, streams))
            quiet(stack)
        else:
            os.kill(first, signal.SIGKILL)
            stack.until(lambda: stack.metric("parkade_workers") == 2, "it is started again")


# SIGKILL --------------------------------------------------------------------------------------------------------------
def test_a_killed_router_leaves_nothing_and_its_next_life_serves(stack):
    killed = []

    async def scenario(client: Client) -> list[Heard]:
        def kill() -> None:
            killed.append(stack.pid_of("router"))
            stack.kill("router")

        return await streams(client, once(GENERATED // 4, kill))

    heard = by_zeromq(stack, scenario)
    assert killed
    for number, each in enumerate(heard):  # a clean end, and nothing wrong before it
        assert each.ids == text(number)[: len(each.ids)]
        assert each.finished.code == "router_lost" or each.ids == text(number)
    assert heard[0].finished.code == "router_lost"
    stack.until(lambda: stack.http.get("/health").status_code == 200, "it serves again")
    assert stack.pid_of("router") not in killed
    quiet(stack)  # the workers were told to end what nobody wants any more, and its leases went back
    all_right(by_zeromq(stack, streams))


def test_a_killed_http_adapter_takes_its_streams_with_it_and_nobody_elses(stack):
    before = stack.pid_of("router.openai")
    cancelled = stack.metric("parkade_requests_finished_total", reason="client_lost")
    body = {"prompt": prompt_ids(3, 60), "max_tokens": 100_000, "stream": True, "ignore_eos": True}

    async def scenario(client: Client) -> list[Heard]:
        async def leave() -> None:
            with pytest.raises(httpx.HTTPError):
                await stream(stack.url, **body)

        def kill() -> None:
            os.kill(before, signal.SIGKILL)

        leaving = asyncio.create_task(leave())
        while not any(slot["state"] != "idle" for slot in await asyncio.to_thread(stack.slots)):
            pass
        heard = await streams(client, once(GENERATED // 4, kill), 2)
        await leaving
        return heard

    all_right(by_zeromq(stack, scenario))
    stack.until(lambda: [each.pid for each in stack.processes("router.openai")] not in ([], [before]), "it is started again")
    stack.until(lambda: answers(stack), "it answers")
    quiet(stack)
    assert stack.metric("parkade_requests_finished_total", reason="client_lost") == cancelled + 1


def answers(stack: Stack) -> bool:
    try:
        return stack.http.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


WITHOUT_ROUTER = [name for name, (file, _) in POINTS.items() if not file.startswith("router/")]
SHORT = ("copy", "grant")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in WITHOUT_ROUTER if name != "verify"]
)
def test_a_death_at_each_stage_changes_no_text(stack, points, name):
    module = "hostcache" if POINTS[name][0].startswith("hostcache") else "gpu_worker"
    before = stack.pid_of(module)
    (points / "new").write_text("kill")
    (points / "new").rename(points / name)
    all_right(by_zeromq(stack, streams))
    next_life(stack, module, before)
    quiet(stack)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_times_a_sigkill_of_everything_needs_no_cleaning(tmp_path):
    before = set(os.listdir("/dev/shm"))
    for _ in range(50):
        stack = Stack(tmp_path / "run", **SETTINGS)
        children = psutil.Process(stack.process.pid).children(recursive=True)
        heard = asyncio.run(killed_streams(stack))
        assert heard.ids == text(0)[: len(heard.ids)] and heard.ids
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert set(os.listdir("/dev/shm")) == before


async def killed_streams(stack: Stack) -> Heard:
    """The first of some streams, whose server is killed with everything in it."""
    async with Client(stack.address) as client:
        children = psutil.Process(stack.process.pid).children(recursive=True)

        def kill() -> None:
            for process in [stack.process, *children]:
                process.kill()

        return (await streams(client, once(GENERATED // 4, kill)))[0]


# no descriptors -------------------------------------------------------------------------------------------------------
def test_a_dead_worker_is_back_as_soon_as_serve_has_a_descriptor_again(stack):
    serve, before = stack.process.pid, stack.pid_of("gpu_worker")
    limits = resource.prlimit(serve, resource.RLIMIT_NOFILE)
    told = stack.log.count("cannot be started")

    async def scenario(client: Client) -> list[Heard]:
        return await streams(client, once(GENERATED // 4, lambda: stack.kill("gpu_worker")))

    def rescue() -> None:
        try:
            stack.until(lambda: "worker0 cannot be started: Too many open files; trying until it can" in stack.log, "it is told")
        finally:
            resource.prlimit(serve, resource.RLIMIT_NOFILE, limits)

    resource.prlimit(serve, resource.RLIMIT_NOFILE, (3, limits[1]))  # no new one
    with ThreadPoolExecutor(1) as beside:
        rescued = beside.submit(rescue)
        all_right(by_zeromq(stack, scenario))
        rescued.result()
    next_life(stack, "gpu_worker", before)
    assert stack.log.count("cannot be started") == told + 1
    assert "Traceback" not in stack.log
    quiet(stack)


# SIGTERM --------------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_rolling_restart_of_workers_and_host_cache_is_no_error(stack):
    """One after the other; each is back before the next goes. (The router's and the adapter's break connections: drain first.)"""
    restarted: list[tuple[str, int]] = []

    async def scenario(client: Client) -> list[list[Heard]]:
        rolling = asyncio.create_task(asyncio.to_thread(roll))
        rounds = []
        while not rolling.done():
            rounds.append(await streams(client))
        await rolling
        return rounds

    def roll() -> None:
        for module in ("hostcache", "gpu_worker") * 2:
            before = stack.pid_of(module)
            stack.kill(module, signal.SIGTERM)
            next_life(stack, module, before)
            restarted.append((module, before))

    rounds = by_zeromq(stack, scenario)
    assert len(restarted) == 4 and rounds
    for heard in rounds:
        all_right(heard)
    assert stack.metric("parkade_requests_finished_total", reason="error") == 0
    quiet(stack)
