"""The checksum of a part of an image as a card computes it (cuda/image.cu, `checksum`), for tests and for bytes on the host.

It is another one than device/copies.py has: an image is saved and loaded by the same worker, so the two never meet. A sum has
no order, so thousands of threads can share a part.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)
_CHUNK = 1 << 16  # words at a time, so that the temporaries stay in the processor's cache


def checksum(part: np.ndarray, seed: int) -> int:
    """Sum mod 2**64 over the 8-byte words of `part` (uint8 [n]) of mix64(word ^ mix64(seed + index * golden))."""
    words = np.zeros(-(-len(part) // 8), np.uint64)
    words.view(np.uint8)[: len(part)] = part
    total = 0
    for start in range(0, len(words), _CHUNK):
        piece = words[start : start + _CHUNK]
        index = np.arange(start, start + len(piece), dtype=np.uint64)
        total += int(_mix64(piece ^ _mix64(index * _GOLDEN + np.uint64(seed % 2**64))).sum(dtype=np.uint64))
    return total % 2**64


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST)
