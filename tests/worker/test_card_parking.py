"""Parking on a card with the real host cache: reclaims, losses, cancels and the end, while copies are under way."""

import threading
import time

import pytest

from gpu_worker.card_image import CardPieces
from gpu_worker.device.cuda import Card, CardError
from gpu_worker.device.ops import Ops
from gpu_worker.parking import POLL_S, Parking
from gpu_worker.policy.events import HostCacheLost, LeaseGranted, Load, Loaded, ReleaseLease, Reserve, Save, Saved
from tests.cuda.fake import environ
from tests.cuda.fake.fixtures import card, fake_driver, mode
from tests.hostcache.service import HostCache, wait
from tests.worker.cards import CardPool, busy, lazily

__all__ = ["card", "fake_driver", "mode"]


@pytest.fixture
def cache(tmp_path):
    with HostCache(tmp_path / "run") as cache:
        yield cache


@pytest.fixture
def new_parking(card):
    """Makes a Parking that has attached, and closes it before the card is."""
    made: list[Parking] = []

    def new(cache: HostCache, pool: CardPool, name: str = "cuda0-1-1") -> Parking:
        pieces = CardPieces(card.card, pool, name, Ops(card.card, ["checksum"]), card.torch.zeros)
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
