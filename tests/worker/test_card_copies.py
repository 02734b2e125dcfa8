"""Images on a card without a host cache: bytes, checksums and order, through streams that run late, at once or at random."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpu_worker.device.card_copies import BATCH_PARTS, BATCHES, Part, runs
from gpu_worker.device.copies import Abandoned
from gpu_worker.device.cuda import Card
from gpu_worker.policy.events import Load, Save
from tests.cuda.fake import environ
from tests.cuda.fake.fixtures import card, fake_driver, mode
from tests.worker.cards import SLAB_BYTES, CardPool, Memory, busy, lazily, led

__all__ = ["card", "fake_driver", "mode"]


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
