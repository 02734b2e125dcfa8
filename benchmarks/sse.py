"""SSE chunks a second through the HTTP adapter, and what a chunk costs adapter and router in processor time.

`python -m benchmarks.sse`. The router and the adapter are real processes; the worker is scripted and streams as fast as it is
taken; the readers are one process with raw sockets that only counts. On few cores all of them share the cores, so the rate is a
lower bound. An answer's messages fit the window of its stream: what waits for credit would come as fewer, larger chunks.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil

from benchmarks.measures import cpu_seconds, spread
from benchmarks.router import scripted_worker
from benchmarks.server import free_port
from parkade.supervisor import die_with

EVENT = b"data: "
TOKENS = 600  # of an answer: some 40 KiB of messages of a window of 64
OTHER_EVENTS = 3  # of an answer: its role, its finish reason, [DONE]
READ_EVERY_S = 0.003  # the readers take what has come so far: a system call for many chunks costs them little
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0


@dataclass
class Run:
    """One measurement. Processor seconds are of all threads, the kernel's share of their system calls counted in."""

    chunks: int
    answers: int
    seconds: float
    adapter_s: float
    router_s: float
    reader_s: float

    @property
    def rate(self) -> float:
        return self.chunks / self.seconds


def request(port: int, tokens: int) -> bytes:
    """A chat whose answer has so many tokens, on a connection of its own."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode() + b"\r\n\r\n" + body


def readers(orders: Connection, port: int) -> None:
    """For each order (streams at once, answers, tokens of each): (chunks, seconds, own processor seconds)."""
    while True:
        streams, answers, tokens = orders.recv()
        before, start = time.process_time(), time.perf_counter()
        chunks = read_answers(port, streams, answers, tokens)
        orders.send((chunks, time.perf_counter() - start, time.process_time() - before))


@dataclass
class Reading:
    """What has come of an answer: its events so far, and the last bytes, in which one may begin."""

    events: int = 0
    tail: bytes = b""

    def take(self, data: bytes) -> None:
        seen = self.tail + data
        self.events += seen.count(EVENT)
        self.tail = seen[-len(EVENT) + 1 :]


def read_answers(port: int, streams: int, answers: int, tokens: int) -> int:
    """Read so many answers, `streams` of them at a time; how many events came. Who is refused asks again: that happens where the
    machine is so busy that the router does not answer the adapter in time."""
    words, chunks, to_ask, refused = request(port, tokens), 0, answers, 0
    with selectors.DefaultSelector() as selector:
        while to_ask or selector.get_map():
            while to_ask and len(selector.get_map()) < streams:
                sock = socket.create_connection(("127.0.0.1", port))
                sock.sendall(words)
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, Reading())
                to_ask -= 1
            for key, _ in selector.select():
                if data := key.fileobj.recv(1 << 20):
                    key.data.take(data)
                    continue
                selector.unregister(key.fileobj)
                key.fileobj.close()
                chunks += key.data.events
                if not key.data.events:
                    to_ask, refused = to_ask + 1, refused + 1
                    if refused > answers:
                        raise SystemExit(f"{refused} answers without an event")
            time.sleep(READ_EVERY_S)
    return chunks


@dataclass
class Bench:
    """The processes, and the way to order a measurement."""

    adapter: psutil.Process
    router: psutil.Process
    orders: Connection
    run_dir: str
    port: int

    def measure(self, streams: int, chunks: int, tokens: int = TOKENS) -> Run:
        """About so many chunks of answers of so many tokens, `streams` at a time."""
        answers = max(streams, chunks // tokens)
        before = [cpu_seconds(process.pid) for process in (self.adapter, self.router)]
        self.orders.send((streams, answers, tokens))
        if not self.orders.poll(ANSWER_TIMEOUT_S):
            raise SystemExit("the answers do not come")
        seen, seconds, reader_s = self.orders.recv()
        adapter_s, router_s = (
            cpu_seconds(process.pid) - former for process, former in zip((self.adapter, self.router), before, strict=True)
        )
        return Run(seen, answers, seconds, adapter_s, router_s, reader_s)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """Router, adapter, worker and readers until the block ends."""
    with tempfile.TemporaryDirectory(prefix="parkade-") as run_dir, contextlib.ExitStack() as stack:
        port = free_port()
        started = []
        for module, flags in (("router", []), ("router.openai", ["--port", str(port)])):
            command = [sys.executable, "-m", module, "--run-dir", run_dir, *flags]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=die_with(os.getpid()))
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            started.append(psutil.Process(process.pid))
        ours, theirs = multiprocessing.Pipe()
        wait_for(lambda: Path(run_dir, "worker.sock").exists(), "the router")
        for target, args in ((scripted_worker, (run_dir, 1)), (readers, (theirs, port))):
            helper = multiprocessing.Process(target=target, args=args, daemon=True)
            helper.start()
            stack.callback(helper.kill)
        wait_for(lambda: is_healthy(port), "the adapter")
        yield Bench(started[1], started[0], ours, run_dir, port)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it holds; SystemExit if that takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} does not start")
        time.sleep(0.05)


def is_healthy(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=60_000, help="of a measurement")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 100], help="at a time")
    args = parser.parse_args()
    with bench() as running:
        running.measure(4, 5_000)  # touches every page of code and memory once
        runs: dict[int, list[Run]] = {streams: [] for streams in args.streams}
        for _ in range(args.rounds):
            for streams in args.streams:
                runs[streams].append(running.measure(streams, args.chunks))
    names = ("adapter", "router", "reader")
    columns = " | ".join(f"{name + ' us/chunk':>20}" for name in names)
    print(f"{'streams':>8} | {'chunks/s':>25} | {columns} | one token each")
    for streams, some in runs.items():
        whole = sum(run.chunks for run in some) / sum(run.answers * (TOKENS + OTHER_EVENTS) for run in some)
        each = [[1e6 * getattr(run, name + "_s") / run.chunks for run in some] for name in names]
        columns = " | ".join(f"{spread(values, 1):>20}" for values in each)
        print(f"{streams:>8} | {spread([run.rate for run in some]):>25} | {columns} | {100 * whole:.0f} %")


if __name__ == "__main__":
    main()
