"""A worker on the card in this process, under pressure: throughput, parks, and what neighbours notice of a park."""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import zmq
from msgspec import structs

from gpu_worker.__main__ import PARKING_SLOTS, limits, step_budget
from gpu_worker.engine import Engine
from gpu_worker.on_card import OpenCard, engine_of
from gpu_worker.parking import Parking
from gpu_worker.policy.scheduler import Scheduler
from gpu_worker.worker import Worker
from tools.gpu_check.figures import Figure
from tools.gpu_check.random_model import RandomSource
from wire import messages, sockets
from wire.codec import Decoder, frames, unbundle
from wire.config import Config
from wire.messages import Generate, Hello, Sampling, Submit
from wire.model_spec import ModelSpec

GAP_WANTED = 1.5  # of the usual gap, the worst one during a park of a neighbour
LINK_MS_OF_8K = 7.6  # 400 MiB at 55 GB/s
HOST_CACHE_S = 10.0
PING_S = 0.25
DRAFTS = 2


class Local:
    """In place of the router's socket: hands requests to a Worker and hears what it says. `tick` is asked before each step."""

    def __init__(self, tick: Callable[["Local"], None]) -> None:
        self._tick = tick
        self._out: deque[list[bytes]] = deque()
        self._pinged = 0.0
        self._decoder: Decoder[messages.WorkerToRouter] = Decoder(messages.WorkerToRouter)
        self.tokens: dict[str, list[float]] = defaultdict(list)  # when each token came
        self.finished: dict[str, str] = {}  # reason
        self.notices: list[tuple[float, messages.Notice]] = []

    def say(self, message: messages.RouterToWorker) -> None:
        self._out.append(frames(message))

    def ask(self, request_id: str, prompt: int, tokens: int, first: int = 5) -> None:
        """A prompt of `prompt` tokens, of its own from the first one on."""
        ids = [first + (len(self.tokens) * 131 + at * 37) % 400 for at in range(prompt)]
        self.tokens[request_id] = []
        generate = Generate(request_id, ids, max_tokens=tokens, ignore_eos=True, sampling=Sampling(temperature=0.0, seed=1))
        self.say(Submit(generate, 1))

    # what a Worker does with a socket
    def recv_multipart(self, _flags: int) -> list[bytes]:
        if (now := time.monotonic()) > self._pinged + PING_S:
            self._pinged = now
            self.say(messages.Ping())
        if not self._out:
            raise zmq.Again
        return self._out.popleft()

    def send_multipart(self, parts: tuple[bytes, bytes], _flags: int) -> None:
        now = time.perf_counter()
        for message in map(self._decoder.unpack, unbundle(parts)):
            match message:
                case messages.Tokens():
                    self.tokens[message.request_id] += [now] * len(message.tokens)
                case messages.Notice():
                    self.notices.append((now, message))
                case messages.Finished():
                    self.finished[message.request_id] = message.reason
        self._tick(self)

    def poll(self, *_: object) -> int:
        return 0

    def close(self) -> None:
        pass


class Serving:
    """An engine of a random model, a host cache beside it, and one worker after another on both."""

    def __init__(self, opened: OpenCard, spec: ModelSpec, config: Config) -> None:
        self._opened, self._spec, self._config = opened, spec, config
        self._source = RandomSource(spec)
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        environ = {**os.environ, "PARKADE_RUN_DIR": self._folder.name, "PARKADE_PARK_RAM": config.park_ram}
        self._hostcache = subprocess.Popen([sys.executable, "-m", "hostcache"], env=environ, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        self._hostcache.terminate()
        self._hostcache.wait(10)
        self._folder.cleanup()

    def engine(self, ctx: int, exact: str = "off") -> Engine:
        """A new one, with a pool of `ctx` cells."""
        config = structs.replace(self._config, ctx=ctx, exact=exact)
        slots = config.slots + PARKING_SLOTS if self._spec.delta else 0
        return engine_of(self._opened, config, self._spec, self._source, DRAFTS, slots, step_budget(config, DRAFTS))

    def run(
        self,
        engine: Engine,
        cells: int,
        tick: Callable[[Local], None],
        start: Callable[[Local], None],
        policy: str = "ondemand",
    ) -> Local:
        """Serve what `start` and `tick` ask for in `cells` of the engine's pool, until everything has ended and `tick` has said
        Drain."""
        config = structs.replace(self._config, ctx=cells, policy=policy)
        hello = Hello(
            "check", os.getpid(), "random", engine.device, engine.dtype, cells, engine.kv.block_size, config.slots,
            min(cells, self._spec.max_context), engine.exact, pool_bytes=engine.kv.block_bytes * cells // engine.kv.block_size,
            state_bytes=engine.kv.state_bytes, state_slots=config.slots + PARKING_SLOTS if self._spec.delta else 0, draft=DRAFTS,
            reuse=False, vocab=self._spec.vocab,
        )  # fmt: skip
        local = Local(tick)
        path = sockets.hostcache_path(self._folder.name)
        parking = Parking(engine.kv, path, "check", time.monotonic, engine.copies("check"))
        _until(lambda: parking.poll(time.monotonic()) is not None and parking.connected, "the host cache answers")
        worker = Worker(hello, local, Scheduler(limits(config, NoTokenizer, self._spec, hello)), engine.runner, parking)
        start(local)
        worker.run()
        return local


class NoTokenizer:
    """In place of a model's files: no token ends a text."""

    eos_token_ids = ()


def pressure(serving: Serving, engine: Engine, ctx: int, seconds: float, prompt: int, answer: int) -> Iterator[Figure]:
    """Four chats that always run, each asking again when it is answered, in a pool that holds about two of them whole."""
    names, ends = itertools.count(), time.perf_counter() + seconds
    told = []

    def tick(local: Local) -> None:
        if time.perf_counter() < ends:
            while len(local.tokens) - len(local.finished) < 4:
                local.ask(f"chat-{next(names)}", prompt, answer)
        elif not told:
            told.append(True)
            for name in set(local.tokens) - set(local.finished):
                local.say(messages.Cancel(name))
            local.say(messages.Drain())

    started = time.perf_counter()
    local = serving.run(engine, ctx, tick, tick)
    took = time.perf_counter() - started
    count = sum(map(len, local.tokens.values()))
    parks = sum(notice.event == "parked" for _, notice in local.notices)
    failed = [name for name, reason in local.finished.items() if reason == "error"]
    yield Figure(f"4 chats in {ctx} cells", f"{count / took:.0f} tokens/s, {parks} parks", data=count / took)
    yield Figure(f"4 chats in {ctx} cells, streams that failed", str(len(failed)), "0", not failed)


def stalls(serving: Serving, engine: Engine, cells: int, tokens: int) -> Iterator[Figure]:
    """The gaps between three streams' tokens: alone with a long neighbour, and while that is parked and resumed by hand."""
    asked: list[float] = []
    told: list[bool] = []

    def start(local: Local) -> None:
        local.ask("long", cells, 100_000)
        for index in range(3):
            local.ask(f"short-{index}", 64, 3 * tokens)

    def tick(local: Local) -> None:
        shorts = [len(local.tokens[f"short-{index}"]) for index in range(3)]
        parked = sum(notice.event == "parked" for _, notice in local.notices)
        back = len(local.notices) - parked
        if local.tokens["long"] and min(shorts) > tokens + tokens * len(asked) // 2 and len(asked) < 4:
            asked.append(time.perf_counter())
            local.say(messages.Park("long") if parked == back else messages.Resume("long"))
        if not told and all(f"short-{index}" in local.finished for index in range(3)):
            told.append(True)
            local.say(messages.Cancel("long"))
            local.say(messages.Drain())

    local = serving.run(engine, engine.kv.num_blocks * engine.kv.block_size, tick, start)
    first = local.tokens["long"][0] if local.tokens["long"] else 0.0
    usual, during = [], []
    for name in ("short-0", "short-1", "short-2"):
        times = local.tokens[name]
        for before, after in itertools.pairwise(times):
            if before == after or before < first:
                continue  # tokens of one step; or the long prompt is still computed
            near = any(before - 0.05 <= at <= after + 0.05 for at in asked)
            (during if near else usual).append(1000 * (after - before))
    if not usual or not during:
        yield Figure("worst gap of neighbours during a park", "not seen", ok=False)
        return
    median, worst = statistics.median(usual), max(during)
    wanted = f"under {GAP_WANTED:g} times the usual gap"
    yield Figure("gap between tokens, usual", f"{median:.2f} ms", data=median)
    text = f"{worst:.2f} ms, {worst / median:.2f} times"
    yield Figure("worst gap of neighbours during a park", text, wanted, worst < GAP_WANTED * median, worst)
    pauses: dict[str, list[float]] = {"parked": [], "resumed": []}
    for at, (when, notice) in zip(asked, local.notices, strict=False):
        pauses[notice.event].append(1000 * (when - at))
    for event, found in pauses.items():
        if found:
            best = min(found)
            wanted = f"{LINK_MS_OF_8K} ms of link time for 8k" if event == "parked" else ""
            yield Figure(f"{cells} tokens {event}, from the asking to the notice", f"{best:.1f} ms", wanted, data=best)


def idle_cost(serving: Serving, engine: Engine, tokens: int) -> Iterator[Figure]:
    """One stream that never needs a park, with the default policy and with none: the ratio of their speeds, three pairs."""
    rates: dict[str, list[float]] = {"ondemand": [], "off": []}
    for policy in ("ondemand", "off") * 3:
        told: list[bool] = []

        def tick(local: Local, told: list[bool] = told) -> None:
            if local.finished and not told:
                told.append(True)
                local.say(messages.Drain())

        local = serving.run(engine, engine.kv.num_blocks * 16, tick, lambda local: local.ask("one", 64, tokens), policy)
        times = local.tokens["one"]
        rates[policy].append((len(times) - 1) / (times[-1] - times[0]))
    ratios = [with_parks / without for with_parks, without in zip(rates["ondemand"], rates["off"])]
    yield Figure("one stream", f"{statistics.median(rates['ondemand']):.0f} tokens/s", data=statistics.median(rates["ondemand"]))
    text = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    yield Figure("its speed with parking, of that without", text, "0.99 or more", statistics.median(ratios) >= 0.99)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HOST_CACHE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"still not: {what}")
