"""Parking against the real host cache: what the scheduler hears when all is well, and when it is not."""

import os
import signal
import time

import numpy as np
import pytest

from gpu_worker.device import copies
from gpu_worker.parking import DEADLINE_S, RECONNECT_S, RETURN_S, Parking
from gpu_worker.policy.events import (
    HostCacheLost,
    LeaseDenied,
    LeaseGranted,
    Load,
    Loaded,
    ReleaseLease,
    Reserve,
    Save,
    Saved,
)
from tests.hostcache.service import HostCache, Pool, new_parking, wait
from wire import arena
from wire.codec import pack
from wire.messages import Attach, HeldLease


@pytest.fixture
def cache(tmp_path):
    with HostCache(tmp_path / "run") as cache:
        yield cache


def reserve(parking: Parking, num_blocks: int, ask: int = 1, request_id: str = "r") -> int:
    """The lease."""
    parking.act(Reserve(ask=ask, request_id=request_id, num_blocks=num_blocks), time.monotonic())
    (granted,) = wait(parking, LeaseGranted)
    assert granted.ask == ask
    return granted.lease


def save(parking: Parking, lease: int, blocks: tuple[int, ...], request_id: str = "r", state_slot: int = -1) -> bool:
    parking.act(Save(request_id, lease, blocks, len(blocks) * 16, state_slot), time.monotonic())
    (saved,) = wait(parking, Saved)
    return saved.ok


def load(
    parking: Parking, lease: int, blocks: tuple[int, ...], first: int = 0, request_id: str = "r", state_slot: int = -1
) -> bool:
    parking.act(Load(request_id, lease, blocks, first, state_slot), time.monotonic())
    (loaded,) = [event for event in wait(parking, Loaded) if isinstance(event, Loaded)]
    return loaded.ok


def flip_bit(cache: HostCache, piece: np.ndarray) -> None:
    """Another holder of the arena changes the last bit of the image of these bytes."""
    sock, attached, fd = cache.attach()
    mapping = arena.Mapping(fd, attached.arena_bytes)
    at = mapping.bytes.tobytes().index(piece[:64].tobytes())
    mapping.bytes[at + len(piece) - 1] ^= 1
    mapping.close()
    os.close(fd)
    sock.close()


def test_an_image_comes_back_into_other_blocks(cache):
    pool = Pool(40)
    parking = new_parking(cache, pool)
    want = pool.cells[[3, 1, 4, 15, 9]].copy()
    lease = reserve(parking, 5)
    assert save(parking, lease, (3, 1, 4, 15, 9))
    assert cache.budget().used_bytes == 5 * parking.unit_bytes
    pool.cells[[3, 1, 4, 15, 9]] = 0
    assert load(parking, lease, (30, 31, 32, 33, 34))
    assert (pool.cells[30:35] == want).all()
    assert load(parking, lease, (20, 21), first=3)  # the rest was found by hash
    assert (pool.cells[20:22] == want[3:]).all()
    parking.act(ReleaseLease(lease=lease), time.monotonic())
    assert cache.budget().used_bytes == 0
    assert wait(parking, lambda: cache.budget().held_bytes == 0) == []  # it has answered Reclaim
    parking.close()


@pytest.mark.parametrize("state_bytes", [100, 100_000, 350_000])  # less than a unit, about one, several
def test_an_image_takes_the_state_along(cache, state_bytes):
    pool = Pool(40, state_bytes=state_bytes)
    parking = new_parking(cache, pool)
    want, state = pool.cells[[3, 1, 4]].copy(), pool.states[2].copy()
    lease = reserve(parking, 5)
    assert cache.budget().used_bytes == (5 + -(-state_bytes // parking.unit_bytes)) * parking.unit_bytes
    assert save(parking, lease, (3, 1, 4), state_slot=2)  # fewer blocks than were asked for
    pool.cells[:] = pool.states[:] = 0
    assert load(parking, lease, (30, 31, 32), state_slot=1)
    assert (pool.cells[30:33] == want).all() and (pool.states[1] == state).all()
    for first in (0, 2):  # the state lies behind all blocks, whichever are wanted
        pool.states[3] = 0
        assert load(parking, lease, (20,), first=first, state_slot=3)
        assert (pool.cells[20] == want[first]).all() and (pool.states[3] == state).all()
    assert load(parking, lease, (), first=3, state_slot=0) and (pool.states[0] == state).all()
    assert not load(parking, lease, (20, 21), first=2, state_slot=0)  # no part of the state passes for a block
    pool.states[2] = state
    flip_bit(cache, pool.states[2][-(state_bytes % parking.unit_bytes or parking.unit_bytes) :])
    assert not load(parking, lease, (30, 31, 32), state_slot=1)
    parking.close()


def test_a_lease_without_room_for_the_state_is_refused(cache):
    parking = new_parking(cache, Pool(10, state_bytes=250_000))
    lease = reserve(parking, 2)
    assert not save(parking, lease, (0, 1, 2), state_slot=0)
    assert save(parking, lease, (0, 1), state_slot=0)
    parking.close()


def test_an_image_of_another_layout_is_not_loaded(cache):
    """The same bytes under a seed of another size of state are damaged."""
    pool = Pool(10, state_bytes=5000)
    parking = new_parking(cache, pool)
    lease = reserve(parking, 2)
    assert save(parking, lease, (0, 1), state_slot=0)
    pool.state_bytes = 5001
    assert not load(parking, lease, (5, 6), state_slot=0)
    parking.close()


def test_copies_are_bounded_and_oldest_first(cache):
    pool = Pool(8, block_bytes=copies.PIECE_BYTES * 2 + 5)
    parking = new_parking(cache, pool)
    first, second = reserve(parking, 2, 1), reserve(parking, 2, 2)
    parking.act(Save(request_id="a", lease=first, blocks=(0, 1), position=32), 0.0)
    parking.act(Save(request_id="b", lease=second, blocks=(2, 3), position=32), 0.0)
    ended, calls = [], 0
    while parking.copying:
        ended += parking.copy(1)  # a piece each
        calls += 1
    assert [event.request_id for event in ended] == ["a", "b"] and all(event.ok for event in ended)
    assert calls == 2 * 2 * 3 + 1  # the last call only finds the end
    assert parking.copy(1) == []
    parking.close()


def test_a_copy_is_measured_without_the_waits_between_its_pieces(cache):
    pool = Pool(8, block_bytes=copies.PIECE_BYTES * 2)
    clock = iter(range(1000))  # a second passes each time it is asked
    parking = new_parking(cache, pool)
    first, second = reserve(parking, 2, 1), reserve(parking, 1, 2)
    parking._clock = lambda: float(next(clock))
    parking.act(Save(request_id="a", lease=first, blocks=(0, 1), position=32), 0.0)
    parking.act(Save(request_id="b", lease=second, blocks=(2,), position=16), 0.0)
    ended = []
    while parking.copying:
        next(clock)  # a step is run
        ended += parking.copy(1)
    parking.act(Load(request_id="a", lease=first, blocks=(5,), first=1), 0.0)
    ended += parking.copy(1 << 30)
    piece = copies.PIECE_BYTES
    # a second for each piece, and one to find the end
    assert ended == [Saved("a", True, 4 * piece, 5.0), Saved("b", True, 2 * piece, 3.0), Loaded("a", True, 2 * piece, 3.0)]
    parking.close()


def test_a_changed_bit_is_found(cache):
    pool = Pool(10)
    parking = new_parking(cache, pool)
    lease = reserve(parking, 3)
    assert save(parking, lease, (0, 1, 2))
    flip_bit(cache, pool.block(1))
    assert not load(parking, lease, (5, 6, 7))
    assert load(parking, lease, (7,), first=2)
    parking.close()


def test_an_image_is_no_other_requests(cache):
    pool = Pool(10)
    parking = new_parking(cache, pool)
    lease = reserve(parking, 3)
    assert save(parking, lease, (0, 1, 2), request_id="mine")
    assert not load(parking, lease, (5, 6, 7), request_id="yours")
    assert load(parking, lease, (5, 6, 7), request_id="mine")
    parking.close()


def test_what_was_not_saved_cannot_be_loaded(cache):
    parking = new_parking(cache, Pool(10))
    lease = reserve(parking, 3)
    assert not load(parking, lease, (0,))
    assert not save(parking, lease, (0, 1, 2, 3))  # larger than its lease
    assert not save(parking, lease + 1, (0,))
    assert save(parking, lease, (0, 1))
    assert not load(parking, lease, (5, 6), first=1)
    parking.close()


def test_a_budget_that_is_used_up_denies(cache):
    parking = new_parking(cache, Pool(200))
    parking.act(Reserve(ask=1, request_id="r", num_blocks=100), time.monotonic())
    parking.act(Reserve(ask=2, request_id="r", num_blocks=100), time.monotonic())
    granted, denied = wait(parking, LeaseDenied)
    fill = 100 * parking.unit_bytes / (16 << 20)
    assert (granted.fill, granted.budget_bytes) == (fill, 16 << 20)
    assert denied == LeaseDenied(ask=2, reason="full", fill=fill, budget_bytes=16 << 20)
    parking.close()


def test_no_host_cache_is_a_denial_at_once_and_it_is_found_later(tmp_path):
    parking = Parking(Pool(4), str(tmp_path / "run" / "hostcache.sock"), "cpu0-1-1", lambda: 0.0)
    assert not parking.connected and parking.fileno() is None
    parking.act(Reserve(ask=1, request_id="r", num_blocks=1), 0.0)
    assert parking.wait_s(0.0) == 0.0
    assert parking.poll(0.0) == [LeaseDenied(ask=1, reason="no_host_cache")]
    assert parking.wait_s(0.1) == pytest.approx(RECONNECT_S - 0.1)
    assert parking.poll(RECONNECT_S) == [] and not parking.connected
    with HostCache(tmp_path / "run"):
        wait(parking, lambda: parking.connected)
        reserve(parking, 1, ask=2)
        parking.close()


def test_a_host_cache_that_hangs_is_a_denial_and_its_late_grant_goes_back(cache):
    parking = new_parking(cache, Pool(10))
    cache.signal(signal.SIGSTOP)
    now = time.monotonic()
    parking.act(Reserve(ask=1, request_id="r", num_blocks=2), now)
    assert parking.poll(now) == []
    assert parking.wait_s(now) == pytest.approx(DEADLINE_S)
    assert parking.poll(now + DEADLINE_S) == [LeaseDenied(ask=1, reason="timeout")]
    parking.act(Reserve(ask=2, request_id="r", num_blocks=2), now + DEADLINE_S)  # not one second for each
    assert parking.poll(now + DEADLINE_S) == [LeaseDenied(ask=2, reason="timeout")]
    cache.signal(signal.SIGCONT)
    cache.until(lambda figures: figures.held_bytes > 0)  # the late grant is on its way
    assert wait(parking, lambda: cache.budget().used_bytes == 0) == []
    reserve(parking, 2, ask=3)
    parking.close()


def test_messages_wait_for_a_host_cache_that_does_not_read(cache):
    """Thousands of releases do not fit its socket; none is lost."""
    parking = new_parking(cache, Pool(4, block_bytes=4096))
    leases = [reserve(parking, 1, ask) for ask in range(1000)]
    cache.signal(signal.SIGSTOP)
    for lease in leases:
        parking.act(ReleaseLease(lease=lease), time.monotonic())
    parking.act(Reserve(ask=5000, request_id="r", num_blocks=1), time.monotonic())
    assert parking.wait_s(time.monotonic()) < DEADLINE_S
    assert parking.poll(time.monotonic() + DEADLINE_S) == [LeaseDenied(ask=5000, reason="timeout")]
    cache.signal(signal.SIGCONT)
    wait(parking, lambda: cache.budget().leases == 0)
    reserve(parking, 1, ask=5001)
    parking.close()


def test_a_lost_host_cache_voids_every_lease_once_and_parking_attaches_again(cache):
    pool = Pool(40)
    parking = new_parking(cache, pool)
    saved, empty = reserve(parking, 3, 1), reserve(parking, 3, 2)
    assert save(parking, saved, (0, 1, 2))
    now = time.monotonic()
    parking.act(Save(request_id="saving", lease=empty, blocks=(3, 4, 5), position=48), now)
    parking.act(Load(request_id="r", lease=saved, blocks=(6, 7, 8), first=0), now)
    parking.copy(1)
    cache.signal(signal.SIGSTOP)
    parking.act(Reserve(ask=3, request_id="r", num_blocks=1), now)
    cache.kill()
    ended = [HostCacheLost(), ("saving", False), ("r", False)]
    assert [event if isinstance(event, HostCacheLost) else (event.request_id, event.ok) for event in parking.poll(now)] == ended
    assert not parking.connected and not parking.copying
    assert parking.poll(now + DEADLINE_S) == []  # the ask was answered by the loss
    assert not load(parking, saved, (6, 7, 8))
    parking.act(ReleaseLease(lease=saved), now)
    cache.start()
    events = wait(parking, lambda: parking.connected)
    assert events == []
    assert not load(parking, saved, (6, 7, 8))
    again = reserve(parking, 3, 4)
    assert again not in (saved, empty)
    assert save(parking, again, (0, 1, 2))
    assert cache.budget().leases == 1
    parking.close()


def test_a_stored_arena_comes_back_with_its_images(tmp_path):
    with HostCache(tmp_path / "run", store=True) as cache:
        pool = Pool(40)
        parking = new_parking(cache, pool)
        want = pool.cells[:3].copy()
        kept, saving, uncommitted, dropped = (reserve(parking, 3, ask) for ask in range(4))
        assert save(parking, kept, (0, 1, 2)) and save(parking, dropped, (0, 1, 2))
        parking.act(Save(request_id="s", lease=saving, blocks=(3, 4, 5), position=48), time.monotonic())
        parking.copy(1)
        generation = cache.budget().generation
        cache.kill()
        (ended,) = wait(parking, Saved)
        assert (ended.request_id, ended.ok) == ("s", False)
        parking.act(Reserve(ask=9, request_id="r", num_blocks=1), time.monotonic())
        assert LeaseDenied(ask=9, reason="no_host_cache") in parking.poll(time.monotonic())
        parking.act(ReleaseLease(lease=dropped), time.monotonic())
        assert load(parking, kept, (6, 7, 8)) and (pool.cells[6:9] == want).all()  # its bytes are still mapped
        cache.start()
        assert wait(parking, lambda: parking.connected) == []
        figures = cache.budget()
        assert figures.generation == generation and figures.leases == 1
        assert figures.used_bytes == 3 * parking.unit_bytes
        assert not load(parking, uncommitted, (9,))
        assert load(parking, kept, (9, 10, 11)) and (pool.cells[9:12] == want).all()
        parking.act(ReleaseLease(lease=kept), time.monotonic())
        wait(parking, lambda: cache.budget().held_bytes == 0)
        parking.close()


def test_an_image_whose_memory_went_to_another_is_void(tmp_path):
    with HostCache(tmp_path / "run", store=True) as cache:
        parking = new_parking(cache, Pool(10))
        first, second = reserve(parking, 2, 1), reserve(parking, 2, 2)
        assert save(parking, first, (0, 1)) and save(parking, second, (2, 3))
        generation = cache.budget().generation
        cache.kill()
        assert parking.poll(time.monotonic()) == []
        cache.start()
        thief = cache.connect()  # says that the first image's memory is its own, and comes first
        held = [HeldLease(lease=1, extents=[(0, 2 * parking.unit_bytes)])]
        thief.send(pack(Attach(worker="x-1-1", unit_bytes=parking.unit_bytes, generation=generation, held=held)))
        assert cache.until(lambda figures: figures.leases == 1)
        assert wait(parking, lambda: parking.connected) == []
        assert not load(parking, first, (5, 6))
        assert load(parking, second, (5, 6))
        parking.act(ReleaseLease(lease=first), time.monotonic())
        assert cache.budget().leases == 2
        thief.close()
        parking.close()


def test_a_stored_arena_that_does_not_come_back_is_lost(tmp_path):
    with HostCache(tmp_path / "run", store=True) as cache:
        parking = new_parking(cache, Pool(10))
        lease = reserve(parking, 3)
        assert save(parking, lease, (0, 1, 2))
        cache.kill()
        now = time.monotonic()
        assert parking.poll(now) == []
        assert parking.poll(now + RETURN_S) == [HostCacheLost()]
        assert not load(parking, lease, (5,))
        parking.close()


def test_another_arena_after_a_stored_one_is_a_loss(tmp_path):
    with HostCache(tmp_path / "run", store=True) as cache:
        parking = new_parking(cache, Pool(10))
        lease = reserve(parking, 3)
        assert save(parking, lease, (0, 1, 2))
        cache.kill()
        cache.park_ram = "8MiB"  # the stored arena is of another size: it is dropped
        cache.start()
        assert len(cache.kept) == 1
        assert wait(parking, lambda: parking.connected) == [HostCacheLost()]
        assert cache.budget().held_bytes == 0
        parking.close()


def test_a_lease_released_while_it_is_copied_goes_back_when_the_copy_ends(cache):
    parking = new_parking(cache, Pool(10))
    lease = reserve(parking, 2)
    parking.act(Save(request_id="r", lease=lease, blocks=(0, 1), position=32), time.monotonic())
    parking.act(ReleaseLease(lease=lease), time.monotonic())
    assert cache.budget().leases == 1
    assert [event.ok for event in wait(parking, Saved)] == [True]
    parking.poll(time.monotonic())
    assert cache.budget().leases == 0
    parking.close()


def test_two_workers_with_different_blocks(cache):
    pools = Pool(20, 100_000, seed=1), Pool(20, 4096, seed=2)
    workers = [new_parking(cache, pool, f"cpu{i}-1-1") for i, pool in enumerate(pools)]
    leases = []
    for parking in workers:
        leases.append(reserve(parking, 10))
        assert save(parking, leases[-1], tuple(range(10)))
    workers[0].act(ReleaseLease(lease=leases[0]), time.monotonic())
    assert cache.budget().used_bytes == 10 * 4096
    assert load(workers[1], leases[1], tuple(range(10, 20)))
    assert (pools[1].cells[:10] == pools[1].cells[10:]).all()
    for parking in workers:
        parking.close()


def test_the_size_of_the_budget_is_told_when_it_attaches(cache):
    parking = Parking(Pool(4), str(cache.run_dir / "hostcache.sock"), "cpu0-1-1", time.monotonic)
    told = []
    parking.on_attached = told.append
    wait(parking, lambda: parking.connected)
    assert told == [16 << 20]
    parking.close()


def test_a_budget_of_nothing_denies_everything(tmp_path):
    with HostCache(tmp_path / "run", park_ram="0") as cache:
        parking = new_parking(cache, Pool(2))
        parking.act(Reserve(ask=1, request_id="r", num_blocks=1), time.monotonic())
        assert wait(parking, LeaseDenied) == [LeaseDenied(ask=1, reason="full", fill=1.0)]
        parking.close()


def drive_copy(pieces) -> tuple[int, list[int]]:
    """(checksum, bytes of each piece)"""
    sizes = []
    while True:
        try:
            sizes.append(next(pieces))
        except StopIteration as end:
            return end.value, sizes


@pytest.mark.parametrize("nbytes", [1, copies.PIECE_BYTES - 1, copies.PIECE_BYTES, 3 * copies.PIECE_BYTES + 7])
def test_a_block_and_its_checksum(nbytes):
    block = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    place, back = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    seed = copies.tag_seed("w", "r", "layout", 16)
    saved, sizes = drive_copy(copies.save_part(block, place, seed, 3))
    assert sum(sizes) == nbytes and max(sizes) <= copies.PIECE_BYTES
    assert (place == block).all()
    assert drive_copy(copies.load_part(place, back, seed, 3))[0] == saved
    assert (back == block).all()
    place[nbytes // 2] ^= 16
    assert drive_copy(copies.load_part(place, back, seed, 3))[0] != saved


def test_every_tag_is_part_of_the_checksum():
    block, place = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    tags = [("w", "r", "l", 1), ("x", "r", "l", 1), ("w", "s", "l", 1), ("w", "r", "m", 1), ("w", "r", "l", 2)]
    sums = {drive_copy(copies.save_part(block, place, copies.tag_seed(*each), 0))[0] for each in tags}
    sums.add(drive_copy(copies.save_part(block, place, copies.tag_seed(*tags[0]), 1))[0])
    assert len(sums) == 6
