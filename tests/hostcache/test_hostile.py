"""Hostile peers and bare machines: no descriptor left, datagrams of any shape. The host cache serves whom it had, and idles."""

import os
import resource
import select
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostcache.server import DEAF_S
from tests.hostcache.service import HostCache, Pool, ask, new_parking
from tests.wire.shapes import changed, messages_of, shapes
from wire.codec import pack
from wire.messages import Denied, GetBudget, ToHostCache
from wire.messages import Reserve as WireReserve

HIDDEN = 4  # connections that wait in vain


@pytest.fixture
def cache(tmp_path):
    with HostCache(tmp_path / "run") as cache:
        yield cache


def cpu_s(cache: HostCache) -> float:
    """CPU time that it has used."""
    fields = Path(f"/proc/{cache.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_without_a_free_descriptor_it_serves_whom_it_has_and_does_not_spin(cache):
    sock, _, fd = cache.attach()
    cache.budget()
    pid = cache.process.pid
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    waiting = [cache.connect() for _ in range(HIDDEN)]
    for one in waiting:
        one.send(b"garbage")  # its end can be seen
    began, cpu = time.monotonic(), cpu_s(cache)
    turns = 0
    while time.monotonic() - began < 2 * DEAF_S:
        answer = ask(sock, WireReserve(ask=turns, request_id="r", nbytes=4096))
        assert isinstance(answer, Denied)  # how much memory is free is a file, too
        turns += 1
        select.select(waiting, [], [], DEAF_S / 5)
    assert turns >= 5
    assert cpu_s(cache) - cpu < 0.5 * (time.monotonic() - began)
    assert not select.select(waiting, [], [], 0)[0]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    for one in waiting:
        assert one.recv(100) == b""
    assert cache.process.poll() is None
    os.close(fd)


def take_all(held: list[int]) -> None:
    """Every descriptor that is free."""
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))


def test_a_worker_without_a_free_descriptor_tries_again(cache):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    parking = new_parking(cache, Pool(2))
    parking._disconnect()
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 512), hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            take_all(held)
        parking.poll(later := time.monotonic() + 10)
        assert not parking._socket.open
        os.close(held.pop())  # enough for the connection, not for the arena that comes over it
        parking.poll(later + 10)
        while parking.fileno() is not None:
            assert select.select([parking.fileno()], [], [], 10)[0]
            parking.poll(later + 10)
            assert not parking.connected
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    parking.poll(later + 20)
    while not parking.connected:
        assert select.select([parking.fileno()], [], [], 10)[0]
        parking.poll(later + 20)
    parking.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(messages_of(ToHostCache).map(pack) | shapes() | changed(messages_of(ToHostCache)), min_size=1, max_size=8))
def test_datagrams_of_any_shape_leave_the_books_in_order(cache, datagrams):
    """Each is obeyed, or costs its sender the connection with all that it holds; the next peer meets a whole budget."""
    with cache.connect() as sock:
        try:
            for datagram in datagrams:
                sock.send(datagram or b"\0")
            sock.send(pack(GetBudget()))
        except ConnectionError:
            pass
    figures = cache.until(lambda figures: figures.used_bytes == 0)
    assert figures.leases == 0
    assert cache.process.poll() is None
