"""Runs the real thing for a test: `parkade serve` with all its processes, and clients that collect whole streams."""

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from parkade.api import event_lines
from router.client import Client
from wire.messages import Finished, Notice, Tokens

READY_TIMEOUT_S = 90
STREAM_TIMEOUT_S = 240


class Stack:
    """One running server. `with Stack(tmp_path, ctx=1024, park_ram="16MiB") as stack:` stops it at the end."""

    def __init__(self, run_dir: Path, environ: dict[str, str] | None = None, **settings: object) -> None:
        """`settings` are flags of `serve`; `environ` is added to the environment."""
        self.run_dir = run_dir
        flags = {"model": "smollm2", "port": 0, "run_dir": run_dir, **settings}
        command = [sys.executable, "-m", "parkade", "serve"]
        for name, value in flags.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        self._log_path = run_dir.with_name(run_dir.name + ".log")
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | (environ or {}), stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.url = self._wait_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        self.http = httpx.Client(base_url=self.url, timeout=STREAM_TIMEOUT_S)

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"ipc://{self.run_dir}/client.sock"

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Ends it; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise AssertionError(f"serve did not end; its log:\n{self.log}") from None
        return self.process.wait(10)

    def pid_of(self, module: str) -> int:
        """The process that runs `python -m module` now."""
        return self.processes(module)[0].pid

    def processes(self, module: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.cmdline()[1:] == ["-m", module] and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def kill(self, module: str, how: int = signal.SIGKILL) -> None:
        os.kill(self.pid_of(module), how)

    def kill_worker_at(self, tokens: int, killed: list[int]) -> Callable[["Answer"], None]:
        """For `on_tokens`: kills the worker once, when the answer has as many tokens; its pid goes to `killed`."""

        def look(answer: "Answer") -> None:
            if len(answer.ids) >= tokens and not killed:
                killed.append(self.pid_of("gpu_worker"))
                self.kill("gpu_worker")

        return look

    def metric(self, name: str, **labels: str) -> float:
        """One figure of /metrics; KeyError if it is not exported."""
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}" if labels else "")
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(wanted)

    def drafts(self) -> dict[int, tuple[int, int]]:
        """Position in a draft -> (tokens drafted there, tokens accepted), since the start."""
        text = self.http.get("/metrics").text
        found = re.findall(r'^parkade_(drafted|accepted)_tokens_total\{position="(\d+)"\} (\S+)$', text, re.MULTILINE)
        figures = {(name, int(position)): int(float(value)) for name, position, value in found}
        return {n: (value, figures.get(("accepted", n), 0)) for (name, n), value in figures.items() if name == "drafted"}

    def parks(self) -> dict[str, int]:
        """How cells were kept, and why, as "save asked" -> parks since the start."""
        found = re.findall(
            r'^parkade_parks_total\{mode="(\w+)",reason="(\w+)"\} (\S+)$', self.http.get("/metrics").text, re.MULTILINE
        )
        return {f"{mode} {reason}": int(float(value)) for mode, reason, value in found if float(value)}

    def slots(self) -> list[dict]:
        return self.http.get("/slots").json()

    def until(self, condition, what: str, timeout_s: float = 30.0) -> None:
        """Ask until `condition()` holds; every question waits for its answer."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}\n{self.log[-3000:]}"

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _wait_ready(self) -> str:
        line = self._lines.get(timeout=READY_TIMEOUT_S)
        assert line.startswith("ready http://"), f"serve said {line!r}; its log:\n{self.log}"
        return line.split()[1]


@dataclass
class Answer:
    """One stream as a client saw it."""

    status: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict = field(default_factory=dict)
    parkade: dict = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: dict | None = None
    done: bool = False

    def same_as(self, other: "Answer") -> bool:
        return (self.ids, self.text, self.finish_reason) == (other.ids, other.text, other.finish_reason)


async def stream(url: str, path: str = "/v1/completions", *, on_tokens=None, **body: object) -> Answer:
    """One streaming request, read to its end. `on_tokens(answer)` is called after each chunk with tokens; False hangs up."""
    answer = Answer()
    body = {
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": True, **body,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=STREAM_TIMEOUT_S) as client, client.stream("POST", url + path, json=body) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]
            return answer
        async for line in event_lines(response):
            if line.startswith(":"):
                answer.comments.append(line[1:].strip())
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = chunk["error"]
                continue
            _add(answer, chunk)
            if on_tokens is not None and on_tokens(answer) is False:
                return answer
    return answer


def _add(answer: Answer, chunk: dict) -> None:
    answer.usage = chunk.get("usage") or answer.usage
    answer.parkade = chunk.get("parkade") or answer.parkade
    for choice in chunk["choices"]:
        answer.ids += choice.get("token_ids") or []
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if logprobs := choice.get("logprobs"):
            answer.logprobs += logprobs.get("token_logprobs") or []


def together(*streams, timeout_s: float = STREAM_TIMEOUT_S) -> list[Answer]:
    """Run several streams at once, to their ends."""

    async def run() -> list[Answer]:
        return await asyncio.wait_for(asyncio.gather(*streams), timeout_s)

    return asyncio.run(run())


@dataclass
class Heard:
    """One stream as a ZeroMQ client heard it. `notices` are in order, `known[i]` the tokens that had come before notices[i]."""

    ids: list[int] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def parks(self) -> int:
        return sum(notice.event == "parked" for notice in self.notices)


async def hear(client: Client, prompt_ids: list[int], *, on_message=None, **options: object) -> Heard:
    """One request, read to its end. Several gathered from one client arrive in the order of the calls. `on_message(heard)` is
    called after each message."""
    heard = Heard()
    async for message in client.generate(prompt_ids, ignore_eos=True, **options):
        match message:
            case Tokens():
                heard.ids += message.tokens
            case Notice():
                heard.notices.append(message)
                heard.known.append(len(heard.ids))
            case Finished():
                heard.finished = message
        if on_message is not None:
            on_message(heard)
    return heard


def by_zeromq(stack: Stack, scenario, timeout_s: float = STREAM_TIMEOUT_S):
    """Run `scenario(client)`, a coroutine function, with a client of its own; what it returns."""

    async def run():
        async with Client(stack.address) as client:
            return await asyncio.wait_for(scenario(client), timeout_s)

    return asyncio.run(run())


def each(count: int, call):
    """An `on_tokens` that calls `call(answer)` whenever `count` more tokens have come; a chunk may bring several."""
    reached = [0]

    def on_tokens(answer: Answer) -> None:
        if len(answer.ids) >= reached[0] + count:
            reached[0] = len(answer.ids)
            call(answer)

    return on_tokens


TOPICS = ["a lighthouse keeper", "the tides of the sea", "a city at night", "an old clockmaker", "rivers and mountains", "bread"]


def prompt_ids(number: int, count: int) -> list[int]:
    """A prompt of exactly `count` tokens that every model knows, different from its neighbours from the first one on."""
    return [10 + (number * 7919 + position * 37) % 1900 for position in range(count)]


def prompt(number: int, words: int = 180) -> str:
    """A prompt of about 1.3 tokens a word, different from its neighbours from the first word on."""
    topic = TOPICS[number % len(TOPICS)]
    line = f"Story number {number} tells of {topic} and of what happened in the year {1800 + 7 * number}. "
    return (line * (1 + words // len(line.split())))[: words * 6]
