"""The whole server with many streams at once while clients come and go: all end as promised, and nothing is left of them.

Residents keep as many streams as wanted in the air. Meanwhile visitors come, some at a time, and read to the end, cancel, park,
hang up with or without a word, or stop reading; over ZeroMQ and over HTTP. The checker of the nemesis compares each stream with
the oracle. The first rounds warm up; after each later one memory, descriptors, leases and cells are as after them.
"""

import asyncio
import os
import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from random import Random

import httpx
import pytest
import zmq.asyncio
from msgspec import structs

from router.client import Client, generate_message
from tests.system.nemesis import plan
from tests.system.nemesis.checker import check
from tests.system.nemesis.clients import END_S, TLS, http_stream, submitted, zeromq_stream
from tests.system.nemesis.faults import Lives
from tests.system.nemesis.history import History
from tests.system.nemesis.runner import quiet, toy_texts
from tests.system.nemesis.soak import resident_bytes
from tests.system.stack import STREAM_TIMEOUT_S, Stack
from wire.codec import frames
from wire.messages import Finished, Notice, Sampling, Tokens
from wire.sockets import dealer_socket

AT_ONCE = 24  # visitors
TOKENS = 64  # of a stream, at least; at most twice as many
LEAVE_AT = 10
STUCK_TOKENS = 3500  # with LOGPROBS far more than the router sends to who does not read
LOGPROBS = 20
LOOK_S, FIRST_LOOK_S = 0.1, 0.05
GROWTH_BYTES = 8 << 20  # what the allocators of a process may keep more; the soak measures finer
KINDS = ("whole", "cancel", "vanish", "hang up", "http whole", "park", "http hang up", "whole", "cancel", "hang up")
TRIES = 5  # of an HTTP client that is refused: the router of a very busy machine may not answer the adapter in time
STUCK_EVERY = 20  # one visitor in so many stops reading


@dataclass(frozen=True)
class Size:
    """Of a round: so many streams of residents over ZeroMQ, each client with `each`, one more in twenty over HTTP; so many
    visitors. The pool has `ctx` cells."""

    streams: int
    each: int
    visitors: int
    ctx: int

    @property
    def slots(self) -> int:
        return self.streams + self.by_http + AT_ONCE + self.visitors // STUCK_EVERY

    @property
    def by_http(self) -> int:
        return self.streams // 20


class Round:
    """One round on a running server."""

    def __init__(self, stack: Stack, size: Size, number: int) -> None:
        self.stack, self.size, self.number = stack, size, number
        self.history = History()
        self.full = asyncio.Event()  # as many streams as wanted are there at once
        self.running: set[str] = set()  # as the router last said
        self.gone = 0  # visitors that do not get stuck
        self.news = asyncio.Condition()  # of `running`, `there` and `gone`
        self.there = self.most = 0  # streams at once: as the router last said, and at most

    async def run(self) -> None:
        """To its end, and until nobody has anything."""
        lives = Lives(self.stack.process.pid)
        try:
            lives.look()
            async with Client(self.stack.address) as client, asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(client))
                await self._everybody()
                watching.cancel()
            await quiet(self.stack, lives, self.history)
        finally:
            lives.close()

    async def _everybody(self) -> None:
        """Residents, and visitors once all of those are there."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._residents())
            async with asyncio.timeout(END_S):
                await self.full.wait()
            group.create_task(self._visitors())

    async def _watch(self, client: Client) -> None:
        """The router's state, until cancelled."""
        while True:
            status = await client.status(END_S)
            self.history.record("budget", budget=status.budget_bytes, held=status.held_bytes, used=status.used_bytes)
            self.there = status.queued + status.running + status.parked
            self.most = max(self.most, self.there)
            if self.most >= self.size.streams:
                self.full.set()
            async with self.news:
                self.running = {slot.request_id for slot in status.slots if slot.state != "parked"}
                self.news.notify_all()
            await asyncio.sleep(LOOK_S if self.full.is_set() else FIRST_LOOK_S)

    def ask(self, kind: str, number: int, **more: object) -> plan.Ask:
        random = Random(f"{kind} {self.number} {number}")
        prompt = [random.randrange(10, 1900) for _ in range(random.randint(4, 24))]
        sampling = Sampling(temperature=0.9 if number % 10 == 9 else 0.0, seed=number)
        fields = {"max_tokens": random.randint(TOKENS, 2 * TOKENS), "sampling": sampling} | more
        return plan.Ask(f"{kind} {self.number} {number}", prompt, **fields)

    async def _residents(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.size.by_http):  # first: over HTTP one is refused if the router does not answer in 1.8 s
                group.create_task(self._by_http(self.ask("http resident", number, max_tokens=8 * TOKENS)))
            async with asyncio.timeout(END_S), self.news:
                await self.news.wait_for(lambda: self.there >= self.size.by_http // 2)
            for first in range(0, self.size.streams, self.size.each):
                group.create_task(self._resident(range(first, min(first + self.size.each, self.size.streams))))

    async def _resident(self, numbers: range) -> None:
        async with Client(self.stack.address) as client, asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(zeromq_stream(client, self.history, self.ask("resident", number)))

    async def _visitors(self) -> None:
        seats = asyncio.Semaphore(AT_ONCE)
        kinds = cycle(KINDS)
        async with asyncio.TaskGroup() as group:
            for number in range(self.size.visitors):
                if number % STUCK_EVERY == 0:
                    group.create_task(self._stuck(number))
                else:
                    await seats.acquire()
                    group.create_task(self._visit(next(kinds), number)).add_done_callback(lambda _: seats.release())

    async def _visit(self, kind: str, number: int) -> None:
        await self._visit_as(kind, number)
        async with self.news:
            self.gone += 1
            self.news.notify_all()

    async def _visit_as(self, kind: str, number: int) -> None:
        ask = self.ask(kind, number, priority=-1)
        match kind:
            case "hang up":
                return await self._hang_up(ask)
            case "http whole":
                return await self._by_http(ask)
            case "http hang up":
                return await self._by_http(structs.replace(ask, leave_at=LEAVE_AT, leave_how="vanish"))
            case "park":
                ask = structs.replace(ask, park_at=LEAVE_AT, park_s=0.2)
            case "cancel" | "vanish":
                ask = structs.replace(ask, leave_at=LEAVE_AT, leave_how=kind)
        async with Client(self.stack.address) as client:
            await zeromq_stream(client, self.history, ask)

    async def _by_http(self, ask: plan.Ask) -> None:
        """Who is refused asks again, a few times. Only the last try is in the history."""
        async with httpx.AsyncClient(base_url=self.stack.url, timeout=END_S, verify=TLS) as client:
            for _ in range(TRIES):
                heard = History()
                submitted(heard, ask, "http")
                await http_stream(client, heard, ask)
                if heard.events[-1].get("code") != "503":
                    break
        for event in heard.events:
            self.history.record(**{name: value for name, value in event.items() if name != "t"})

    async def _hang_up(self, ask: plan.Ask) -> None:
        """Without a word, in the middle."""
        submitted(self.history, ask, "zeromq")
        with closing(dealer_socket(zmq.asyncio.Context.instance(), self.stack.address)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            await socket.send_multipart(frames(generate_message(ask.prompt, ask.id, {"max_tokens": 10**6, "ignore_eos": True})))
            for _ in range(LEAVE_AT):
                async with asyncio.timeout(END_S):
                    await socket.recv_multipart()
        self.history.record("leave", id=ask.id, how="vanish")
        self.history.record("end", id=ask.id, outcome="left")

    async def _stuck(self, number: int) -> None:
        """Reads a little and stops reading until some others have gone and its stream stands still. Then it reads on, or goes."""
        until_gone = min(self.gone + STUCK_EVERY, self.size.visitors * (STUCK_EVERY - 1) // STUCK_EVERY)
        sampling = Sampling(temperature=0.0, seed=number, logprobs=LOGPROBS)
        ask = self.ask("stuck", number, priority=-1, max_tokens=STUCK_TOKENS, sampling=sampling)
        submitted(self.history, ask, "zeromq")
        async with Client(self.stack.address) as client:
            options = structs.asdict(sampling) | {"max_tokens": ask.max_tokens, "ignore_eos": True, "priority": -1}
            stream = client.submit(generate_message(ask.prompt, ask.id, options))
            stopped = False
            async for message in stream:
                match message:
                    case Tokens(offset=offset, tokens=tokens):
                        self.history.record("tokens", id=ask.id, offset=offset, tokens=tokens)
                        if not stopped:
                            async with asyncio.timeout(END_S), self.news:
                                await self.news.wait_for(lambda: self.gone >= until_gone and ask.id not in self.running)
                            stopped = True
                        elif number % (2 * STUCK_EVERY):
                            break
                    case Notice(event=event, kind=kind, mode=mode, reason=reason):
                        self.history.record(event, id=ask.id, kind=kind, mode=mode, reason=reason)
                    case Finished(reason=reason, usage=usage):
                        self.history.record("end", id=ask.id, outcome=reason, tokens=usage.completion_tokens)
                        return
        self.history.record("leave", id=ask.id, how="vanish")
        self.history.record("end", id=ask.id, outcome="left")


def books(stack: Stack) -> dict[str, float]:
    """Of a server that nobody uses: what must be the same whenever that is so."""
    text = stack.http.get("/metrics").text
    figures = {name: float(value) for name, value in re.findall(r"^parkade_(\S+) (\S+)$", text, re.M)}
    cells = {name: value for name, value in figures.items() if name.startswith("kv_cells")}
    ended = sum(value for name, value in figures.items() if name.startswith("requests_finished_total"))
    can_be_had = sum(cells[f'kv_cells{{state="{state}"}}'] for state in ("free", "reusable"))
    return {
        "cells": sum(cells.values()),
        "cells taken": sum(cells.values()) - can_be_had,
        "accepted, not ended": figures["requests_accepted_total"] - ended,
        **{name: figures[name] for name in ("requests_running", "requests_queued", "requests_preempted", "workers_lost_total")},
        **{name: figures[f"hostcache_{name}"] for name in ("used_bytes", "held_bytes", "budget_bytes")},
    }


def descriptors(stack: Stack) -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids(stack).items()}


def pids(stack: Stack) -> dict[str, int]:
    return {name: stack.pid_of(name) for name in plan.PROCESSES} | {"serve": stack.process.pid}


def none_more(stack: Stack, fds: dict[str, int]) -> bool:
    return all(count <= fds[name] for name, count in descriptors(stack).items())


def resident(stack: Stack) -> dict[str, int]:
    return {name: resident_bytes(pid)[0] for name, pid in pids(stack).items()}


def churn(stack: Stack, size: Size, warm_up: int, rounds: int) -> None:
    """So many rounds to warm up, and `rounds` that leave nothing."""
    texts, seen = toy_texts(), []
    at_rest, fds, memory = {}, {}, {}
    for number in range(warm_up + rounds):
        work = Round(stack, size, number)
        asyncio.run(asyncio.wait_for(work.run(), STREAM_TIMEOUT_S))
        assert check(work.history.events, texts) == []
        assert work.most >= size.streams
        seen += work.history.events
        stack.until(lambda: books(stack)["held_bytes"] == 0, "what was held is given back")
        if number < warm_up:
            at_rest, fds, memory = books(stack), descriptors(stack), resident(stack)
        else:
            assert books(stack) == at_rest
            stack.until(partial(none_more, stack, fds), f"descriptors as after the warm-up: {fds}")
            grown = {name: nbytes - memory[name] for name, nbytes in resident(stack).items()}
            assert {name: nbytes for name, nbytes in grown.items() if nbytes > GROWTH_BYTES} == {}, f"of {memory}"
    assert {"cells taken": 0, "accepted, not ended": 0, "used_bytes": 0}.items() <= at_rest.items()
    parks = Counter(event["kind"] for event in seen if event["event"] == "parked")
    assert parks["pressure"] and parks["explicit"]
    assert re.search(r"parked stuck \d+ \d+ \(explicit\)", stack.log), "nobody was parked for not reading"


SMALL = Size(streams=150, each=15, visitors=40, ctx=4096)
LARGE = Size(streams=1000, each=25, visitors=200, ctx=16384)


@pytest.mark.parametrize(
    ("size", "park_ram", "rounds"),
    [
        pytest.param(SMALL, "2MiB", 1, id="150 streams"),
        pytest.param(LARGE, "16MiB", 2, id="1000 streams", marks=pytest.mark.long),
    ],
)
def test_clients_that_come_and_go_leave_nothing(tmp_path, size, park_ram, rounds):
    settings = {"ctx": size.ctx, "slots": size.slots, "park_ram": park_ram, "park_mode": "save", "max_queued": 2000}
    with Stack(tmp_path / "run", model="toy", **settings) as stack:
        churn(stack, size, warm_up=rounds, rounds=rounds)
