"""Images of parked sequences on a card: which bytes of its pool and its state slots are the parts of an image (see image.py)."""

from collections.abc import Generator, Iterator
from typing import Protocol

from gpu_worker.device.arena_pins import ArenaPins
from gpu_worker.device.card_copies import CardCopies, Part
from gpu_worker.device.cuda import Card
from gpu_worker.device.memory import Allocate
from gpu_worker.device.ops import Ops
from gpu_worker.image import Image, Layout, damaged
from gpu_worker.policy.events import Load, Save

_MASK = 2**64 - 1


class CardStore(Protocol):
    """What is needed of a pool on a card: KvCache has it."""

    num_blocks: int
    block_bytes: int

    @property
    def state_bytes(self) -> int: ...
    @property
    def address(self) -> int: ...  # of block 0
    def state_address(self, index: int) -> int: ...  # of state slot `index`


class CardPieces:
    """Copies between a card and images. A piece is a batch that the card copies beside the loop."""

    beside = True

    def __init__(self, card: Card, kv: CardStore, worker_identity: str, ops: Ops, allocate: Allocate) -> None:
        """`ops`: with the kernel `checksum`; `allocate`: memory on the card."""
        self.layout = Layout(kv, worker_identity)
        self._card, self._kv = card, kv
        self._copies = CardCopies(card, ops, allocate, kv.address)
        self._arenas: list[ArenaPins] = []  # mapped, or still being undone

    def map(self, fd: int, nbytes: int, slab_bytes: int) -> ArenaPins:
        pins = ArenaPins(self._card, fd, nbytes, slab_bytes)
        self._arenas = [*(each for each in self._arenas if not each.ended), pins]
        return pins

    def save(self, action: Save, image: Image, arena: ArenaPins) -> Generator[int, None, bool]:
        sums = yield from self._copies.copy(self._parts(action, image), arena, to_arena=True)
        image.checksums = sums or []
        return sums is not None

    def load(self, action: Load, image: Image, arena: ArenaPins) -> Generator[int, None, bool]:
        sums = yield from self._copies.copy(self._parts(action, image), arena, to_arena=False)
        if sums is None:
            return False
        for index, found in zip(self.layout.numbers(action, image), sums, strict=True):
            if found != image.checksums[index]:
                damaged(action, index)
                return False
        return True

    def close(self) -> None:
        self._copies.close()
        for pins in self._arenas:
            pins.close()
            pins.join()
        self._arenas.clear()

    def _parts(self, action: Save | Load, image: Image) -> Iterator[Part]:
        seed, numbers = self.layout.seed(action, image), self.layout.numbers(action, image)
        for address, nbytes in self._places(action):
            index = next(numbers)
            yield Part(address, nbytes, image.offsets[index], (seed + index) & _MASK)

    def _places(self, action: Save | Load) -> Iterator[tuple[int, int]]:
        """(address, bytes) on the card of the parts of an action's image."""
        kv, pool = self._kv, self._kv.address
        for block in action.blocks:
            if not 0 <= block < kv.num_blocks:
                raise IndexError(f"block {block} of {kv.num_blocks}")
            yield pool + block * kv.block_bytes, kv.block_bytes
        if kv.state_bytes:
            start, unit = kv.state_address(action.state_slot), self.layout.unit_bytes
            for skip in range(0, kv.state_bytes, unit):
                yield start + skip, min(unit, kv.state_bytes - skip)
