"""Checksums on the card are those of the twin, however a part is shared out; every byte, place and seed counts."""

import numpy as np
import pytest

from gpu_worker.device.card_checksum import checksum
from tests.kernels import harness

SIZES = [1, 7, 8, 9, 16, 24, 100, 2048, 4096 + 16, 16 * 256 * 3 + 48]


def on_card(memory: np.ndarray, offsets: list[int], sizes: list[int], seeds: list[int], blocks: int) -> list[int]:
    sums = np.zeros(len(sizes), np.uint64)
    args = [sums, memory, np.array(offsets), np.array(sizes, np.int32), np.array(seeds, np.uint64), len(sizes)]
    harness.run("image", "checksum", (len(sizes), blocks), 256, args)
    return [int(value) for value in sums]


@pytest.mark.parametrize("blocks", [1, 3])
def test_parts_of_all_sizes(schedule, blocks):
    rng = np.random.default_rng(5)
    offsets = [int(o) for o in np.cumsum([0, *(size // 16 * 16 + 32 for size in SIZES)])]
    memory = rng.integers(0, 256, offsets[-1], dtype=np.uint8)
    seeds = [int(s) for s in rng.integers(0, 2**64, len(SIZES), dtype=np.uint64)]
    expected = [checksum(memory[o : o + n], s) for o, n, s in zip(offsets, SIZES, seeds, strict=False)]
    assert on_card(memory, offsets[:-1], SIZES, seeds, blocks) == expected
    order = [7, 2, 9, 0]  # any parts, in any order
    assert on_card(memory, *([values[i] for i in order] for values in (offsets, SIZES, seeds)), blocks) == [
        expected[i] for i in order
    ]


def test_the_twin_follows_the_formula():
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    data = np.random.default_rng(6).integers(0, 256, 8 * 70_000 + 3, dtype=np.uint8)  # more than the twin takes at once
    padded = bytes(data) + bytes(5)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    assert checksum(data, 77) == sum(mix(word ^ mix(77 + i * golden & mask)) for i, word in enumerate(words)) & mask


def test_what_makes_another_checksum():
    part = np.random.default_rng(7).integers(0, 256, 4096, dtype=np.uint8)
    whole = checksum(part, 3)
    assert checksum(part.copy(), 3) == whole
    assert checksum(part, 4) != whole
    swapped = part.reshape(-1, 8)[[1, 0, *range(2, 512)]].reshape(-1)
    assert checksum(swapped, 3) != whole
    for at in range(0, 4096, 97):
        damaged = part.copy()
        damaged[at] ^= 1 << at % 8
        assert checksum(damaged, 3) != whole
