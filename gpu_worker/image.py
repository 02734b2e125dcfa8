"""Images: the bytes of parked sequences in the arena, in parts: one for each block, then the recurrent state cut into units.

Each part lies in a unit of its own, so that a lease may be scattered over the arena. It decides nothing. How the bytes move is
`Pieces` on the CPU, where the loop itself copies, and `CardPieces` in card_image.py.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gpu_worker.device.copies import Abandoned, load_part, save_part, tag_seed
from gpu_worker.policy.events import Event, Load, Loaded, Save, Saved
from wire import arena

log = logging.getLogger("parkade")


class BlockStore(Protocol):
    """What is needed of the pool: views of block i, uint8 [block_bytes], and of state slot i, uint8 [state_bytes]."""

    block_bytes: int

    @property
    def state_bytes(self) -> int: ...  # 0: sequences have no recurrent state
    def block(self, i: int) -> np.ndarray: ...
    def state(self, i: int) -> np.ndarray: ...


@dataclass
class Image:
    """A lease, and once it is saved what is known of the bytes in it."""

    number: int  # the host cache's
    extents: list[tuple[int, int]]
    offsets: list[int]  # in the arena, of each unit
    position: int = 0
    num_blocks: int = 0  # saved
    checksums: list[int] = field(default_factory=list)  # of its parts
    committed: bool = False
    copies: int = 0  # under way
    released: bool = False  # by the scheduler while a copy was under way: given back when that ends


@dataclass(eq=False)
class Copy:
    """A Save or Load under way. `pieces` yields how many bytes each piece has copied, or has given to a device that copies
    beside the loop (0: nothing to do until the device is further), and returns whether all is well."""

    action: Save | Load
    image: Image
    pieces: Generator[int, None, bool]
    beside: bool = False  # the device copies meanwhile: what counts is the time from the first piece to the end
    nbytes: int = 0  # copied so far
    seconds: float = 0.0  # that took; not `beside`: the waits between pieces not counted
    abandoned: bool = False  # it ends without success as soon as the device has ended
    _began: float | None = None

    def go_on(self, clock: Callable[[], float]) -> int:
        """Copy one piece; its bytes. StopIteration with whether all is well when there is none left."""
        started = clock()
        try:
            copied = next(self.pieces)
            self.nbytes += copied
            return copied
        finally:
            self._measure(started, clock())

    def abandon(self) -> bool:
        """Copy nothing more. Whether it has ended; if not, `go_on` leads it to its end."""
        if self.abandoned:
            return False
        self.abandoned = True
        try:
            self.pieces.throw(Abandoned())
        except (Abandoned, StopIteration):
            return True
        return False

    def ended(self, ok: bool) -> Event:
        """The event that the scheduler waits for."""
        event = Saved if isinstance(self.action, Save) else Loaded
        return event(self.action.request_id, ok, self.nbytes, self.seconds)

    def _measure(self, started: float, now: float) -> None:
        if not self.beside:
            self.seconds += now - started
            return
        if self._began is None and self.nbytes:
            self._began = started
        if self._began is not None:
            self.seconds = now - self._began


class Layout:
    """Which parts an image has, and how they are told apart. An image of n blocks takes n + `state_units` units."""

    def __init__(self, kv: BlockStore, worker_identity: str) -> None:
        self._kv = kv
        self._identity = worker_identity
        self.unit_bytes = -(-kv.block_bytes // arena.PAGE_BYTES) * arena.PAGE_BYTES
        self.state_units = -(-kv.state_bytes // self.unit_bytes)

    def numbers(self, action: Save | Load, image: Image) -> Iterator[int]:
        """The numbers in the image of the parts that an action copies: its blocks, then the state."""
        first = action.first if isinstance(action, Load) else 0
        yield from range(first, first + len(action.blocks))
        yield from range(image.num_blocks, image.num_blocks + self.state_units)

    def seed(self, action: Save | Load, image: Image) -> int:
        """Of the image's checksums."""
        layout = f"{self._kv.block_bytes}+{self._kv.state_bytes}"
        return tag_seed(self._identity, action.request_id, layout, image.position)


class MappedArena(Protocol):
    """What is needed of the arena once it is mapped."""

    def drop(self, slab: int) -> None:
        """Let go of a slab in which no lease lies; `dropped` says when that is done."""

    def dropped(self) -> list[int]:
        """Slabs that were let go of since the last call."""

    def close(self) -> None:
        """Unmap it as soon as no copy is under way there."""


class ImageCopies(Protocol):
    """The copies of one device, as Parking starts them."""

    layout: Layout
    beside: bool  # see Copy

    def map(self, fd: int, nbytes: int, slab_bytes: int) -> MappedArena:
        """Map an arena whose descriptor the caller may then close. OSError."""

    def save(self, action: Save, image: Image, arena: Any) -> Generator[int, None, bool]:
        """The pieces of a Save, device to a mapped arena; fills in the image's checksums."""

    def load(self, action: Load, image: Image, arena: Any) -> Generator[int, None, bool]:
        """The pieces of a Load, arena to device. False at the end: a checksum is another."""

    def close(self) -> None:
        """Wait until nothing is under way and all that was mapped and closed is unmapped."""


class LoopArena:
    """The arena as the loop copies to and from it: the loop lets go of slabs at once."""

    def __init__(self, fd: int, nbytes: int, slab_bytes: int) -> None:
        self.mapping = arena.Mapping(fd, nbytes)
        self._slab_bytes = slab_bytes
        self._dropped: list[int] = []

    def drop(self, slab: int) -> None:
        start = slab * self._slab_bytes
        self.mapping.drop(start, min(self._slab_bytes, self.mapping.nbytes - start))
        self._dropped.append(slab)

    def dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def close(self) -> None:
        self.mapping.close()


class Pieces:
    """Copies between host memory and images, in pieces, by whoever asks for the next one."""

    beside = False

    def __init__(self, kv: BlockStore, worker_identity: str) -> None:
        self._kv = kv
        self.layout = Layout(kv, worker_identity)

    def map(self, fd: int, nbytes: int, slab_bytes: int) -> LoopArena:
        return LoopArena(fd, nbytes, slab_bytes)

    def save(self, action: Save, image: Image, arena: LoopArena) -> Generator[int, None, bool]:
        seed = self.layout.seed(action, image)
        for index, source in zip(self.layout.numbers(action, image), self._places(action), strict=True):
            place = self._place(arena.mapping, image, index, len(source))
            image.checksums.append((yield from save_part(source, place, seed, index)))
        return True

    def load(self, action: Load, image: Image, arena: LoopArena) -> Generator[int, None, bool]:
        seed = self.layout.seed(action, image)
        for index, target in zip(self.layout.numbers(action, image), self._places(action), strict=True):
            found = yield from load_part(self._place(arena.mapping, image, index, len(target)), target, seed, index)
            if found != image.checksums[index]:
                damaged(action, index)
                return False
        return True

    def close(self) -> None:
        pass  # nothing goes on beside the loop

    def _places(self, action: Save | Load) -> Iterator[np.ndarray]:
        """Where on the device the parts of an action's image lie."""
        yield from map(self._kv.block, action.blocks)
        if self.layout.state_units:
            state, unit = self._kv.state(action.state_slot), self.layout.unit_bytes
            yield from (state[start : start + unit] for start in range(0, len(state), unit))

    def _place(self, mapping: arena.Mapping, image: Image, index: int, nbytes: int) -> np.ndarray:
        """The bytes of the image's part `index` in the arena, mapped."""
        mapping.populate(image.offsets[index], self.layout.unit_bytes)
        return mapping.view(image.offsets[index], nbytes)


def damaged(action: Load, index: int) -> None:
    """Say that part `index` of a loaded image is not what was saved."""
    log.error("request %s: part %d of its image is damaged; it will be recomputed", action.request_id, index)
