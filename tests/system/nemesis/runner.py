"""Runs the nemesis: one server, one run after the other on it, each with a history that is checked."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from msgspec import structs

from router.client import Client
from tests.system.nemesis import plan
from tests.system.nemesis.checker import Texts, check
from tests.system.nemesis.clients import http_client, zeromq_client
from tests.system.nemesis.faults import Lives, Nemesis
from tests.system.nemesis.history import History
from tests.system.stack import Stack, hear
from wire.failpoints import VARIABLE
from wire.messages import Sampling, Status

SETTINGS = {"ctx": 1024, "slots": 8, "park_ram": "6MiB", "park_every": 60, "park_mode": "save"}
QUIET_S = 60.0
SAMPLE_S = 0.25
GROWTH_BYTES = 24 << 20  # of a process between its first and last quiet moment; torch and malloc settle meanwhile
GROWTH_FDS = 8


@dataclass
class Outcome:
    """Of one run."""

    seed: int
    broken: list[str] = field(default_factory=list)
    figures: Counter = field(default_factory=Counter)


class Server:
    """A server for runs, and what is known of its processes."""

    def __init__(self, folder: Path, model: str, settings: dict[str, object], scale: float = 1.0) -> None:
        """`settings` are flags of `serve`, `scale` is of the lengths of texts."""
        self.folder, self.model, self.scale = folder, model, scale
        self.failpoints = folder / "failpoints"
        self.failpoints.mkdir(parents=True)
        self.shm = set(os.listdir("/dev/shm"))
        self.stack = Stack(folder / "run", {VARIABLE: f"@{self.failpoints}"}, model=model, **(SETTINGS | settings))
        self.texts: Texts = toy_texts() if model == "toy" else self._heard()
        self.first: dict[int, tuple[str, int, int]] = {}  # pid -> process, bytes, descriptors at its first quiet moment
        self.last: dict[int, tuple[str, int, int]] = {}

    def _heard(self) -> Texts:
        """Undisturbed texts, heard from the server one by one. One per shape of `plan.ask(few=True)`."""
        known: dict[str, list[int]] = {}

        async def listen() -> None:
            async with Client(self.stack.address) as client:
                for number in range(200):
                    ask = plan.ask(0, 0, number, self.scale, True)
                    if repr(ask.prompt) not in known:
                        options = {"max_tokens": ask.max_tokens, **structs.asdict(ask.sampling)}
                        known[repr(ask.prompt)] = (await hear(client, ask.prompt, **options)).ids

        asyncio.run(listen())
        return lambda submit: known[repr(submit["prompt"])]

    def stop(self) -> list[str]:
        """Drain and stop it; what it leaves behind."""
        broken = stop(self.stack, self.shm)
        for pid, (process, nbytes, fds) in self.last.items():
            _, first_bytes, first_fds = self.first[pid]
            if nbytes - first_bytes > GROWTH_BYTES:
                broken.append(f"{process} {pid} grew from {first_bytes >> 20} to {nbytes >> 20} MiB")
            if fds - first_fds > GROWTH_FDS:
                broken.append(f"{process} {pid} had {first_fds} descriptors and has {fds}")
        return broken

    def look(self, lives: Lives) -> None:
        """At a quiet moment."""
        for pid, process in lives.pids.items():
            with contextlib.suppress(psutil.Error):
                found = psutil.Process(pid)
                self.last[pid] = (process, found.memory_info().rss, found.num_fds())
                self.first.setdefault(pid, self.last[pid])


def stop(stack: Stack, shm: set[str]) -> list[str]:
    """Drain and stop a server; what it leaves behind. `shm`: what was in /dev/shm before it."""
    broken = []
    children = psutil.Process(stack.process.pid).children(recursive=True)
    if status := stack.stop(signal.SIGTERM):
        broken.append(f"serve ended with status {status}")
    _, alive = psutil.wait_procs(children, timeout=10)
    broken += [f"{process} is left" for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    broken += [f"/dev/shm/{name} is left" for name in set(os.listdir("/dev/shm")) - shm]
    return broken + [f"{path.name} is left" for path in stack.run_dir.glob("*.sock")]


def toy_texts() -> Texts:
    """The texts of the toy model, each computed once."""
    from gpu_worker.model.load import load_model
    from gpu_worker.model.toy import Oracle
    from wire.model_files import find_model

    model = load_model(find_model("toy"))
    known: dict[str, list[int]] = {}

    def texts(submit: dict) -> list[int]:
        key = f"{submit['prompt']} {submit['sampling']} {submit['max_tokens']}"
        if key not in known:
            known[key] = Oracle(model, submit["prompt"]).text(submit["max_tokens"], Sampling(**submit["sampling"]))
        return known[key]

    return texts


def run(server: Server, seed: int, seconds: float) -> Outcome:
    """One run on a quiet server. Its history stays in the server's folder."""
    history = History(server.folder / f"history-{seed}.jsonl")
    try:
        asyncio.run(_run(server, seed, seconds, history))
    finally:
        history.close()
    outcome = Outcome(seed, check(history.events, server.texts))
    outcome.figures.update(_figures(history.events))
    return outcome


async def _run(server: Server, seed: int, seconds: float, history: History) -> None:
    stack, few = server.stack, server.model != "toy"
    lives = Lives(stack.process.pid)
    lives.history = history
    lives.look()
    nemesis = Nemesis(lives, history, stack.run_dir, server.failpoints)

    def asks(client: int):
        def of(number: int) -> plan.Ask | None:
            return plan.ask(seed, client, number, server.scale, few) if history.now < seconds else None

        return of

    numbers = range(plan.ZEROMQ_CLIENTS + plan.HTTP_CLIENTS)
    clients = [
        zeromq_client(stack.address, history, asks(n)) if n < plan.ZEROMQ_CLIENTS else http_client(stack.url, history, asks(n))
        for n in numbers
    ]
    try:
        async with asyncio.TaskGroup() as watchers:  # a run that nobody watches proves nothing
            watching = watchers.create_task(lives.watch())
            sampling = watchers.create_task(_sample(stack.address, history))
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client)
                await nemesis.run(plan.faults(seed, seconds), seconds)
                await nemesis.end()
            sampling.cancel()
            await quiet(stack, lives, history)
            server.look(lives)
            watching.cancel()
    finally:
        lives.close()


async def _sample(address: str, history: History) -> None:
    """The budget, again and again."""
    async with Client(address) as client:
        while True:
            with contextlib.suppress(TimeoutError, ConnectionError):
                status = await client.status(2.0)
                history.record("budget", budget=status.budget_bytes, held=status.held_bytes, used=status.used_bytes)
            await asyncio.sleep(SAMPLE_S)


async def quiet(stack: Stack, lives: Lives, history: History) -> None:
    """Wait until everybody is back and nobody has anything; write down what is left if that does not come."""
    until = time.monotonic() + QUIET_S
    left: dict[str, object] = {"status": None}
    async with Client(stack.address) as client, httpx.AsyncClient(base_url=stack.url, timeout=2.0) as http:
        while left and time.monotonic() < until:
            await asyncio.sleep(0.1)
            missing = [process for process in plan.PROCESSES if lives.pid_of(process) is None]
            try:
                left = {f"process {name}": "gone" for name in missing} or left_over(await client.status(2.0))
                if (health := (await http.get("/health")).status_code) != 200:
                    left["health"] = health
            except (TimeoutError, ConnectionError, httpx.HTTPError) as error:
                left = {"status": type(error).__name__}
    history.record("quiet", left=left)


def left_over(status: Status) -> dict[str, object]:
    """What is not as in a server that nobody uses."""
    alive = [worker for worker in status.workers if worker.alive]
    found: dict[str, object] = {"ready": status.ready or None, "queued": status.queued, "running": status.running}
    found |= {"parked": status.parked, "used bytes": status.used_bytes}
    found["seats"] = [slot.request_id for slot in status.slots if slot.state != "idle"]
    for worker in alive:
        cells = worker.cells
        found[f"{worker.name} cells"] = cells.active + cells.parking + cells.resuming
        found[f"{worker.name} pool"] = sum(structs.astuple(cells)) - worker.pool_cells
    wrong = {name: value for name, value in found.items() if name != "ready" and value}
    return wrong if status.ready and alive else wrong | {"ready": status.reason}


def _figures(events: list[dict]) -> Counter:
    """How much happened."""
    counted = Counter(event["event"] for event in events if event["event"] in ("submit", "parked", "resumed", "stopped"))
    counted["tokens"] = sum(len(event["tokens"]) for event in events if event["event"] == "tokens")
    for event in events:
        match event["event"]:
            case "end":
                counted[f"end {event['outcome']}"] += 1
            case "died":
                counted[f"died {event['process']}"] += 1
            case "failed_at":
                counted.update(f"failed at {name}" for name in event["names"])
            case "corrupted":
                counted["bits turned"] += event["bits"]
            case "fault":
                counted["fault"] += 1
                counted[f"fault {event['kind']}"] += 1
            case "parked" if event["mode"] == "recompute":
                counted["parked without image"] += 1
    return counted
