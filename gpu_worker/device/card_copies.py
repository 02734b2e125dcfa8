"""Copies of whole parts of images between a card and the page-locked arena, beside the compute stream, each with a checksum.

Saves and loads have a stream each. What is enqueued at a time is a batch: up to BATCH_PARTS parts, their checksums computed
on the card (before a save leaves it, after a load has reached it), and an event. Nobody waits for it: the loop asks later
whether it is over, and blocks change hands only then. The checksum's twin is `card_checksum.py`.

Bytes moved, block-major: each byte crosses the link once and is read once on the card for its checksum; nothing is gathered
and nothing is staged (docs/decisions/0015).
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np

from gpu_worker.device.arena_pins import ArenaPins
from gpu_worker.device.copies import Abandoned
from gpu_worker.device.cuda import Card, Stream
from gpu_worker.device.memory import Allocate
from gpu_worker.device.ops import Ops

BATCH_PARTS = 128  # at about 2 us a copy a turn of the loop enqueues for some .3 ms (not measured on a card)
BATCHES = 4  # under way in each direction: of a 4B model 400 MiB, 7 ms of a fast link, so that it does not run dry


class Part(NamedTuple):
    """A range of bytes that lies in one piece on the card and in one unit of the arena."""

    address: int  # on the card
    nbytes: int  # a multiple of 8
    offset: int  # in the arena
    seed: int  # of its checksum


def runs(parts: Iterable[Part], slab_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(address, offset, bytes) of as few copies as will do: neighbours on both sides are one, but none leaves its slab,
    because slabs are page-locked one by one."""
    address = offset = nbytes = 0
    for part in parts:
        follows = part.address == address + nbytes and part.offset == offset + nbytes and part.offset % slab_bytes
        if nbytes and follows:
            nbytes += part.nbytes
            continue
        if nbytes:
            yield address, offset, nbytes
        address, nbytes, offset, _ = part
    if nbytes:
        yield address, offset, nbytes


class Batch:
    """Room for what a batch needs beside its bytes, in page-locked memory and on the card, and its event. Used over and over."""

    NBYTES = BATCH_PARTS * 28  # [sums u64 | offsets i64 | seeds u64 | bytes i32], BATCH_PARTS of each

    def __init__(self, card: Card, host: np.ndarray, address: int) -> None:
        """`host`: uint8 [NBYTES], page-locked; `address`: of as much on the card."""
        self.host, self.address = host, address
        self.event = card.event()
        self.sums = host[: 8 * BATCH_PARTS].view(np.uint64)
        self.offsets = host[8 * BATCH_PARTS : 16 * BATCH_PARTS].view(np.int64)
        self.seeds = host[16 * BATCH_PARTS : 24 * BATCH_PARTS].view(np.uint64)
        self.nbytes = host[24 * BATCH_PARTS :].view(np.int32)
        self.parts = 0
        self.slabs: set[int] = set()
        self.arena: ArenaPins | None = None  # while it is under way

    def fill(self, parts: list[Part], base: int) -> None:
        """What the kernel reads of `parts`, addresses counted from `base`; the sums begin at zero."""
        self.parts = n = len(parts)
        self.sums[:n] = 0
        self.offsets[:n] = [part.address - base for part in parts]
        self.seeds[:n] = [part.seed for part in parts]
        self.nbytes[:n] = [part.nbytes for part in parts]

    def arguments(self, base: int) -> tuple[int, ...]:
        """Of the kernel `checksum` in cuda/image.cu."""
        sums, offsets, seeds, nbytes = (self.address + part * BATCH_PARTS for part in (0, 8, 16, 24))
        return sums, base, offsets, nbytes, seeds, self.parts


class CardCopies:
    """Owns the batches of both directions. Belongs to the card's thread."""

    def __init__(self, card: Card, ops: Ops, allocate: Allocate, base: int) -> None:
        """`ops`: with the kernel `checksum`; `allocate`: memory on the card; `base`: an address there that parts' addresses
        count from."""
        self._card, self._ops, self._base = card, ops, base
        self._memory = allocate(2 * BATCHES * Batch.NBYTES)
        host = card.pinned(2 * BATCHES * Batch.NBYTES)
        starts = range(0, len(host), Batch.NBYTES)
        batches = [Batch(card, host[at : at + Batch.NBYTES], self._memory.data_ptr() + at) for at in starts]
        self._idle = {True: batches[:BATCHES], False: batches[BATCHES:]}  # by direction: to the arena, or from it
        self._under_way: list[Batch] = []

    def copy(self, parts: Iterable[Part], arena: ArenaPins, to_arena: bool) -> Generator[int, None, list[int] | None]:
        """Copy `parts` to the arena or from it. Yields the bytes of each batch that it has enqueued, 0 where there is nothing
        to do now; returns the parts' checksums when all is over, None if it was Abandoned or the arena cannot be page-locked."""
        left = iter(parts)
        waiting = list(islice(left, BATCH_PARTS))  # the next batch's
        own: deque[Batch] = deque()  # under way, in order
        sums: list[int] | None = []
        try:
            self._after_compute(to_arena)
            while waiting or own:
                if own and own[0].event.query():
                    sums += self._landed(own.popleft(), to_arena)
                    continue
                enqueued = 0
                slabs = {part.offset // arena.slab_bytes for part in waiting}
                ready = arena.ready(slabs)
                if ready is False:
                    sums = None
                    break
                if waiting and ready and self._idle[to_arena]:
                    own.append(self._enqueue(waiting, slabs, arena, to_arena))
                    enqueued = sum(part.nbytes for part in waiting)
                    waiting = list(islice(left, BATCH_PARTS))
                yield enqueued
        except Abandoned:
            sums = None
        while own:  # what the device was asked for must be over before anybody else gets the memory
            if own[0].event.query():
                self._landed(own.popleft(), to_arena)
                continue
            with suppress(Abandoned):  # it is ending already
                yield 0
        return sums

    def close(self) -> None:
        """Wait for everything under way and give back what is owned. Generators that are not at their end must not go on."""
        self._card.synchronize()
        for batch in self._under_way:
            batch.arena.free(batch.slabs)
        self._under_way.clear()
        self._idle.clear()
        self._memory = None

    def _after_compute(self, to_arena: bool) -> None:
        """What is enqueued from now on begins after all work of the compute stream so far: the cells that are saved have
        been written by it, those that are loaded over have been read."""
        self._card.wait(self._stream(to_arena), self._card.record(self._card.compute))

    def _enqueue(self, parts: list[Part], slabs: set[int], arena: ArenaPins, to_arena: bool) -> Batch:
        card, stream, batch = self._card, self._stream(to_arena), self._idle[to_arena].pop()
        arena.hold(slabs)
        batch.arena, batch.slabs = arena, slabs
        self._under_way.append(batch)
        batch.fill(parts, self._base)
        if not to_arena:
            for address, offset, nbytes in runs(parts, arena.slab_bytes):
                card.to_card(address, arena.view(offset, nbytes), stream)
        card.to_card(batch.address, batch.host, stream)
        self._ops.prepare("checksum", (batch.parts,), *batch.arguments(self._base), stream=stream)()  # a block a part
        if to_arena:
            for address, offset, nbytes in runs(parts, arena.slab_bytes):
                card.to_host(arena.view(offset, nbytes), address, stream)
        card.to_host(batch.host[: 8 * batch.parts], batch.address, stream)
        batch.event.record(stream)
        return batch

    def _landed(self, batch: Batch, to_arena: bool) -> list[int]:
        """The checksums of a batch that is over; it can be used again."""
        sums = batch.sums[: batch.parts].tolist()
        batch.arena.free(batch.slabs)
        batch.arena = None
        self._under_way.remove(batch)
        self._idle[to_arena].append(batch)
        return sums

    def _stream(self, to_arena: bool) -> Stream:
        return self._card.saving if to_arena else self._card.loading
