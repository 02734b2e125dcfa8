"""What a reader that stops costs: memory of router and adapter beyond what the same streams cost while they are read.

`python -m benchmarks.stopped`. Router and adapter are real processes, the worker is scripted and goes on producing whatever the
router says. The readers ask for a stream and never read it: each a connection of its own, over HTTP or over ZeroMQ. Before them
as many others have read theirs to the end, so that the tokens that the router keeps of every stream are not counted.
"""

import argparse
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import zmq

from benchmarks.sse import Bench, bench, request
from parkade.api import figures
from wire.codec import frames
from wire.messages import Generate
from wire.sockets import client_address, dealer_socket

READERS = 64
TOKENS = 3000  # of each stream: a message each, several times what the window lets out
SETTLED = 5  # looks in a row that find nothing more
LOOK_EVERY_S = 0.1
TIMEOUT_S = 60.0


@dataclass
class Cost:
    """Bytes of one stopped reader. `kernel`: what waits in the server's socket, as /proc/net/tcp tells it; of a Unix socket it is
    not told, and no more than the window."""

    router: float
    adapter: float
    kernel: float

    @property
    def total(self) -> float:
        return self.router + self.adapter + self.kernel


def measure(running: Bench, readers: int, how: str) -> Cost:
    """What each of so many readers costs; `how` is "http" or "zeromq"."""
    running.measure(readers, readers * TOKENS, TOKENS)
    before = running.router.memory_info().rss, running.adapter.memory_info().rss
    made = generated(running)
    ask = stopped_http if how == "http" else stopped_zeromq
    with ask(running, readers):
        wait_until_settled(running, made + readers * TOKENS)
        after = running.router.memory_info().rss, running.adapter.memory_info().rss
        kernel = unsent(running.port) if how == "http" else 0
        return Cost(*((a - b) / readers for a, b in zip(after, before, strict=True)), kernel / readers)


@contextlib.contextmanager
def stopped_http(running: Bench, readers: int) -> Iterator[None]:
    """Readers over HTTP, one connection each, that see only that they are answered."""
    with contextlib.ExitStack() as stack:
        for _ in range(readers):
            stack.enter_context(accepted(running.port))
        yield


def accepted(port: int) -> socket.socket:
    """A connection whose stream has been accepted. Who is refused asks again, as in `read_answers`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request(port, TOKENS))
        if sock.recv(12).endswith(b" 200"):
            return sock
        sock.close()
    raise SystemExit("every stream is refused")


@contextlib.contextmanager
def stopped_zeromq(running: Bench, readers: int) -> Iterator[None]:
    """Readers over ZeroMQ, one connection each. They take nothing from their sockets, and their sockets take one message."""
    context = zmq.Context(io_threads=1)
    sockets = []
    try:
        for number in range(readers):
            sock = dealer_socket(context, client_address(running.run_dir))
            sock.send_multipart(frames(Generate(f"stopped-{number}", [1, 2, 3, 4], max_tokens=TOKENS)))
            sockets.append(sock)
        yield
    finally:
        for sock in sockets:
            sock.close(linger=0)
        context.term()


def generated(running: Bench) -> float:
    """Tokens that the worker has made so far."""
    deadline = time.monotonic() + TIMEOUT_S
    while (answer := httpx.get(f"http://127.0.0.1:{running.port}/metrics", timeout=TIMEOUT_S)).status_code != 200:
        if time.monotonic() > deadline:
            raise SystemExit("the router does not tell its state")
    return figures(answer.text)["parkade_tokens_generated_total"]


def wait_until_settled(running: Bench, tokens: float) -> None:
    """Until the worker has made so many and no process grows any more."""
    deadline, seen, same = time.monotonic() + TIMEOUT_S, (0, 0), 0
    while same < SETTLED:
        if time.monotonic() > deadline:
            raise SystemExit("it does not settle")
        time.sleep(LOOK_EVERY_S)
        now = running.router.memory_info().rss, running.adapter.memory_info().rss
        same = same + 1 if now == seen and generated(running) >= tokens else 0
        seen = now


def unsent(port: int) -> int:
    """Bytes in the send queues of all TCP connections at this port of the server."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(queues.partition(":")[0], 16) for _, local, _, _, queues, *_ in lines if local.endswith(f":{port:04X}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=READERS)
    args = parser.parse_args()
    print(f"{'':>8} | KiB a reader: {'router':>8} {'adapter':>8} {'kernel':>8} {'all':>8}")
    for how in ("http", "zeromq"):
        with bench() as running:
            running.measure(4, 5_000)  # touches every page of code once
            cost = measure(running, args.readers, how)
        kib = [nbytes / 1024 for nbytes in (cost.router, cost.adapter, cost.kernel, cost.total)]
        print(f"{how:>8} | {'':>13} {kib[0]:>8.0f} {kib[1]:>8.0f} {kib[2]:>8.0f} {kib[3]:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
