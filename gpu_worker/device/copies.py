"""Copying the parts of an image (see image.py) between device and arena, piece by piece, with a checksum of each part.

The checksum is xxh3_64 with a seed made of the image's tags and the part's number in it, so that whole and right bytes of
another owner, request, layout, position or part are a mismatch too. It is fused with the copy: a piece is hashed while it
is still in the processor's cache.
"""

from collections.abc import Generator, Iterable

import numpy as np
import xxhash

PIECE_BYTES = 256 << 10  # the copy can stop after each

_MASK = 2**64 - 1


class Abandoned(Exception):
    """Thrown into a copy under way: nothing more is to be copied. It may go on to yield 0 while its device has not ended."""


def tag_seed(worker: str, request_id: str, layout: str, position: int) -> int:
    """Seed (64 bits) of an image: who wrote it, for which request, in which layout, at which number of cells."""
    return xxhash.xxh3_64_intdigest("\0".join((worker, request_id, layout, str(position))).encode())


def save_part(part: np.ndarray, arena: np.ndarray, seed: int, index: int) -> Generator[int, None, int]:
    """Copy `part` to `arena` (both uint8 [n]). Yields each piece's bytes; returns the checksum of the image's part `index`."""
    return (yield from _copy(part, arena, part, seed + index))


def load_part(arena: np.ndarray, part: np.ndarray, seed: int, index: int) -> Generator[int, None, int]:
    """Copy `arena` back into `part` (uint8 [n]). Yields each piece's bytes; returns the checksum of what now is in `part`."""
    return (yield from _copy(arena, part, part, seed + index))


def image_checksum(checksums: Iterable[int]) -> int:
    """One number (63 bits) for all parts' checksums in order."""
    return xxhash.xxh3_64_intdigest(np.fromiter(checksums, np.uint64).tobytes()) >> 1


def _copy(source: np.ndarray, target: np.ndarray, hashed: np.ndarray, seed: int) -> Generator[int, None, int]:
    digest = xxhash.xxh3_64(seed=seed & _MASK)
    for start in range(0, len(hashed), PIECE_BYTES):
        end = min(start + PIECE_BYTES, len(hashed))
        target[start:end] = source[start:end]
        digest.update(hashed[start:end])
        yield end - start
    return digest.intdigest()
