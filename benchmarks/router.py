"""Tokens a second through the router and the ZeroMQ client, and what each process pays for one, with a scripted worker.

`python -m benchmarks.router`. Like a real worker's, each step of the scripted one is a token of every stream, told together.
Worker and client are processes of their own; on few cores all three share them, so the rate is a lower bound.
"""

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
import zmq

from benchmarks.measures import cpu_seconds, spread
from router.client import Client
from wire.codec import Decoder, bundles, frames, pack
from wire.messages import (
    PROTOCOL,
    Counters,
    Finished,
    Hello,
    Load,
    Notice,
    Ping,
    PoolCells,
    RouterToWorker,
    Submit,
    Tokens,
    Usage,
)
from wire.sockets import client_address, dealer_socket, worker_address

CELLS = 1 << 20


def scripted_worker(run_dir: str, tokens_each: int) -> None:
    """Streams everything it is asked for, `tokens_each` of each stream a step, as fast as the router takes it."""
    socket = dealer_socket(zmq.Context(), worker_address(run_dir), b"bench-1-a")
    socket.send_multipart(frames(Hello("bench", 1, "none", "cpu", "none", CELLS, 16, 4096, CELLS, True)))
    socket.send_multipart(frames(Load(0, PoolCells(free=CELLS), 0, 0, 0, [], Counters(), False)))
    decoder: Decoder[RouterToWorker] = Decoder(RouterToWorker)
    streams: dict[str, list[int]] = {}  # id -> [made, wanted]
    step = 0
    while True:
        while socket.poll(0 if streams else None):
            match decoder.decode(socket.recv_multipart()):
                case Submit(generate):
                    streams[generate.request_id] = [0, generate.max_tokens]
                case Ping():
                    step += 1
                    socket.send_multipart(frames(Load(step, PoolCells(free=CELLS), 0, len(streams), 0, [], Counters(), False)))
        news = []
        for request_id, progress in list(streams.items()):
            made, wanted = progress
            count = min(tokens_each, wanted - made)
            news.append(pack(Tokens(request_id, made, [49_000] * count)))
            progress[0] += count
            if progress[0] == wanted:
                news.append(pack(Finished(request_id, "length", Usage(4, wanted))))
                del streams[request_id]
        for payload in bundles(news):
            socket.send_multipart((PROTOCOL, payload))


def reading_client(run_dir: str, streams: int, tokens: int, began: "multiprocessing.Queue[float]") -> None:
    """Reads all streams with the reference client; puts the seconds from the first request to the last Finished."""

    async def one(client: Client) -> None:
        count = 0
        async for message in client.generate([1, 2, 3, 4], max_tokens=tokens):
            match message:
                case Tokens(offset=offset):
                    assert offset == count
                    count += len(message.tokens)
                case Finished(reason=reason):
                    assert (reason, count) == ("length", tokens)
                case Notice():
                    pass

    async def all_streams() -> float:
        async with Client(client_address(run_dir)) as client:
            while not (await client.status()).ready:
                await asyncio.sleep(0.05)
            start = time.perf_counter()
            await asyncio.gather(*(one(client) for _ in range(streams)))
            return time.perf_counter() - start

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        began.put(runner.run(all_streams()))


@dataclass(frozen=True)
class Run:
    """Seconds of one run, processor seconds of each process, the router's resident MiB at the end."""

    seconds: float
    router_s: float
    client_s: float
    worker_s: float
    router_mib: float


def measure(streams: int, tokens: int, tokens_each: int) -> Run:
    """`streams` at once, of `tokens` each."""
    with tempfile.TemporaryDirectory(prefix="parkade-") as run_dir:
        router = subprocess.Popen(
            [sys.executable, "-m", "router", "--run-dir", run_dir, "--max-queued", "100000"], stderr=subprocess.DEVNULL
        )
        while not Path(run_dir, "worker.sock").exists():
            if router.poll() is not None:
                raise SystemExit(f"the router ended with status {router.returncode}")
            time.sleep(0.02)
        results: multiprocessing.Queue[float] = multiprocessing.Queue()
        worker = multiprocessing.Process(target=scripted_worker, args=(run_dir, tokens_each), daemon=True)
        client = multiprocessing.Process(target=reading_client, args=(run_dir, streams, tokens, results), daemon=True)
        worker.start()
        client.start()
        pids = (router.pid, client.pid, worker.pid)
        before = [cpu_seconds(pid) for pid in pids]
        try:
            seconds = results.get(timeout=120)
            cpu = [cpu_seconds(pid) - former for pid, former in zip(pids, before, strict=True)]
            return Run(seconds, *cpu, psutil.Process(router.pid).memory_info().rss / 2**20)
        finally:
            worker.kill()
            client.kill()
            router.terminate()
            router.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200_000, help="of all streams together")
    args = parser.parse_args()
    print("| streams | tokens of each a step | tokens/s | router us/token | client us/token | worker us/token | router MiB |")
    print("|---|---|---|---|---|---|---|")
    for streams, tokens_each in ((1, 1), (4, 1), (16, 1), (100, 1), (1000, 1), (4, 4), (100, 4)):
        tokens = args.tokens // streams
        runs = [measure(streams, tokens, tokens_each) for _ in range(args.rounds)]
        total = streams * tokens
        cells = [
            spread([total / run.seconds for run in runs]),
            spread([1e6 * run.router_s / total for run in runs], 1),
            spread([1e6 * run.client_s / total for run in runs], 1),
            spread([1e6 * run.worker_s / total for run in runs], 1),
            f"{max(run.router_mib for run in runs):.0f}",
        ]
        print(f"| {streams} | {tokens_each} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
