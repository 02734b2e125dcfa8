"""KvPool: who owns which block, and which blocks can be found again by the hash of their tokens. It only counts."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

DIGEST_BYTES = 16
ROOT = b""  # the parent of a sequence's first block


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: its tokens and, through `parent`, every token before them. 16 bytes of blake2b.

    Cryptographic on purpose: a collision would give one client the cells of another's text.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


class KvPool:
    """Blocks are free, referenced (by one or more sequences) or reusable: unreferenced, but still found by their digest.

    Reusable blocks are given up least recently used first. `take` prefers free ones.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def free(self) -> int:
        """Blocks that hold nothing anybody could use."""
        return len(self._free)

    @property
    def reusable(self) -> int:
        """Blocks that are only findable."""
        return len(self._reusable)

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._reusable)

    @property
    def used(self) -> int:
        """Referenced blocks, each counted once. This, and nothing else, is what the watermarks are about."""
        return self.num_blocks - len(self._free) - len(self._reusable)

    def blocks_for(self, cells: int) -> int:
        return -(-cells // self.block_size)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks, referenced once. ValueError, and nothing changed, if there are not as many: the caller has to know."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._give_up()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def _give_up(self) -> int:
        """The least recently used findable block, its cells forgotten."""
        block, _ = self._reusable.popitem(last=False)
        del self._block_of[self._digest_of[block]]
        self._digest_of[block] = None
        return block

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of this chain. Changes nothing; `share` them before anything is taken."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these found blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._reusable[block]
            self._refs[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """A referenced block, full and computed, can be found from now on; of two with the same content, the first."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Findable ones go to the young end, the tail of the chain as the older: a chain is found
        from its head, so its tail must go first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._digest_of[block] is None:
                    self._free.append(block)
                else:
                    self._reusable[block] = None

    def check(self) -> None:
        """AssertionError if a block is lost, owned twice or found under a wrong name. Walks the whole pool: for tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._reusable.keys(), "a block is free and reusable"
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} was released too often"
            assert (refs == 0) == (block in free or block in self._reusable), f"block {block} is lost or owned twice"
            digest = self._digest_of[block]
            assert digest is None or self._block_of.get(digest) == block, f"block {block} has a name that leads elsewhere"
            assert digest is not None or block not in self._reusable, f"block {block} is reusable without a name"
            assert digest is None or block not in free, f"block {block} is free but has a name"
        assert len(self._block_of) == sum(1 for digest in self._digest_of if digest is not None), "a name leads to no block"


class Leaving:
    """What becomes free when several leave: blocks that nobody else holds, nor is about to take over (`kept`)."""

    def __init__(self, pool: KvPool, kept: Iterable[int] = ()) -> None:
        self.pool = pool
        self.freed = 0
        self._kept = frozenset(kept)
        self._left: dict[int, int] = {}  # block -> how many of its holders leave

    def add(self, blocks: Iterable[int]) -> int:
        """One more leaves. Returns how many blocks that frees."""
        freed = 0
        for block in blocks:
            left = self._left[block] = self._left.get(block, 0) + 1
            freed += left == self.pool.refs(block) and block not in self._kept
        self.freed += freed
        return freed

    def remove(self, blocks: Iterable[int]) -> int:
        """It stays after all. Returns how many blocks are not freed then."""
        lost = 0
        for block in blocks:
            lost += self._left[block] == self.pool.refs(block) and block not in self._kept
            self._left[block] -= 1
        self.freed -= lost
        return lost
