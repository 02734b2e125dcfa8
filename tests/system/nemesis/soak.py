"""`make soak`, `python -m tests.system.nemesis.soak --minutes 30 --seed N`: memory stays flat under load, parks and restarts.

One server, many clients that ask for one stream after the other without a pause, a pool and a budget that are far too small
for them. In the first half the worker is ended every `--restart-s` seconds, in the second half the host cache, by SIGKILL or
SIGTERM. So the host cache has one long life that sees many workers, then the worker one long life that sees many host caches;
router, HTTP adapter and `serve` live through all of it. flat.py says what is compared with what. Each stream is checked as it
ends and then forgotten. Samples go to a file in JSON Lines, which `--read` judges again. Exit status 1 if memory or descriptors
grew, a stream was not as promised, or something that should have happened did not.
"""

import argparse
import asyncio
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random

import msgspec
from msgspec import structs

from router.client import Client
from tests.system.nemesis import flat, plan
from tests.system.nemesis.checker import Texts, check_stream
from tests.system.nemesis.clients import http_client, zeromq_client
from tests.system.nemesis.faults import Lives, send
from tests.system.nemesis.history import History
from tests.system.nemesis.runner import quiet, stop, toy_texts
from tests.system.stack import Stack, hear
from wire.messages import Sampling

SETTINGS = {"ctx": 2048, "slots": 16, "park_mode": "save", "device": "cpu"}
PARK_RAM = {"toy": "1500KiB", "bard": "24MiB"}  # about half of the parks find room
SCALE = {"toy": 1.0, "bard": 0.15}  # of the lengths of texts
ZEROMQ_CLIENTS, HTTP_CLIENTS = 24, 6
SHAPES = {"toy": 60, "bard": 12}  # different prompts; their texts are known beforehand and take no more memory later
MOST_TOKENS = 500
WARM_SHARE = 0.1  # of the soak, after which a life counts
LOOK_S = 0.25
KEPT = 20  # broken promises that are told; the others are counted
RESTARTED = ("gpu_worker", "hostcache")  # in the first half, in the second
LIVING = ("client", "gpu_worker", "hostcache", "router", "router.openai", "serve")


class Restart(msgspec.Struct, frozen=True):
    """Of one process, `at_s` after the begin, by SIGKILL or SIGTERM."""

    at_s: float
    process: str
    signal: int


def restarts(seed: int, seconds: float, every_s: float) -> list[Restart]:
    """In order of time; none at the end of a half, so that the last life of each is no shorter than the others."""
    random = Random(f"restarts {seed}")
    half = seconds / 2
    return [
        Restart(begin + number * every_s, process, random.choice((signal.SIGKILL, signal.SIGTERM)))
        for begin, process in zip((0.0, half), RESTARTED, strict=True)
        for number in range(1, int(half / every_s))
    ]


def shape(which: int, scale: float) -> tuple[list[int], Sampling]:
    """Prompt number `which`, and how its text is drawn. One in four begins like the others of its kind."""
    random = Random(f"shape {which}")
    first = 0 if which % 4 == 3 else which * 7919
    length = max(8, int(random.randint(8, 300) * scale))
    prompt = [10 + (first + position * 37) % 1900 for position in range(length)] + [10 + which]
    return prompt, Sampling(temperature=0.9 if which % 5 == 4 else 0.0, seed=which)


def ask(seed: int, client: int, number: int, model: str) -> plan.Ask:
    """What a client asks for as its request `number`: as in the nemesis, parks and hang-ups included, with one of few prompts."""
    prompt, sampling = shape(Random(f"{seed} {client} {number}").randrange(SHAPES[model]), SCALE[model])
    return structs.replace(plan.ask(seed, client, number, SCALE[model], False), prompt=prompt, sampling=sampling)


class Sieve(History):
    """A history that keeps the events of a stream until its end, has them checked then and forgets them: bounded memory."""

    def __init__(self, texts: Texts) -> None:
        super().__init__()
        self.texts = texts
        self.figures: Counter[str] = Counter()
        self.broken: list[str] = []
        self.streams: dict[str, list[dict]] = {}
        self.first_at: float | None = None  # when tokens first came, since whoever set this to None

    def record(self, event: str, **fields: object) -> None:
        entry = {"t": self.now, "event": event, **fields}
        name = fields.get("id")
        if event == "tokens" and self.first_at is None:
            self.first_at = self.now
        match event:
            case "submit":
                self.streams[name] = [entry]
            case "end":
                self._ended(name, entry)
            case "born" | "died":
                self.figures[f"{event} {fields['process']}"] += 1
            case "quiet":
                for what, value in fields["left"].items():
                    self.wrong(f"nobody is served, and {what} is {value}")
            case "set_aside":
                self.figures["set aside by hand"] += fields["code"] == ""
            case _ if name in self.streams:
                self.streams[name].append(entry)
            case _:
                self.wrong(f"{name}: {event} after its last word")

    def wrong(self, what: str) -> None:
        """A promise is broken."""
        self.figures["broken promises"] += 1
        if len(self.broken) < KEPT:
            self.broken.append(f"{self.now} s: {what}")

    def _ended(self, name: str, entry: dict) -> None:
        if (events := self.streams.pop(name, None)) is None:
            self.wrong(f"{name}: a second last word")
            return
        events.append(entry)
        for what in check_stream(events, self.texts):
            self.wrong(what)
        self.figures[f"ended {entry['outcome']}"] += 1
        for event in events:
            if event["event"] == "tokens":
                self.figures["tokens"] += len(event["tokens"])
            elif event["event"] == "parked":
                self.figures[f"parks {event['mode']} {event['reason']}"] += 1


def texts_of(model: str, address: str) -> Texts:
    """The whole text of each shape. Only that of the toy model is known without asking."""
    wanted = [(*shape(which, SCALE[model]), max(4, int(MOST_TOKENS * SCALE[model]))) for which in range(SHAPES[model])]
    texts = from_oracle(wanted) if model == "toy" else asyncio.run(from_server(address, wanted))
    known = {repr(prompt): text for (prompt, _, _), text in zip(wanted, texts, strict=True)}
    return lambda submit: known[repr(submit["prompt"])]


def from_oracle(wanted: list[tuple[list[int], Sampling, int]]) -> list[list[int]]:
    """The texts of prompts with so many tokens each, computed here."""
    oracle = toy_texts()
    return [
        oracle({"prompt": prompt, "sampling": structs.asdict(sampling), "max_tokens": most}) for prompt, sampling, most in wanted
    ]


async def from_server(address: str, wanted: list[tuple[list[int], Sampling, int]]) -> list[list[int]]:
    """The texts of prompts with so many tokens each, heard one by one from the server, which nobody else uses yet."""
    async with Client(address) as client:
        return [
            (await hear(client, prompt, max_tokens=most, **structs.asdict(sampling))).ids for prompt, sampling, most in wanted
        ]


def resident_bytes(pid: int) -> tuple[int, int]:
    """All resident memory of a process, and the part of it that is shared memory: the arena's. OSError or LookupError if it has
    ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    figures = {line[0]: int(line[1]) << 10 for line in lines if line[0] in ("VmRSS:", "RssShmem:")}
    return figures["VmRSS:"], figures["RssShmem:"]


class Soak:
    """One soak of `seconds` on a running server; samples go to `file`."""

    def __init__(
        self, stack: Stack, model: str, seed: int, seconds: float, restart_s: float, sample_s: float, file: Path
    ) -> None:
        self.stack, self.model, self.seed, self.seconds, self.sample_s = stack, model, seed, seconds, sample_s
        self.restart_s, self.plan = restart_s, restarts(seed, seconds, restart_s)
        self.done: Counter[str] = Counter()  # restarts by process
        self.sieve = Sieve(texts_of(model, stack.address))
        self.born = {stack.process.pid: 0.0, os.getpid(): 0.0}
        self._file = file.open("w")
        self._write({"soak": model, "seed": seed, "seconds": seconds, "restart_s": restart_s, "sample_s": sample_s})

    async def run(self) -> None:
        """To its end, and until the server is quiet."""
        gc.freeze()  # the texts: what stays need not be looked through at each sample
        self.sieve.begin()
        lives = Lives(self.stack.process.pid)
        lives.history = self.sieve
        lives.look()
        try:
            async with asyncio.TaskGroup() as group:  # without samples there is no point in going on
                sampling = group.create_task(self._sample_on(lives))
                await self._work(lives)
                sampling.cancel()
            await quiet(self.stack, lives, self.sieve)
            await self._look_at_budget()
        finally:
            lives.close()
            self._file.close()
        for name in self.sieve.streams:
            self.sieve.wrong(f"{name}: no last word")
        for process in plan.PROCESSES:
            if (deaths := self.sieve.figures[f"died {process}"]) != self.done[process]:
                self.sieve.wrong(f"{process} died {deaths} times, and was ended {self.done[process]} times")

    async def _work(self, lives: Lives) -> None:
        """Clients and restarts, to the end of the last stream."""
        async with asyncio.TaskGroup() as group:
            for number in range(ZEROMQ_CLIENTS):
                group.create_task(zeromq_client(self.stack.address, self.sieve, self._asks(number)))
            for number in range(ZEROMQ_CLIENTS, ZEROMQ_CLIENTS + HTTP_CLIENTS):
                group.create_task(http_client(self.stack.url, self.sieve, self._asks(number)))
            for restart in self.plan:
                await asyncio.sleep(max(0.0, restart.at_s - self.sieve.now))
                end_s = self.seconds / (2 if restart.process == RESTARTED[0] else 1)
                if await self._served_for(self.restart_s / 2, end_s):
                    self._restart(lives, restart)

    def _asks(self, client: int):
        def of(number: int) -> plan.Ask | None:
            return ask(self.seed, client, number, self.model) if self.sieve.now < self.seconds else None

        return of

    async def _served_for(self, seconds: float, end_s: float) -> bool:
        """Until tokens have come for so long since the last restart: where starting is slow, nobody starves. False if that would
        be after `end_s`, when it is the next one's turn."""
        while self.sieve.first_at is None or self.sieve.now - self.sieve.first_at < seconds:
            if self.sieve.now >= end_s:
                return False
            await asyncio.sleep(LOOK_S)
        return self.sieve.now < end_s

    def _restart(self, lives: Lives, restart: Restart) -> None:
        lives.look()
        self.sieve.first_at = None
        if pid := lives.pid_of(restart.process):
            send(pid, restart.signal)
            self.done[restart.process] += 1
            self._write({"t": self.sieve.now, "restart": restart.process, "pid": pid, "signal": int(restart.signal)})

    async def _sample_on(self, lives: Lives) -> None:
        """For ever."""
        due = time.monotonic()
        while True:
            lives.look()
            gc.collect()  # of our own process, what it has not found yet is no growth
            pids = {**lives.pids, self.stack.process.pid: "serve", os.getpid(): "client"}
            for pid, process in pids.items():
                self._sample(process, pid)
            await self._look_at_budget()
            due += self.sample_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _sample(self, process: str, pid: int) -> None:
        now = self.sieve.now
        age_s = round(now - self.born.setdefault(pid, now), 4)
        try:
            rss, shmem = resident_bytes(pid)
            fds = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, LookupError):
            return  # it has just ended
        self._write(asdict(flat.Sample(now, process, pid, age_s, rss, shmem, fds)))

    async def _look_at_budget(self) -> None:
        try:
            async with Client(self.stack.address) as client:
                status = await client.status(5.0)
        except (TimeoutError, ConnectionError):
            self.sieve.wrong("the router does not tell its state")
            return
        if not status.used_bytes <= status.held_bytes <= status.budget_bytes:
            self.sieve.wrong(f"budget {status.budget_bytes} bytes, held {status.held_bytes}, used {status.used_bytes}")

    def _write(self, entry: dict) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def judged(file: Path) -> tuple[list[flat.Verdict], list[str]]:
    """What the samples of a file say, and what they leave open."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    samples = [flat.Sample(**entry) for entry in entries if "rss" in entry]
    verdicts = flat.judge(samples, WARM_SHARE * entries[0]["seconds"], entries[0]["restart_s"])
    wanted = [(process, what) for process in LIVING for what in ("life", "fds")]
    return verdicts, flat.unjudged(verdicts, [*wanted, *((process, "lives") for process in RESTARTED)])


def not_done(figures: Counter[str]) -> list[str]:
    """What a soak shows nothing without, and that did not happen in it."""
    parks = Counter()
    for name, count in figures.items():
        if name.startswith("parks "):
            parks[" ".join(name.split()[1:])] += count
    wanted = {"a park that was saved": sum(count for name, count in parks.items() if name.startswith("save"))}
    wanted |= {"a denial": parks["recompute denied_full"], "a stream to its end": figures["ended length"]}
    wanted |= {f"a restart of {process}": figures[f"died {process}"] for process in RESTARTED}
    return [f"not once: {what}" for what, count in wanted.items() if not count]


def report(file: Path, broken: list[str]) -> int:
    """Print the table and the verdict; the exit status."""
    verdicts, left_open = judged(file)
    print("\n".join(flat.table(verdicts)))
    wrong = [*broken, *left_open, *(f"{v.process} {v.what}: {v.why}" for v in verdicts if v.why)]
    print("\n".join(wrong) or f"flat within {flat.GROWTH:.0%}, and all promises kept")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.nemesis.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="toy", choices=("toy", "bard"))
    parser.add_argument("--restart-s", type=float, help="between two restarts (default: 30, or less in a short soak)")
    parser.add_argument("--sample-s", type=float, default=2.0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server, e.g. ctx=4096")
    parser.add_argument("--out", type=Path, default=Path("build/soak.jsonl"), help="file for the samples")
    parser.add_argument("--read", type=Path, metavar="FILE", help="judge the samples of an earlier soak instead")
    options = parser.parse_args()
    if options.read:
        return report(options.read, [])
    seconds = options.minutes * 60
    restart_s = options.restart_s or min(30.0, seconds / 2 / (flat.LEAST + 2))
    settings: dict[str, object] = {**SETTINGS, "model": options.model, "park_ram": PARK_RAM[options.model]}
    settings |= dict(pair.split("=", 1) for pair in options.set)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folder, shm = Path(tempfile.mkdtemp(prefix="soak-")), set(os.listdir("/dev/shm"))
    print(f"soak of {options.minutes:g} minutes, seed {options.seed}, {options.model}; samples go to {options.out}", flush=True)
    stack = Stack(folder / "run", **settings)
    try:
        soak = Soak(stack, options.model, options.seed, seconds, restart_s, options.sample_s, options.out)
        asyncio.run(soak.run())
    finally:
        left = stop(stack, shm)
    print(", ".join(f"{name} {count}" for name, count in sorted(soak.sieve.figures.items())))
    status = report(options.out, [*soak.sieve.broken, *left, *not_done(soak.sieve.figures)])
    print(f"samples: {options.out}" + (f", log: {folder}/run.log" if status else ""))
    if not status:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
