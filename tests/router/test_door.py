"""Clients' connections at the router: a message that never ends, more connections than descriptors, half-open ones."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import zmq

from router import door
from router.client import Client
from tests.router.stage import ids_of, stage

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(16) + bytes(32)  # of ZMTP 3.0
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE = b"\x01\x00"  # an empty frame, after which another comes


def raw(run_dir: str) -> socket.socket:
    """A connection that has not said anything."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"{run_dir}/client.sock")
    sock.settimeout(60)
    return sock


SENDER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[2]))
heard = b""
while b"READY" not in heard:  # else what follows is sometimes taken for a bad handshake
    heard += sock.recv(1000)
words = bytes.fromhex(sys.argv[3]) * int(sys.argv[4])
try:
    while True:
        sock.sendall(words)
except OSError:
    print("cut off")
"""  # for ever


@pytest.mark.parametrize("frame", [pytest.param(MORE, marks=pytest.mark.long), b"\x01\xff" + bytes(255)])
def test_a_message_that_never_ends_costs_its_sender_the_connection(tmp_path, frame):
    address = f"{tmp_path}/client.sock"
    sender = [sys.executable, "-c", SENDER, address, (GREETING + READY).hex(), frame.hex(), str((64 << 10) // len(frame))]
    with subprocess.Popen(
        [sys.executable, "-m", "router", "--run-dir", str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as router:
        try:
            while "serving in" not in router.stderr.readline():
                assert router.poll() is None
            before = psutil.Process(router.pid).memory_info().rss
            assert subprocess.run(sender, stdout=subprocess.PIPE, timeout=60).stdout == b"cut off\n"
            assert psutil.Process(router.pid).memory_info().rss - before < 2 << 30
            assert asyncio.run(tokens_known(f"ipc://{address}")) == 0
        finally:
            router.kill()


async def tokens_known(address: str) -> int:
    """That it answers: how many requests it has."""
    async with Client(address) as client, asyncio.timeout(60):
        return len((await client.status()).slots)


class FrameOf:
    """A frame that came from this descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self.fd


@pytest.mark.parametrize(("speaks", "reads", "grows", "is_cut"), [
    (False, False, True, True),
    (True, False, True, False),  # something comes of it
    (False, True, True, False),  # it has nothing to say
    (False, False, False, False),  # it costs nothing
])  # fmt: skip
def test_who_is_cut_off(monkeypatch, speaks, reads, grows, is_cut):
    mib = iter([10, 80, *[300 if grows else 90] * 100])
    monkeypatch.setattr(door.Door, "_resident", lambda self: next(mib) << 20)
    ours, theirs = socket.socketpair()
    theirs.send(b"x")
    one = door.Door(10)
    assert not one.heard({"event": zmq.EVENT_ACCEPTED, "value": ours.fileno()})
    assert one.look() == 0
    assert one.watching
    if speaks:
        one.spoke(FrameOf(ours.fileno()))
    if reads:
        ours.recv(1)
    assert sum(one.look() for _ in range(door.FEW_LOOKS if grows else door.LOOKS)) == is_cut
    theirs.setblocking(False)
    if is_cut:
        assert theirs.recv(1) == b""
    else:
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    assert one.heard({"event": zmq.EVENT_DISCONNECTED, "value": ours.fileno()})
    one.close()
    ours.close()
    theirs.close()


def test_connections_beyond_the_limit_are_closed_and_the_others_stay(run, monkeypatch):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            worker.plays = True
            assert await ids_of(client.generate([1], max_tokens=2)) == [0, 1]
            s.server._door._most = 8
            socks = [raw(s.run_dir) for _ in range(8)]
            loop = asyncio.get_running_loop()
            socks[-1].setblocking(False)
            await asyncio.wait_for(loop.sock_recv(socks[-1], 64), 30)  # our greeting, or the end
            await asyncio.to_thread(read_to_the_end, socks[-1])
            assert await ids_of(client.generate([1], max_tokens=2)) == [0, 1]
            for sock in socks:
                sock.close()
            async with s.client() as again:
                assert await ids_of(again.generate([1], max_tokens=2)) == [0, 1]

    run(story())


def read_to_the_end(sock: socket.socket) -> None:
    """TimeoutError if it does not come."""
    sock.settimeout(60)
    try:
        while sock.recv(100):
            pass
    except ConnectionError:
        pass


HOLDER = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
socks = []
for number in range(int(sys.argv[2])):
    socks.append(socket.socket(socket.AF_UNIX))
    socks[-1].connect(sys.argv[1])
    socks[-1].sendall(bytes.fromhex(sys.argv[3])[: number % 64])
print("open", flush=True)
sys.stdin.read()
"""  # a process of its own: both ends together would be twice the descriptors


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_half_open_connections_are_no_burden(run, count):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < count + door.BURST + 600:
        pytest.skip(f"{count} connections need as many descriptors, and some for bursts")

    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            worker.plays = True
            command = [sys.executable, "-c", HOLDER, f"{s.run_dir}/client.sock", str(count), GREETING.hex()]
            pipe = asyncio.subprocess.PIPE
            holder = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            assert await holder.stdout.readline() == b"open\n"
            assert await ids_of(client.generate([1], max_tokens=20)) == list(range(20))
            async with s.client() as new:
                assert await ids_of(new.generate([1], max_tokens=20)) == list(range(20))
            holder.stdin.close()
            assert await holder.wait() == 0

    run(story())


def test_a_descriptor_that_is_no_stream_is_left_alone(tmp_path: Path):
    with (tmp_path / "file").open("w") as file:
        door._cut(file.fileno())
        file.write("x")
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door._cut(one.fileno())
    other.send(b"x")
    assert one.recv(1) == b"x"
    door._cut(10**6)
    assert os.fstat(one.fileno())
    one.close()
    other.close()
