"""The real host cache process: what it survives, whom it believes, and that its memory goes back."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.parking import Parking
from gpu_worker.policy.events import LeaseGranted, Load, Loaded, ReleaseLease, Reserve, Save, Saved
from hostcache.server import MAX_PEERS, Server, listen, open_arena
from tests.hostcache.service import HostCache, Pool, ask, new_parking, wait
from wire import arena
from wire.codec import pack
from wire.messages import Attach, Commit, Denied, GetBudget, Granted, Ping, Release
from wire.messages import Reserve as WireReserve

FORK = multiprocessing.get_context("fork")
BLOCKS = 12


@pytest.fixture
def cache(tmp_path):
    with HostCache(tmp_path / "run") as cache:
        yield cache


# its own end ----------------------------------------------------------------------------------------------------------
def test_a_signal_after_its_end_writes_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the test stay
    server = Server(listen(str(tmp_path / "s")), *open_arena(arena.PAGE_BYTES))
    server.stopping = True
    server.run()
    os.close(server.arena_fd)
    assert signal.set_wakeup_fd(-1) == -1, "the next signal would write to a closed socket, and say so in the log"


# SIGKILL of workers ---------------------------------------------------------------------------------------------------
def hurt_worker(cache: HostCache, moment: str, seed: int, said) -> None:
    """A worker that parks and resumes; it kills itself at its moment, or goes on until it is killed."""
    pool = Pool(2 * BLOCKS, seed=seed)
    parking = Parking(pool, cache.path, f"hurt-{os.getpid()}-1", time.monotonic)
    wait(parking, lambda: parking.connected)
    for turn in range(10_000):
        parking.act(Reserve(ask=turn, request_id="r", num_blocks=BLOCKS), time.monotonic())
        (granted,) = wait(parking, LeaseGranted)
        die_if(moment == "after lease")
        parking.act(Save(request_id="r", lease=granted.lease, blocks=tuple(range(BLOCKS)), position=192), time.monotonic())
        if moment == "mid copy":
            parking.copy(BLOCKS * pool.block_bytes // 2)
            die_if(True)
        if moment == "before commit":
            while parking.copying:
                parking.copy(1)
            die_if(True)  # the Commit waits in its outbox
        wait(parking, Saved)
        parking.poll(time.monotonic())
        die_if(moment == "after commit")
        parking.act(Load(request_id="r", lease=granted.lease, blocks=tuple(range(BLOCKS, 2 * BLOCKS)), first=0), time.monotonic())
        ended = wait(parking, Loaded)
        right = [event.ok for event in ended] == [True] and (pool.cells[:BLOCKS] == pool.cells[BLOCKS:]).all()
        said.send_bytes(b"right" if right else b"WRONG")
        parking.act(ReleaseLease(lease=granted.lease), time.monotonic())


def die_if(condition: bool) -> None:
    if condition:
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_workers_leave_nothing_and_touch_nobody(cache):
    before = set(os.listdir("/dev/shm"))
    chance = random.Random(1)
    pool = Pool(2 * BLOCKS, seed=99)
    survivor = new_parking(cache, pool, "survivor-1-1")
    survivor.act(Reserve(ask=1, request_id="s", num_blocks=BLOCKS), time.monotonic())
    (granted,) = wait(survivor, LeaseGranted)
    survivor.act(Save(request_id="s", lease=granted.lease, blocks=tuple(range(BLOCKS)), position=1), time.monotonic())
    assert [event.ok for event in wait(survivor, Saved)] == [True]
    for seed in range(5):
        for moment in ("after lease", "mid copy", "before commit", "after commit", "random"):
            hears, says = FORK.Pipe(duplex=False)
            victim = FORK.Process(target=hurt_worker, args=(cache, moment, seed, says))
            victim.start()
            says.close()
            if moment == "random":
                for _ in range(chance.randrange(1, 6)):
                    assert hears.recv_bytes() == b"right"
                victim.kill()
            victim.join()
            assert victim.exitcode == -signal.SIGKILL, moment
            cache.until(lambda figures: figures.leases == 1)
            assert cache.budget().used_bytes == BLOCKS * survivor.unit_bytes
            survivor.poll(time.monotonic())
    survivor.act(Load(request_id="s", lease=granted.lease, blocks=tuple(range(BLOCKS, 2 * BLOCKS)), first=0), time.monotonic())
    assert [event.ok for event in wait(survivor, Loaded)] == [True]
    assert (pool.cells[:BLOCKS] == pool.cells[BLOCKS:]).all()
    survivor.close()
    assert cache.until(lambda figures: figures.held_bytes == 0).used_bytes == 0
    assert set(os.listdir("/dev/shm")) == before


def test_killing_everything_leaves_nothing(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with HostCache(tmp_path / "run") as cache:
        hears, says = FORK.Pipe(duplex=False)
        worker = FORK.Process(target=hurt_worker, args=(cache, "random", 1, says))
        worker.start()
        assert hears.recv_bytes() == b"right"
        cache.kill()
        worker.kill()
        worker.join()
    assert set(os.listdir("/dev/shm")) == before
    with HostCache(tmp_path / "run") as cache:  # the socket left behind is no hindrance
        assert cache.budget().held_bytes == 0


# memory ---------------------------------------------------------------------------------------------------------------
def test_memory_is_there_when_it_is_granted_and_goes_back(cache):
    sock, attached, fd = cache.attach()
    assert os.fstat(fd).st_blocks == 0 and attached.arena_bytes == 16 << 20
    granted = ask(sock, WireReserve(ask=1, request_id="r", nbytes=5 << 20))
    assert os.fstat(fd).st_blocks * 512 == cache.budget().held_bytes == 16 << 20
    sock.send(pack(Release(lease=granted.lease)))
    sock.send(pack(Release(lease=granted.lease)))  # twice is no harm
    assert cache.budget().used_bytes == 0
    sock.close()
    cache.until(lambda figures: figures.held_bytes == 0)
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_the_arena_can_neither_grow_nor_shrink_under_anybody(cache):
    sock, attached, fd = cache.attach()
    for size in (attached.arena_bytes - 4096, attached.arena_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.posix_fallocate(fd, attached.arena_bytes, 4096)
    assert arena.is_arena(fd, attached.arena_bytes) and not arena.is_arena(fd, 4096)
    os.close(fd)
    sock.close()


def test_written_slabs_are_found_again():
    fd = arena.create(10 * 4096)
    arena.take(fd, 0, 10 * 4096)
    assert arena.written(fd, 10 * 4096, 4 * 4096) == []
    mapping = arena.Mapping(fd, 10 * 4096)
    mapping.bytes[7 * 4096] = mapping.bytes[9 * 4096] = 0  # the value does not matter
    mapping.close()
    assert arena.written(fd, 10 * 4096, 4 * 4096) == [1, 2]
    arena.give_back(fd, 4 * 4096, 4 * 4096)
    assert arena.written(fd, 10 * 4096, 4 * 4096) == [2]
    os.close(fd)


def test_a_kept_arena_gives_back_what_nobody_wrote_to(tmp_path):
    with HostCache(tmp_path / "run", store=True) as cache:
        sock, _, fd = cache.attach()
        ask(sock, WireReserve(ask=1, request_id="r", nbytes=4096))
        cache.kill()
        assert os.fstat(fd).st_blocks * 512 == 16 << 20
        cache.start()
        assert cache.budget().held_bytes == os.fstat(fd).st_blocks == 0
        os.close(fd)
        sock.close()


def test_a_mapping_does_not_grow_a_worker_beyond_what_it_uses():
    nbytes = 4 << 20
    fd = arena.create(nbytes)
    arena.take(fd, 0, nbytes)
    mapping = arena.Mapping(fd, nbytes)

    def shared_bytes() -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
        return int(line.split()[1]) * 1024

    before = shared_bytes()
    mapping.populate(arena.POPULATE_BYTES + 100, 4096)
    assert shared_bytes() - before == arena.POPULATE_BYTES
    mapping.view(arena.POPULATE_BYTES, 8)[:] = 7
    mapping.drop(0, nbytes)
    assert shared_bytes() == before
    mapping.populate(0, nbytes)
    assert shared_bytes() - before == nbytes
    assert np.array_equal(mapping.view(arena.POPULATE_BYTES, 8), np.full(8, 7))  # dropped from the mapping, not from memory
    mapping.close()
    assert shared_bytes() == before
    os.close(fd)


# the router's question ------------------------------------------------------------------------------------------------
def test_figures_are_never_older_than_a_release_already_sent(cache):
    sock, _, fd = cache.attach()
    os.close(fd)
    for number in range(200):
        granted = ask(sock, WireReserve(ask=number, request_id="r", nbytes=4096))
        assert isinstance(granted, Granted)
        assert cache.budget().used_bytes == 4096
        sock.send(pack(Commit(lease=granted.lease, checksum=1, position=1)))
        sock.send(pack(Release(lease=granted.lease)))
        assert cache.budget().used_bytes == 0
    ask(sock, WireReserve(ask=1, request_id="r", nbytes=4096))
    sock.close()  # so is a death
    assert cache.budget().used_bytes == 0


# bad peers ------------------------------------------------------------------------------------------------------------
def bad_datagrams() -> list[bytes]:
    chance = random.Random(3)
    good = pack(WireReserve(ask=1, request_id="r", nbytes=4096))
    return [
        *(chance.randbytes(chance.randrange(1, 300)) for _ in range(40)),
        *(good[:cut] for cut in range(1, len(good), 3)),
        pack(Ping()),
        pack(Denied(ask=1, reason="full")),
        pack(Attach(worker="w", unit_bytes=4096)).replace(b"unit_bytes", b"UNIT_bytes"),
        pack(Attach(worker="w", unit_bytes=1)),
        pack(Attach(worker="w", unit_bytes=4097)),
        pack(WireReserve(ask=1, request_id="r", nbytes=-1)),
        pack(WireReserve(ask=1, request_id="r", nbytes=2**60)),
        b"\x91" * 5000,
        bytes(arena.MAX_DATAGRAM_BYTES + 1),
    ]


def test_a_bad_datagram_closes_its_sender_only(cache):
    sock, _, fd = cache.attach()
    granted = ask(sock, WireReserve(ask=1, request_id="r", nbytes=4096))
    for datagram in bad_datagrams():
        bad = cache.connect()
        bad.send(datagram)
        assert bad.recv(100) == b"", datagram
        bad.close()
    assert cache.budget().leases == 1
    assert ask(sock, WireReserve(ask=2, request_id="r", nbytes=4096)).lease != granted.lease
    sock.send(pack(Attach(worker="again", unit_bytes=4096)))  # a broken protocol costs its own leases
    assert sock.recv(100) == b""
    assert cache.budget().used_bytes == 0
    os.close(fd)


def test_a_worker_that_does_not_read_is_cut_off(cache):
    sock, _, fd = cache.attach()
    os.close(fd)

    def flood() -> None:
        for number in range(100_000):
            sock.send(pack(WireReserve(ask=number, request_id="r", nbytes=2**50)))

    with pytest.raises(ConnectionError):
        flood()
    assert cache.budget().leases == 0


def test_connections_are_bounded(cache):
    cache.budget()
    socks = [cache.connect() for _ in range(MAX_PEERS - 1)]
    beyond = cache.connect()
    assert beyond.recv(100) == b""
    assert ask(socks[-1], GetBudget()).used_bytes == 0
    socks.pop().close()
    cache.budget()  # it has seen the end
    again = cache.connect()
    assert ask(again, GetBudget()).used_bytes == 0
    for sock in (*socks, again, beyond):
        sock.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with HostCache(Path(folder) / "run") as cache:
            os.chmod(cache.path, 0o666)
            hears, says = FORK.Pipe(duplex=False)

            def stranger() -> None:
                os.setuid(65534)
                says.send_bytes(cache.connect().recv(100) or b"refused")

            process = FORK.Process(target=stranger)
            process.start()
            assert hears.recv_bytes() == b"refused"
            process.join()
            assert cache.budget().used_bytes == 0


# start and end --------------------------------------------------------------------------------------------------------
def run_to_the_end(run_dir: Path, park_ram: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hostcache", "--run-dir", str(run_dir), "--park-ram", park_ram]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_budget_larger_than_the_memory_is_refused_with_the_numbers(tmp_path):
    ended = run_to_the_end(tmp_path, "100000GiB")
    assert ended.returncode == 78
    last = ended.stderr.splitlines()[-1]
    assert str(100_000 << 30) in last and "--park-ram" in last and "GiB" in last
    assert not (tmp_path / "hostcache.sock").exists()


def test_a_second_host_cache_is_refused_and_the_first_goes_on(cache):
    ended = run_to_the_end(cache.run_dir, "1MiB")
    assert ended.returncode == 78 and "is running" in ended.stderr.splitlines()[-1]
    assert cache.budget().budget_bytes == 16 << 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(cache, number):
    sock = cache.connect()
    cache.budget()
    cache.signal(number)
    assert sock.recv(100) == b""
    assert cache.process.wait(30) == 0


def test_a_path_that_is_too_long_is_refused(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    ended = run_to_the_end(long, "1MiB")
    assert ended.returncode == 78 and "characters" in ended.stderr.splitlines()[-1]


def test_stored_descriptors_of_others_are_left_alone(tmp_path):
    """Names that are not the arena's, and an arena of another size, which is dropped."""
    with HostCache(tmp_path / "run", store=True) as cache:
        generation = cache.budget().generation
        cache.kill()
        with socket.socket() as other:
            cache.kept["router"] = os.dup(other.fileno())
        cache.start()
        assert cache.budget().generation == generation
        assert set(cache.kept) == {f"arena-{generation}", "router"}
