"""What the router costs a token: processor time of `python -m router`, and messages a second, with a scripted worker.

`python -m benchmarks.router`. The worker and the client are processes of their own that do as little as they can; on few cores
they share them with the router, so the processor time is the figure and the rate is a lower bound.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop
import zmq

from router.client import Client
from wire.codec import Decoder, frames
from wire.messages import Counters, Finished, Hello, Load, Notice, Ping, PoolCells, RouterToWorker, Submit, Tokens, Usage
from wire.sockets import client_address, dealer_socket, worker_address

CELLS = 1 << 20


def scripted_worker(run_dir: str, tokens_each: int) -> None:
    """Streams everything it is asked for, one message for each stream in turn, as fast as the router takes it."""
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
        for request_id, progress in list(streams.items()):
            made, wanted = progress
            count = min(tokens_each, wanted - made)
            socket.send_multipart(frames(Tokens(request_id, made, [49_000] * count)))
            progress[0] += count
            if progress[0] == wanted:
                socket.send_multipart(frames(Finished(request_id, "length", Usage(4, wanted))))
                del streams[request_id]


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


def measure(streams: int, tokens: int, tokens_each: int) -> tuple[float, float, float]:
    """Seconds, processor seconds of the router, its resident MiB at the end."""
    with tempfile.TemporaryDirectory(prefix="parkade-") as run_dir:
        router = subprocess.Popen([sys.executable, "-m", "router", "--run-dir", run_dir, "--max-queued", "100000"])
        while not Path(run_dir, "worker.sock").exists():
            time.sleep(0.02)
        results: multiprocessing.Queue[float] = multiprocessing.Queue()
        worker = multiprocessing.Process(target=scripted_worker, args=(run_dir, tokens_each), daemon=True)
        client = multiprocessing.Process(target=reading_client, args=(run_dir, streams, tokens, results), daemon=True)
        process = psutil.Process(router.pid)
        worker.start()
        before = process.cpu_times()
        client.start()
        try:
            seconds = results.get(timeout=120)
            after = process.cpu_times()
            mib = process.memory_info().rss / 2**20
        finally:
            worker.kill()
            client.kill()
            router.terminate()
            router.wait(20)
        return seconds, (after.user + after.system) - (before.user + before.system), mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60_000, help="of all streams together")
    args = parser.parse_args()
    print(
        f"{'streams':>8} {'tokens a message':>17} | {'router CPU us/token':>20} {'us/message':>11} | {'messages/s':>11} | RSS MiB"
    )
    for streams, tokens_each in ((1, 1), (4, 1), (100, 1), (1000, 1), (4, 4)):
        tokens = args.tokens // streams
        runs = [measure(streams, tokens, tokens_each) for _ in range(args.rounds)]
        messages = streams * -(-tokens // tokens_each)
        per_token = [1e6 * cpu / (streams * tokens) for _, cpu, _ in runs]
        rate = [messages / seconds for seconds, _, _ in runs]
        print(
            f"{streams:>8} {tokens_each:>17} | {statistics.median(per_token):>8.1f} ({min(per_token):.1f}-{max(per_token):.1f})"
            f" {statistics.median(per_token) * streams * tokens / messages:>11.1f} |"
            f" {statistics.median(rate):>11,.0f} | {max(mib for _, _, mib in runs):>7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
