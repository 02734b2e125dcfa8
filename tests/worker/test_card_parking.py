"""Parking on a card: images move beside the loop, through streams that run late, at once or at random (the fake driver)."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_worker.card_image import CardPieces
from gpu_worker.device.arena_pins import ArenaPins
from gpu_worker.device.card_copies import BATCH_PARTS, BATCHES, Part, checksum_kernel, runs
from gpu_worker.device.copies import Abandoned
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
from tests.cuda.fake.torch_on_card import in_host_memory
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
        self.cells = in_host_memory(self._memory).numpy().reshape(num_blocks, block_bytes)  # the fake card's memory is the host's
        self.states = in_host_memory(self._states).numpy()[: slots * state_bytes].reshape(slots, state_bytes)
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


@contextmanager
def busy(card: SimpleNamespace) -> Iterator[None]:
    """Within it, whatever the card was given is under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card.card.drv.Event, "query", lambda _event: False)
        yield


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
    with busy(card):
        assert [next(saving) for _ in range(BATCHES)] == [BATCH_PARTS * 4096] * (BATCHES - 1) + [0]
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


@lazily
def test_one_that_fails_and_is_abandoned_still_waits_for_the_card(card, new_memory, monkeypatch):
    pool = CardPool(card, 2 * BATCH_PARTS, block_bytes=4096)
    memory = new_memory(pool)
    blocks = tuple(range(2 * BATCH_PARTS))
    image = memory.save(blocks)
    loading = memory.pieces.load(Load("r", 1, blocks, 0), image, memory.pins)
    with busy(card):
        assert next(loading) == BATCH_PARTS * 4096
        monkeypatch.setattr(memory.pins, "ready", lambda _slabs: False)
        assert next(loading) == 0
        assert loading.throw(Abandoned()) == 0
    assert not led(loading)


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
    for each in environ.MODES:
        environ.configure(mode=each)
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
                found.append(each)
            card.synchronize()
        memory.pieces.close()
        card.close()
    environ.configure(cards=0)
    return found


def test_a_removed_wait_is_found(fake_driver, monkeypatch):
    assert wrong_without(monkeypatch, "nothing") == []
    assert "lazy" in wrong_without(monkeypatch, "wait")
    assert "lazy" in wrong_without(monkeypatch, "query")


@lazily
def test_a_slab_is_not_let_go_of_while_a_copy_is_under_way_there(card, new_memory):
    pool = CardPool(card, 12)
    memory = new_memory(pool)
    cells, _ = pool.write(seed=1)
    image = memory.save((0, 1, 2))
    slab = image.offsets[0] // SLAB_BYTES
    loading = memory.pieces.load(Load("r", 1, (5, 6, 7), 0), image, memory.pins)
    with busy(card):
        assert next(loading) == 300_000
        memory.pins.drop(slab)
        registered = card.card.registered_bytes
        assert memory.pins.ready([slab]) is None  # who wants it now waits until it was let go of
    assert led(loading) and (pool.cells[5:8] == cells[:3]).all()
    while memory.pins.dropped() != [slab]:
        pass
    assert card.card.registered_bytes == registered - SLAB_BYTES
    memory.pins.drop(60)  # not page-locked: there is nothing to undo
    while memory.pins.dropped() != [60]:
        pass
    assert card.card.registered_bytes == registered - SLAB_BYTES


# with the host cache ---------------------------------------------------------------------------------------------------
@pytest.fixture
def cache(tmp_path):
    with HostCache(tmp_path / "run") as cache:
        yield cache


@pytest.fixture
def new_parking(card):
    """Makes a Parking that has attached, and closes it before the card is."""
    made: list[Parking] = []

    def new(cache: HostCache, pool: CardPool, name: str = "cuda0-1-1") -> Parking:
        pieces = CardPieces(card.card, pool, name, checksum_kernel(card.card), card.torch.zeros)
        made.append(Parking(None, cache.path, name, time.monotonic, pieces))
        wait(made[-1], lambda: made[-1].connected)
        return made[-1]

    yield new
    for parking in made:
        parking.close()
    assert card.card.registered_bytes == 0


def reserve(parking: Parking, num_blocks: int, ask: int = 1) -> int:
    """The lease."""
    parking.act(Reserve(ask=ask, request_id="r", num_blocks=num_blocks), time.monotonic())
    (granted,) = wait(parking, LeaseGranted)
    return granted.lease


def save(parking: Parking, lease: int, blocks: tuple[int, ...]) -> bool:
    parking.act(Save("r", lease, blocks, len(blocks) * 16), time.monotonic())
    (saved,) = wait(parking, Saved)
    return saved.ok


def load(parking: Parking, lease: int, blocks: tuple[int, ...], first: int = 0) -> bool:
    parking.act(Load("r", lease, blocks, first), time.monotonic())
    (loaded,) = [event for event in wait(parking, Loaded) if isinstance(event, Loaded)]
    return loaded.ok


def enqueue(parking: Parking) -> None:
    """Go on with the copies until something of each was enqueued: their slabs are page-locked by then."""
    while not all(copy.nbytes for copy in parking._copies):
        parking.copy(1)


def told(events: list) -> list:
    return [event if isinstance(event, HostCacheLost) else (type(event), event.request_id, event.ok) for event in events]


def test_a_park_and_a_resume(cache, card, new_parking):
    pool = CardPool(card, 40)
    parking = new_parking(cache, pool)
    cells, _ = pool.write(seed=1)
    lease = reserve(parking, 5)
    assert save(parking, lease, (3, 1, 4, 15, 9))
    assert card.card.registered_bytes == 16 << 20  # the slab: all of this small arena
    pool.write(seed=2)
    assert load(parking, lease, (30, 31, 32, 33, 34)) and (pool.cells[30:35] == cells[[3, 1, 4, 15, 9]]).all()
    parking.act(ReleaseLease(lease=lease), time.monotonic())
    assert cache.budget().used_bytes == 0


@lazily
def test_a_slab_is_let_go_of_before_its_memory_goes_and_page_locked_again_when_it_is_used_again(cache, card, new_parking):
    pool = CardPool(card, 10)
    parking = new_parking(cache, pool)
    for seed in (1, 2):
        cells, _ = pool.write(seed)
        lease = reserve(parking, 3, ask=seed)
        assert save(parking, lease, (0, 1, 2))
        assert load(parking, lease, (5, 6, 7)) and (pool.cells[5:8] == cells[:3]).all()
        assert card.card.registered_bytes == 16 << 20
        parking.act(ReleaseLease(lease=lease), time.monotonic())
        assert wait(parking, lambda: cache.budget().held_bytes == 0) == []  # it has answered Reclaim
        assert card.card.registered_bytes == 0


@lazily
def test_reclaimed_is_said_when_the_slab_has_been_let_go_of(cache, card, new_parking, monkeypatch):
    parking = new_parking(cache, CardPool(card, 4))
    lease = reserve(parking, 1)
    assert save(parking, lease, (0,))
    parking.act(ReleaseLease(lease=lease), time.monotonic())
    may, unregister = threading.Event(), Card.unregister
    monkeypatch.setattr(Card, "unregister", lambda self, at: (may.wait(30), unregister(self, at)))
    try:
        wait(parking, lambda: bool(parking._reclaims))
        assert parking.wait_s(0.0) == POLL_S
        parking.poll(time.monotonic())
        assert cache.budget().held_bytes == 16 << 20
    finally:
        may.set()
    wait(parking, lambda: cache.budget().held_bytes == 0)
    assert not parking._reclaims


@lazily
def test_a_slab_that_cannot_be_page_locked_is_a_failed_save_and_tried_again(cache, card, new_parking, monkeypatch, caplog):
    parking = new_parking(cache, CardPool(card, 4))
    lease = reserve(parking, 2)
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise CardError("cuMemHostRegister_v2: out of memory (2)")

        patch.setattr(Card, "register", refuse)
        assert not save(parking, lease, (0, 1))
    assert "cannot be page-locked" in caplog.text
    assert save(parking, lease, (0, 1))


@lazily
def test_a_lease_released_while_the_card_copies_goes_back_when_the_copy_ends(cache, card, new_parking):
    """A cancel of one that is parking, and of one that is resuming."""
    parking = new_parking(cache, CardPool(card, 10))
    lease, other = reserve(parking, 2, 1), reserve(parking, 2, 2)
    assert save(parking, other, (0, 1))
    parking.act(Save("r", lease, (2, 3), 32), time.monotonic())
    parking.act(Load("r", other, (5, 6), 0), time.monotonic())
    with busy(card):
        enqueue(parking)
        for each in (lease, other):
            parking.act(ReleaseLease(lease=each), time.monotonic())
        parking.poll(time.monotonic())
        assert parking.copy(1) == [] and cache.budget().leases == 2
    events = []
    while parking.copying:
        events += parking.copy(1)
    assert sorted(told(events), key=str) == [(Loaded, "r", True), (Saved, "r", True)]
    parking.poll(time.monotonic())
    assert cache.budget().leases == 0


@lazily
def test_the_host_caches_death_ends_copies_when_the_card_has_ended(cache, card, new_parking):
    pool = CardPool(card, 40)
    parking = new_parking(cache, pool)
    cells, _ = pool.write(seed=1)
    saved, empty, late = (reserve(parking, 3, ask) for ask in range(3))
    assert save(parking, saved, (0, 1, 2))
    now = time.monotonic()
    parking.act(Save("saving", empty, (3, 4, 5), 48), now)
    parking.act(Load("loading", saved, (6, 7, 8), 0), now)
    with busy(card):
        enqueue(parking)
        parking.act(Save("not begun", late, (9, 10, 11), 48), now)
        before = environ.counters()["copies"]
        cache.kill()
        assert told(parking.poll(now)) == [HostCacheLost(), (Saved, "not begun", False)]
        cache.start()
        assert parking.poll(now + 60) == [] and parking.fileno() is None  # the card could still write into the arena
    events = []
    while parking.copying:
        events += parking.copy(1 << 30)
    assert sorted(told(events), key=str) == [(Loaded, "loading", False), (Saved, "saving", False)]
    assert environ.counters()["copies"] == before  # nothing was begun any more
    assert wait(parking, lambda: parking.connected) == []
    assert not load(parking, saved, (6, 7, 8))
    again = reserve(parking, 3, 4)
    assert save(parking, again, (0, 1, 2)) and load(parking, again, (20, 21, 22))
    assert (pool.cells[20:23] == cells[:3]).all()
    assert cache.budget().leases == 1


@lazily
def test_a_stored_arena_comes_back_with_its_images(tmp_path, card, new_parking):
    with HostCache(tmp_path / "run", store=True) as cache:
        pool = CardPool(card, 40)
        parking = new_parking(cache, pool)
        cells, _ = pool.write(seed=1)
        kept, saving = reserve(parking, 3, 1), reserve(parking, 3, 2)
        assert save(parking, kept, (0, 1, 2))
        parking.act(Save("s", saving, (3, 4, 5), 48), time.monotonic())
        with busy(card):
            enqueue(parking)
            cache.kill()
            assert parking.poll(time.monotonic()) == []
        (ended,) = wait(parking, Saved)
        assert (ended.request_id, ended.ok) == ("s", False)
        assert load(parking, kept, (6, 7, 8)) and (pool.cells[6:9] == cells[:3]).all()  # its bytes are still mapped
        cache.start()
        assert wait(parking, lambda: parking.connected) == []
        assert cache.budget().leases == 1
        assert load(parking, kept, (9, 10, 11)) and (pool.cells[9:12] == cells[:3]).all()
        parking.close()


@lazily
def test_closing_waits_for_the_card_and_lets_go_of_everything(cache, card, new_parking):
    parking = new_parking(cache, CardPool(card, 10))
    lease, other = reserve(parking, 3, 1), reserve(parking, 3, 2)
    assert save(parking, other, (0, 1, 2))
    parking.act(Save("r", lease, (3, 4, 5), 48), time.monotonic())
    parking.act(Load("r", other, (6, 7, 8), 0), time.monotonic())
    with busy(card):
        enqueue(parking)
        parking.close()
    assert card.card.registered_bytes == 0
    cache.until(lambda figures: figures.leases == 0)


@lazily
def test_copies_take_from_the_first_one_enqueued_to_the_event_that_was_seen(cache, card, new_parking):
    parking = new_parking(cache, CardPool(card, 10))
    lease = reserve(parking, 2)
    assert save(parking, lease, (0, 1))  # page-locks the slab
    now = 100.0
    parking._clock = lambda: now
    parking.act(Load("r", lease, (5, 6), 0), 0.0)
    now += 5  # waiting its turn
    assert parking.copy(1) == []
    now += 0.25  # a step is run
    events = []
    while not events:
        events = parking.copy(1)
    assert events == [Loaded("r", True, 200_000, 0.25)]


@lazily
def test_while_the_card_copies_the_loop_looks_now_and_then(cache, card, new_parking):
    """It neither spins nor waits for a heartbeat, and one copy that waits does not keep the next from going on."""
    parking = new_parking(cache, CardPool(card, 10))
    first, second = reserve(parking, 2, 1), reserve(parking, 2, 2)
    assert save(parking, first, (0, 1))
    assert not parking.waiting
    with busy(card):
        parking.act(Save("r", second, (2, 3), 32), 0.0)
        assert parking.copying and not parking.waiting  # go on at once
        parking.copy(1)
        assert not parking.waiting
        parking.act(Load("r", first, (5, 6), 0), 0.0)
        assert parking.copy(1 << 30) == [] and not parking.waiting  # the load was enqueued behind the save that waits
        assert parking.copy(1 << 30) == [] and parking.waiting
        assert parking.wait_s(0.0) == POLL_S
    events = []
    while parking.copying:
        events += parking.copy(1)
    assert [event.ok for event in events] == [True, True]
    assert parking.poll(0.0) == [] and not parking.waiting and parking.wait_s(0.0) is None
