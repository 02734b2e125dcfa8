"""What a section of the check found: figures with what they should be, and how they are shown."""

import time
from collections.abc import Callable, Iterator

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One line of the table. `ok` None: there is nothing that it should be."""

    name: str
    value: str
    wanted: str = ""
    ok: bool | None = None
    data: float | None = None  # the value as a number, in the unit that `value` names


Section = Callable[[], Iterator[Figure]]


def held(name: str, ok: bool, why: str = "") -> Figure:
    """Something that holds, or does not."""
    return Figure(name, "yes" if ok else f"no{': ' if why else ''}{why}", "yes", ok)


def rate(name: str, nbytes: float, seconds: float, floor_bytes_s: float | None = None) -> Figure:
    """Bytes a second; with a floor, the share of it that is reached."""
    found = nbytes / seconds
    if floor_bytes_s is None:
        return Figure(name, f"{found / 1e9:.1f} GB/s", data=found / 1e9)
    share = found / floor_bytes_s
    return Figure(name, f"{found / 1e9:.0f} GB/s, {share:.0%} of the floor's", "70% or more", share >= 0.7, found / 1e9)


def seconds_of(work: Callable[[], None], finish: Callable[[], None], repeats: int, warm: int = 3) -> float:
    """Seconds of one `work` on the card: `repeats` enqueued one after another, then `finish` waits for them."""
    for _ in range(warm):
        work()
    finish()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    finish()
    return (time.perf_counter() - started) / repeats
