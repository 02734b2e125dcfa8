"""Parking on a card: images move beside the loop, through streams that run late, at once or at random (the fake driver)."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_worker.card_image import CardPieces
from gpu_worker.device import card_copies
from gpu_worker.device.arena_pins import ArenaPins
from gpu_worker.device.card_copies import BATCH_PARTS, BATCHES, Part, checksum_kernel, runs
from gpu_worker.device.cuda import Card, CardError
from gpu_worker.image import Image
from gpu_worker.parking import POLL_S, Parking
from gpu_worker.policy.events import (
    HostCacheLost,
    LeaseGranted,
    Load,
    Loaded,
    ReleaseLease,
    Reserve,
    Save,
    Saved,
)
from tests.cuda.fake import environ
from tests.cuda.fake.fixtures import card, fake_driver, mode
from tests.hostcache.service import HostCache, wait
from wire import arena

__all__ = ["card", "fake_driver", "mode"]
SLAB_BYTES = 1 << 20
lazily = pytest.mark.parametrize("mode", ["lazy"], indirect=True)  # copies stay under way until somebody asks for them


class CardPool:
    """A pool of blocks and states in memory of the card. What `written` gets is there when the compute stream has run."""

    def __init__(
        self, gpu: SimpleNamespace, num_blocks: int, block_bytes: int = 100_000, state_bytes: int = 0, slots: int = 4
    ) -> None:
        self.num_blocks, self.block_bytes, self.state_bytes = num_blocks, block_bytes, state_bytes
        self._gpu = gpu
        self._memory = gpu.torch.zeros(num_blocks * block_bytes)
        self._states = gpu.torch.zeros(max(1, slots * state_bytes))
        self.cells = self._memory.numpy().reshape(num_blocks, block_bytes)  # the fake card's memory is the host's
        self.states = self._states.numpy()[: slots * state_bytes].reshape(slots, state_bytes)
        self._staging = gpu.card.pinned(num_blocks * block_bytes + slots * state_bytes)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def state_address(self, index: int) -> int:
        return self._states.data_ptr() + index * self.state_bytes

    def write(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Enqueue new contents on the compute stream, as a step does; what they are: cells and states."""
        at = self.num_blocks * self.block_bytes
        self._gpu.card.synchronize()  # the staging is used again
        self._staging[:] = np.random.default_rng(seed).integers(0, 256, len(self._staging), dtype=np.uint8)
        self._gpu.card.to_card(self.address, self._staging[:at], self._gpu.card.compute)
        if self.state_bytes:
            self._gpu.card.to_card(self._states.data_ptr(), self._staging[at:], self._gpu.card.compute)
        return self._staging[:at].reshape(self.cells.shape).copy(), self._staging[at:].reshape(self.states.shape).copy()


class Memory:
    """An arena without a host cache, and a card that copies to and from it."""

    def __init__(self, gpu: SimpleNamespace, pool: CardPool, nbytes: int = 64 << 20) -> None:
        self.pieces = CardPieces(gpu.card, pool, "cuda0-1-1", checksum_kernel(gpu.card), gpu.torch.zeros)
        fd = arena.create(nbytes)
        self.pins: ArenaPins = self.pieces.map(fd, nbytes, SLAB_BYTES)
        os.close(fd)
        self.unit = self.pieces.layout.unit_bytes

    def image(self, units: int, seed: int = 0) -> Image:
        """Units scattered over the arena, in runs of a few; none crosses the end of a slab."""
        per_slab = SLAB_BYTES // self.unit
        numbers = np.arange(4 * (units // 4 + 17)).reshape(-1, 4)
        np.random.default_rng(seed).shuffle(numbers)
        offsets = [int(n // per_slab * SLAB_BYTES + n % per_slab * self.unit) for n in numbers.ravel()[:units]]
        return Image(1, [(at, self.unit) for at in offsets], offsets)

    def save(self, blocks: tuple[int, ...], state_slot: int = -1, image: Image | None = None) -> Image:
        image = image or self.image(len(blocks) + self.pieces.layout.state_units)
        image.num_blocks, image.position = len(blocks), 16 * len(blocks)
        assert led(self.pieces.save(Save("r", 1, blocks, image.position, state_slot), image, self.pins))
        return image

    def load(self, image: Image, blocks: tuple[int, ...], first: int = 0, state_slot: int = -1, request_id: str = "r") -> bool:
        return led(self.pieces.load(Load(request_id, 1, blocks, first, state_slot), image, self.pins))


def led(pieces) -> bool:
    """Whether all is well at the end."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


@pytest.fixture
def new_memory(card):
    """Makes a Memory, and closes it before the card is."""
    made: list[Memory] = []

    def new(pool: CardPool) -> Memory:
        made.append(Memory(card, pool))
        return made[-1]

    yield new
    for memory in made:
        memory.pieces.close()
    assert card.card.registered_bytes == 0


# copies ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state_bytes", [0, 96, 350_000])  # none, less than a unit, several
def test_what_compute_wrote_last_comes_back_into_other_blocks(card, new_memory, state_bytes):
    pool = CardPool(card, 40, state_bytes=state_bytes)
    memory = new_memory(pool)
    cells, states = pool.write(seed=1)
    image = memory.save((3, 1, 4, 5, 6, 15), state_slot=2)
    places = [memory.pins.view(at, pool.block_bytes) for at in image.offsets[:6]]
    assert (np.array(places) == cells[[3, 1, 4, 5, 6, 15]]).all()
    pool.write(seed=2)  # it may overwrite what was loaded, if a load does not wait for it
    assert memory.load(image, (30, 31, 32, 33, 34, 35), state_slot=1)
    assert (pool.cells[30:36] == cells[[3, 1, 4, 5, 6, 15]]).all() and (pool.states[1] == states[2]).all()
    assert memory.load(image, (20, 21), first=4, state_slot=3)  # the rest was found by hash
    assert (pool.cells[20:22] == cells[[6, 15]]).all() and (pool.states[3] == states[2]).all()
    assert memory.load(image, (), first=6, state_slot=0) and (pool.states[0] == states[2]).all()


def test_images_of_many_batches_in_both_directions_at_once(card, new_memory):
    """Several times as many blocks as can be under way, in blocks of 4 KiB; one image is saved while another is loaded."""
    blocks = BATCH_PARTS * (BATCHES + 1) + 17
    pool = CardPool(card, 3 * blocks, block_bytes=4096)
    memory = new_memory(pool)
    cells, _ = pool.write(seed=1)
    order = np.random.default_rng(0).permutation(3 * blocks)
    first, second, target = (tuple(int(i) for i in part) for part in np.split(order, 3))
    image, other = memory.image(blocks), memory.image(2 * blocks, seed=1)
    other.offsets = [at for at in other.offsets if at not in set(image.offsets)][:blocks]
    memory.save(first, image=image)
    other.num_blocks = blocks
    saving = memory.pieces.save(Save("s", 2, second, 16), other, memory.pins)
    loading = memory.pieces.load(Load("r", 1, target, 0), image, memory.pins)
    ends = together(saving, loading)
    assert ends == [True, True]
    assert (pool.cells[list(target)] == cells[list(first)]).all()
    assert all((memory.pins.view(at, 4096) == cells[block]).all() for at, block in zip(other.offsets, second))


def together(*pieces) -> list[bool]:
    """Lead several copies by turns; whether all is well with each."""
    ends: dict[int, bool] = {}
    while len(ends) < len(pieces):
        for number, each in enumerate(pieces):
            if number not in ends:
                try:
                    next(each)
                except StopIteration as end:
                    ends[number] = end.value
    return [ends[number] for number in range(len(pieces))]


@lazily
def test_what_is_under_way_at_a_time_is_bounded(card, new_memory):
    pool = CardPool(card, BATCH_PARTS * (BATCHES + 2), block_bytes=4096)
    memory = new_memory(pool)
    image = memory.image(pool.num_blocks)
    image.num_blocks = pool.num_blocks
    saving = memory.pieces.save(Save("r", 1, tuple(range(pool.num_blocks)), 16), image, memory.pins)
    while next(saving) == 0:  # its slabs are being page-locked
        pass
    card.card.drv.Event.query, query = lambda _event: False, card.card.drv.Event.query
    try:
        assert [next(saving) for _ in range(BATCHES)] == [BATCH_PARTS * 4096] * (BATCHES - 1) + [0]
    finally:
        card.card.drv.Event.query = query
    assert led(saving)


@lazily
def test_a_damaged_part_an_other_request_and_another_layout_are_found(card, new_memory, caplog):
    pool = CardPool(card, 12, state_bytes=350_000)
    memory = new_memory(pool)
    pool.write(seed=1)
    image = memory.save((0, 1, 2), state_slot=0)
    assert not memory.load(image, (5, 6, 7), state_slot=1, request_id="another")
    assert memory.load(image, (5, 6, 7), state_slot=1)
    for index, size in enumerate([100_000] * 3 + [memory.unit] * 3 + [350_000 - 3 * memory.unit]):
        byte = memory.pins.view(image.offsets[index] + size - 1, 1)
        byte ^= 1
        assert not memory.load(image, (5, 6, 7), state_slot=1)
        assert f"part {index} of its image is damaged" in caplog.text
        byte ^= 1
    image.offsets[0], image.offsets[1] = image.offsets[1], image.offsets[0]
    assert not memory.load(image, (5, 6, 7), state_slot=1)
    image.offsets[0], image.offsets[1] = image.offsets[1], image.offsets[0]
    assert memory.load(image, (5, 6, 7), state_slot=1)
    pool.state_bytes = 350_016
    assert not memory.load(image, (5, 6, 7), state_slot=1)


def test_neighbours_on_both_sides_are_one_copy_within_a_slab():
    parts = [Part(1000 + 100 * i, 100, 400 + 100 * i, 0) for i in range(4)]
    assert list(runs(parts, 1 << 20)) == [(1000, 400, 400)]
    assert list(runs(parts, 600)) == [(1000, 400, 200), (1200, 600, 200)]  # each slab is page-locked alone
    assert list(runs([parts[0], parts[2], parts[1]], 1 << 20)) == [(1000, 400, 100), (1200, 600, 100), (1100, 500, 100)]
    assert list(runs([parts[0], Part(1100, 100, 900, 0)], 1 << 20)) == [(1000, 400, 100), (1100, 900, 100)]
    assert list(runs([], 1 << 20)) == []


def wrong_without(monkeypatch, what: str) -> list[str]:
    """The modes in which a park and a resume go wrong when the card forgets something."""
    from gpu_worker.device import torch_on_card

    found = []
    for mode in environ.MODES:
        environ.configure(mode=mode)
        card = Card(0)
        with monkeypatch.context() as patch:
            match what:
                case "wait":
                    patch.setattr(Card, "wait", lambda *_: None)
                case "query":
                    patch.setattr(card.drv.Event, "query", lambda _event: True)
            gpu = SimpleNamespace(card=card, torch=torch_on_card.TorchOnCard(card))
            pool = CardPool(gpu, 20)
            memory = Memory(gpu, pool)
            cells, _ = pool.write(seed=1)
            image = memory.image(3)
            image.num_blocks = 3
            right = led(memory.pieces.save(Save("r", 1, (0, 1, 2), 48), image, memory.pins))
            right = right and all((memory.pins.view(at, 100_000) == cells[i]).all() for i, at in enumerate(image.offsets[:3]))
            card.synchronize()
            pool.write(seed=2)
            right = led(memory.pieces.load(Load("r", 1, (5, 6, 7), 0), image, memory.pins)) and right
            right = right and (pool.cells[5:8] == cells[:3]).all()
            if not right:
                found.append(mode)
            card.synchronize()
        memory.pieces.close()
        card.close()
    environ.configure(cards=0)
    return found


def test_a_removed_wait_is_found(fake_driver, monkeypatch):
    assert wrong_without(monkeypatch, "nothing") == []
    assert "lazy" in wrong_without(monkeypatch, "wait")
    assert "lazy" in wrong_without(monkeypatch, "query")
