"""Images: the bytes of parked sequences in the arena, in parts: one for each block, then the recurrent state cut into units.

Each part lies in a unit of its own, so that a lease may be scattered over the arena. It decides nothing.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gpu_worker.device.copies import load_part, save_part, tag_seed
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


@dataclass
class Copy:
    """A Save or Load under way. `pieces` yields how many bytes each piece has copied and returns whether all is well."""

    action: Save | Load
    image: Image
    pieces: Generator[int, None, bool]
    nbytes: int = 0  # copied so far
    seconds: float = 0.0  # that took, the waits between pieces not counted

    def go_on(self, clock: Callable[[], float]) -> int:
        """Copy one piece; its bytes. StopIteration with whether all is well when there is none left."""
        started = clock()
        try:
            copied = next(self.pieces)
            self.nbytes += copied
            return copied
        finally:
            self.seconds += clock() - started

    def ended(self, ok: bool) -> Event:
        """The event that the scheduler waits for."""
        event = Saved if isinstance(self.action, Save) else Loaded
        return event(self.action.request_id, ok, self.nbytes, self.seconds)


class Pieces:
    """Copies between the device and images, in pieces. An image of n blocks takes n + `state_units` units of `unit_bytes`."""

    def __init__(self, kv: BlockStore, worker_identity: str) -> None:
        self._kv = kv
        self._identity = worker_identity
        self.unit_bytes = -(-kv.block_bytes // arena.PAGE_BYTES) * arena.PAGE_BYTES
        self.state_units = -(-kv.state_bytes // self.unit_bytes)

    def save(self, action: Save, image: Image, mapping: arena.Mapping) -> Generator[int, None, bool]:
        """The pieces of a Save, device to arena; fills in the image's checksums."""
        seed = self._seed(action, image)
        for index, source in enumerate(self._places(action)):
            image.checksums.append((yield from save_part(source, self._place(mapping, image, index, len(source)), seed, index)))
        return True

    def load(self, action: Load, image: Image, mapping: arena.Mapping) -> Generator[int, None, bool]:
        """The pieces of a Load, arena to device. False at the end: a checksum is another."""
        seed = self._seed(action, image)
        blocks = range(action.first, action.first + len(action.blocks))
        state = range(image.num_blocks, len(image.checksums))
        for index, target in zip((*blocks, *state), self._places(action), strict=True):
            found = yield from load_part(self._place(mapping, image, index, len(target)), target, seed, index)
            if found != image.checksums[index]:
                log.error("request %s: part %d of its image is damaged; it will be recomputed", action.request_id, index)
                return False
        return True

    def _places(self, action: Save | Load) -> Iterator[np.ndarray]:
        """Where on the device the parts of an action's image lie."""
        yield from map(self._kv.block, action.blocks)
        if self.state_units:
            state = self._kv.state(action.state_slot)
            yield from (state[start : start + self.unit_bytes] for start in range(0, len(state), self.unit_bytes))

    def _place(self, mapping: arena.Mapping, image: Image, index: int, nbytes: int) -> np.ndarray:
        """The bytes of the image's part `index` in the arena, mapped."""
        mapping.populate(image.offsets[index], self.unit_bytes)
        return mapping.view(image.offsets[index], nbytes)

    def _seed(self, action: Save | Load, image: Image) -> int:
        layout = f"{self._kv.block_bytes}+{self._kv.state_bytes}"
        return tag_seed(self._identity, action.request_id, layout, image.position)
