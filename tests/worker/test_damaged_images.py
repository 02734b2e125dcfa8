"""A saved image of which anything is another is not loaded: each way to change it, by another process's hand in the arena.

Each is undone afterwards and the image then loads: nothing else was wrong with it.
"""

import os
import time
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest

from gpu_worker.parking import Parking
from gpu_worker.policy.events import Load, Loaded
from tests.hostcache.service import HostCache, Pool, new_parking, wait
from tests.worker.test_parking import load, reserve, save
from wire import arena

BLOCKS, STATE_BYTES = 3, 150_000  # of an image: five parts
TARGETS = (20, 21, 22)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with HostCache(tmp_path_factory.mktemp("damaged") / "run") as cache:
        yield cache


@pytest.fixture
def arena_bytes(cache) -> Iterator[np.ndarray]:
    """The arena as another process has it that attached like a worker: it may write anywhere."""
    sock, attached, fd = cache.attach()
    mapping = arena.Mapping(fd, attached.arena_bytes)
    os.close(fd)
    yield mapping.bytes
    mapping.close()
    sock.close()


@pytest.fixture
def saved(cache) -> Iterator["Saved"]:
    saved = Saved(cache)
    yield saved
    saved.parking.close()


class Saved:
    """Two images of one worker, and one of another worker that has other blocks."""

    def __init__(self, cache: HostCache) -> None:
        self.pool = Pool(40, state_bytes=STATE_BYTES)
        self.parking = new_parking(cache, self.pool)
        self.mine = self._image(self.parking, (0, 1, 2), "mine")
        self.yours = self._image(self.parking, (3, 4, 5), "yours")

    def _image(self, parking: Parking, blocks: tuple[int, ...], request_id: str) -> int:
        lease = reserve(parking, BLOCKS, request_id=request_id)
        assert save(parking, lease, blocks, request_id, state_slot=0)
        return lease

    def parts(self, lease: int) -> list[slice]:
        """Where the parts of an image lie in the arena."""
        sizes = [self.pool.block_bytes] * BLOCKS
        for start in range(0, STATE_BYTES, self.parking.unit_bytes):
            sizes.append(min(self.parking.unit_bytes, STATE_BYTES - start))
        offsets = self.parking._images[lease].offsets
        return [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]

    def loads(self, lease: int, request_id: str, blocks: tuple[int, ...] = TARGETS) -> bool:
        before = self.parking.damaged
        ok = load(self.parking, lease, blocks, request_id=request_id, state_slot=1)
        assert self.parking.damaged == before + (not ok)
        return ok

    def refuses(self, lease: int, request_id: str, view: np.ndarray, change: Callable[[], None]) -> None:
        """It is not loaded while the arena is changed, and is before and afterwards."""
        assert self.loads(lease, request_id)
        before = view.copy()
        change()
        assert (view != before).any()
        assert not self.loads(lease, request_id)
        view[:] = before
        assert self.loads(lease, request_id)
        assert (self.pool.cells[list(TARGETS)] == self.pool.cells[[0, 1, 2] if request_id == "mine" else [3, 4, 5]]).all()


def test_one_bit_anywhere(saved, arena_bytes):
    random = Random(0)
    for part in saved.parts(saved.mine):
        size = part.stop - part.start
        for at in (0, size - 1, *(random.randrange(size) for _ in range(6))):
            bit = np.uint8(1 << random.randrange(8))
            arena_bytes[part.start + at] ^= bit
            assert not saved.loads(saved.mine, "mine"), (part, at, bit)
            assert saved.loads(saved.yours, "yours")
            arena_bytes[part.start + at] ^= bit
    assert saved.loads(saved.mine, "mine")


@pytest.mark.parametrize("number", range(5))
def test_an_inverted_checksum(saved, number):
    """Zeroes may be right by chance, the inverse never is."""
    checksums = saved.parking._images[saved.mine].checksums
    checksums[number] ^= 2**64 - 1
    assert not saved.loads(saved.mine, "mine")
    checksums[number] ^= 2**64 - 1
    assert saved.loads(saved.mine, "mine")


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, 3)], ids=["neighbours", "others", "a block and the state"])
def test_swapped_parts(saved, arena_bytes, one, other):
    parts = saved.parts(saved.mine)

    def swap() -> None:
        a, b = (arena_bytes[part] for part in (parts[one], parts[other]))
        size = min(len(a), len(b))
        a[:size], b[:size] = b[:size].copy(), a[:size].copy()

    saved.refuses(saved.mine, "mine", arena_bytes, swap)


def test_swapped_extents(saved):
    """The bytes are whole; the worker looks for them in each other's place."""
    mine, yours = saved.parking._images[saved.mine], saved.parking._images[saved.yours]
    mine.offsets, yours.offsets = yours.offsets, mine.offsets
    assert not saved.loads(saved.mine, "mine") and not saved.loads(saved.yours, "yours")
    mine.offsets, yours.offsets = yours.offsets, mine.offsets
    assert saved.loads(saved.mine, "mine") and saved.loads(saved.yours, "yours")


@pytest.mark.parametrize("number", range(5))
def test_a_part_of_another_requests_image(saved, arena_bytes, number):
    part, foreign = saved.parts(saved.mine)[number], saved.parts(saved.yours)[number]
    if number >= BLOCKS:  # both have saved the same state: only the seed tells them apart
        arena_bytes[foreign][0] ^= 1
    saved.refuses(saved.mine, "mine", arena_bytes, lambda: np.copyto(arena_bytes[part], arena_bytes[foreign]))


def test_equal_bytes_under_another_request_or_place(saved):
    """Two requests with the same cells: one's image is still not the other's, nor one part another."""
    saved.pool.cells[3:6] = saved.pool.cells[0]
    assert save(saved.parking, saved.yours, (3, 4, 5), "yours", state_slot=0)
    yours = saved.parking._images[saved.yours]
    assert len(set(yours.checksums[:BLOCKS])) == BLOCKS
    assert not saved.loads(saved.yours, "mine") and saved.loads(saved.yours, "yours")
    yours.position += 16
    assert not saved.loads(saved.yours, "yours")


def test_an_older_generation_of_the_same_image(saved, arena_bytes):
    """It was parked, came back, went on and was parked again in the same place; the arena is set back to the first time."""
    older = arena_bytes.copy()
    saved.pool.cells[2, -1000:] ^= 255  # the newest block has grown
    assert save(saved.parking, saved.mine, (0, 1, 2), "mine", state_slot=0)
    saved.refuses(saved.mine, "mine", arena_bytes, lambda: np.copyto(arena_bytes, older))


def test_bytes_in_the_layout_of_another_model(saved, arena_bytes):
    """Keys where values are: the same bytes in another order."""
    part = saved.parts(saved.mine)[1]
    half = saved.pool.block_bytes // 2
    saved.refuses(saved.mine, "mine", arena_bytes, lambda: np.copyto(arena_bytes[part], np.roll(arena_bytes[part], half)))


def test_memory_that_was_emptied(saved, arena_bytes):
    saved.refuses(saved.mine, "mine", arena_bytes, lambda: arena_bytes.fill(0))


def test_what_is_written_while_it_is_loaded(saved, arena_bytes):
    """The sums are of what has come to the device, not of what was in the arena a moment before."""
    random, part = Random(1), saved.parts(saved.mine)[2]
    for _ in range(20):
        pieces = random.randrange(1, 4)
        saved.parking.act(Load("mine", saved.mine, TARGETS, 0, 1), time.monotonic())
        ended = [event for _ in range(pieces) for event in saved.parking.copy(1)]
        arena_bytes[part.start + 5] ^= 64
        if not ended:
            ended = [event for event in wait(saved.parking, Loaded) if isinstance(event, Loaded)]
        assert ended[0].ok == (saved.pool.cells[TARGETS[2]] == saved.pool.cells[2]).all()
        arena_bytes[part.start + 5] ^= 64
