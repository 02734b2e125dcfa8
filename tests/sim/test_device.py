"""The shadow cells do notice: a stale, torn, missing or foreign cell changes the text."""

import random

from gpu_worker.policy.events import Load, Reserve, Row, Save
from sim.device import Device, Reference
from sim.hostcache import BLOCK_BYTES, HostCache
from wire.messages import Sampling

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def row(tokens: list[int], start: int, blocks: list[int]) -> Row:
    return Row("a", tokens, start, len(tokens) - start, blocks, True, Sampling(seed=1), len(PROMPT))


def device() -> Device:
    return Device(8, 4, 0, random.Random(1))


def text(dev: Device, blocks: list[int], steps: int, harm=lambda step: None) -> list[int]:
    """Decode; `harm(step)` is called before each step."""
    tokens = list(PROMPT)
    start = 0
    for step in range(steps):
        harm(step)
        result = dev.run(row(tokens, start, blocks))
        start = len(tokens)
        tokens += result.tokens
    return tokens[len(PROMPT) :]


def test_chunks_and_scattered_blocks_give_the_reference():
    reference = Reference(PROMPT, 6, frozenset(), 0).output
    assert text(device(), [3, 0, 7, 5], 6) == reference
    dev = device()
    dev.run(Row("a", PROMPT, 0, 5, [1, 2, 3, 4], False, Sampling(seed=1), len(PROMPT)))
    assert dev.run(row(PROMPT, 5, [1, 2, 3, 4])).tokens == reference[:1]


def test_one_wrong_cell_changes_the_text():
    reference = Reference(PROMPT, 12, frozenset(), 0).output
    dev = device()
    blocks = [0, 1, 2, 3, 4, 5]

    def overwrite(step):
        if step == 3:
            dev.cells[2] += 1

    assert text(dev, blocks, 12, overwrite)[:3] == reference[:3]
    dev = device()
    assert text(dev, blocks, 12, overwrite) != reference


def test_a_save_moves_half_at_its_start_and_half_at_its_end():
    dev, cache = device(), HostCache(10 * BLOCK_BYTES, 4)
    before = list(dev.cells)
    lease = cache.reserve(Reserve(1, "a", 2))
    save = Save("a", lease, (3, 1), 6)
    assert cache.save_half(save, dev, first=True)
    dev.cells[12] = dev.cells[4] = 0  # one cell of each half changes while the copy runs
    assert cache.save_half(save, dev, first=False)
    assert cache.leases[lease].cells[:6] == [before[12], before[13], before[14], before[15], 0, before[5]]
    assert cache.load_half(Load("a", lease, (6, 7), 0), dev, first=True)
    assert cache.load_half(Load("a", lease, (6, 7), 0), dev, first=False)
    assert dev.cells[24:28] == before[12:16]


def test_the_budget_is_strict_and_an_image_belongs_to_its_owner():
    dev, cache = device(), HostCache(3 * BLOCK_BYTES, 4)
    lease = cache.reserve(Reserve(1, "a", 2))
    assert cache.reserve(Reserve(2, "b", 2)) is None
    assert not cache.load_half(Load("b", lease, (0, 1), 0), dev, first=True)
    assert not cache.load_half(Load("a", lease, (0, 1), 0), dev, first=True), "nothing was saved yet"
    cache.release(lease)
    assert cache.used_bytes == 0
