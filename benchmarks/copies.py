"""What a park and a resume cost in copying: GiB/s with checksum by piece size, and the host cache's time to plan a grant.

`python -m benchmarks.copies`. The blocks are SmolLM2's in bf16 (16 cells, 360 KiB). "first" is a save into memory of the arena
that this process has not touched yet, "warm" every later one. Each figure is the median of the rounds, with the range.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.measures import spread
from gpu_worker.device import copies
from hostcache.budget import Budget
from wire import arena
from wire.messages import Attach, Granted, Release, Reserve

BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 2
UNIT_BYTES = -(-BLOCK_BYTES // arena.PAGE_BYTES) * arena.PAGE_BYTES
PIECES_KIB = (32, 64, 128, 256, 512, 1024)
GIB = 1 << 30


def drain(pieces) -> int:
    """The checksum."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def rate(blocks: np.ndarray, one_block: Callable[[int], object]) -> float:
    """GiB/s of `one_block(i)` over all blocks."""
    began = time.perf_counter()
    for i in range(len(blocks)):
        one_block(i)
    return blocks.nbytes / GIB / (time.perf_counter() - began)


def copy_rates(num_blocks: int, rounds: int) -> None:
    """Print save and load rates by piece size, and those of a copy without checksum."""
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)
    nbytes = num_blocks * UNIT_BYTES
    fd = arena.create(nbytes)
    began = time.perf_counter()
    arena.take(fd, 0, nbytes)
    print(f"take {nbytes >> 20} MiB of the arena: {nbytes / GIB / (time.perf_counter() - began):.1f} GiB/s (by the host cache)")

    def place(i: int) -> np.ndarray:
        mapping.populate(i * UNIT_BYTES, UNIT_BYTES)
        return mapping.view(i * UNIT_BYTES, BLOCK_BYTES)

    def save(i: int) -> int:
        return drain(copies.save_part(blocks[i], place(i), 1, i))

    def load(i: int) -> int:
        return drain(copies.load_part(place(i), blocks[i], 1, i))

    def plain(i: int) -> None:
        place(i)[:] = blocks[i]

    print(f"{'piece':>10} {'first save':>18} {'warm save':>18} {'load':>18}   GiB/s")
    for kib in PIECES_KIB:
        copies.PIECE_BYTES = kib << 10
        found: dict[str, list[float]] = {"first": [], "warm": [], "load": []}
        for _ in range(rounds):
            mapping = arena.Mapping(fd, nbytes)
            found["first"].append(rate(blocks, save))
            found["warm"].append(rate(blocks, save))
            found["load"].append(rate(blocks, load))
            mapping.close()
        print(f"{kib:>6} KiB " + " ".join(f"{spread(values, 1):>18}" for values in found.values()))
    mapping = arena.Mapping(fd, nbytes)
    rate(blocks, plain)
    print(f"copy of whole blocks without checksum: {spread([rate(blocks, plain) for _ in range(rounds)], 1)} GiB/s")
    mapping.close()
    os.close(fd)


def reserve_cost(leases: int, rounds: int) -> None:
    """Print the microseconds of a Reserve and a Release beside `leases` others of random sizes."""
    chance = random.Random(leases)
    budget = Budget(leases * 40 * UNIT_BYTES, 1, lambda slab: None)
    budget.handle(1, Attach("w", UNIT_BYTES), 0.0)
    held: list[int] = []
    reserves, releases, extents = [], [], []
    for number in range(3 * leases + rounds):
        began = time.perf_counter()
        (action,) = budget.handle(1, Reserve(number, "r", chance.randrange(1, 64) * UNIT_BYTES), 0.0)
        between = time.perf_counter()
        if isinstance(action.message, Granted):
            held.append(action.message.lease)
            extents.append(len(action.message.extents))
        if len(held) > leases or not isinstance(action.message, Granted):
            gone = held.pop(chance.randrange(len(held)))
            start = time.perf_counter()
            budget.handle(1, Release(gone), 0.0)
            releases.append(time.perf_counter() - start)
        reserves.append(between - began)
    ordered = sorted(reserves[-rounds:])
    p99 = ordered[rounds * 99 // 100]
    print(
        f"{len(held):>6} leases: reserve {statistics.median(ordered) * 1e6:.0f} us, 99 %: {p99 * 1e6:.0f}, "
        f"release {statistics.median(releases[-rounds:]) * 1e6:.0f} us, "
        f"extents a lease {statistics.mean(extents[-rounds:]):.1f} (most {max(extents[-rounds:])})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    copy_rates(options.blocks, options.rounds)
    for leases in (10, 100, 1000):
        reserve_cost(leases, 1000)


if __name__ == "__main__":
    main()
