"""The worker's end of the host cache: leases, copies in bounded pieces, deadlines, the loss and return of the connection.

It carries the scheduler's actions out and answers with events; what to park and what a denial means is decided there.
On the CPU the worker's own loop copies, through `copy`. Nothing here blocks.
"""

import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gpu_worker.device.copies import image_checksum, load_block, save_block, tag_seed
from gpu_worker.policy.events import (
    Event,
    HostCacheLost,
    LeaseDenied,
    LeaseGranted,
    Load,
    Loaded,
    ReleaseLease,
    Reserve,
    Save,
    Saved,
)
from wire import arena, messages
from wire.codec import Decoder, ProtocolError, pack

DEADLINE_S = 1.0  # of an ask
RECONNECT_S = 0.5
RETURN_S = 5.0  # how long a stored arena's images wait for the host cache to come back
MAX_RECEIVE = 64  # datagrams in one poll

log = logging.getLogger("parkade")


class BlockStore(Protocol):
    """What is needed of the pool: `block(i)` is uint8 [block_bytes], a view of the bytes of block i."""

    block_bytes: int

    def block(self, i: int) -> np.ndarray: ...


@dataclass
class Ask:
    """A Reserve without an answer so far."""

    request_id: str
    num_blocks: int
    deadline: float


@dataclass
class Image:
    """A lease, and once it is saved the checksums of its blocks."""

    extents: list[tuple[int, int]]
    seed: int = 0
    checksums: list[int] = field(default_factory=list)
    committed: bool = False
    copies: int = 0  # under way
    released: bool = False  # by the scheduler while a copy was under way: given back when that ends


@dataclass
class Copy:
    """A Save or Load under way. `pieces` yields the bytes of each piece and returns whether all is well."""

    action: Save | Load
    image: Image
    pieces: Generator[int, None, bool]

    def ended(self, ok: bool) -> Event:
        """The event that the scheduler waits for."""
        kind = Saved if isinstance(self.action, Save) else Loaded
        return kind(request_id=self.action.request_id, ok=ok)


class Parking:
    """Owns the socket, the mapping of the arena, the leases of this worker and the copies under way."""

    def __init__(self, kv: BlockStore, path: str, worker_identity: str, clock: Callable[[], float]) -> None:
        """`path`: the host cache's socket, which need not exist; `worker_identity`: name-pid-boot; `clock`: monotonic seconds."""
        self._kv = kv
        self._path = path
        self._identity = worker_identity
        self.unit_bytes = -(-kv.block_bytes // arena.PAGE_BYTES) * arena.PAGE_BYTES
        self._decoder: Decoder[messages.FromHostCache] = Decoder(messages.FromHostCache)
        self._socket: socket.socket | None = None
        self._attached = False
        self._arena: messages.Attached | None = None  # of the mapping
        self._mapping: arena.Mapping | None = None
        self._images: dict[int, Image] = {}
        self._asks: dict[int, Ask] = {}
        self._late: set[int] = set()  # asks that passed their deadline and are still unanswered
        self._copies: deque[Copy] = deque()
        self._outbox: deque[messages.ToHostCache] = deque()
        self._events: list[Event] = []
        self._connect_at = clock()
        self._lost_at: float | None = None  # when images that wait for their arena are given up
        self._connect(self._connect_at)

    # the shell's side -------------------------------------------------------------------------------------------------
    def act(self, action: Reserve | Save | Load | ReleaseLease, now: float) -> None:
        """Start what the scheduler wants; its answer comes from `poll` or `copy`."""
        match action:
            case Reserve():
                self._reserve(action, now)
            case Save():
                self._save(action)
            case Load():
                self._load(action)
            case ReleaseLease(lease=lease):
                self._release(lease)

    def poll(self, now: float) -> list[Event]:
        """What has happened since the last call: answers, deadlines, loss. Reconnects when it is time."""
        if self._socket is None and now >= self._connect_at:
            self._connect(now)
        if self._socket is not None:
            self._receive(now)
        for ask, waiting in list(self._asks.items()):
            if now >= waiting.deadline:
                self._expire(ask)
        if self._lost_at is not None and now >= self._lost_at:
            self._give_up()
        self._flush(now)
        events, self._events = self._events, []
        return events

    def copy(self, max_bytes: int) -> list[Event]:
        """Go on with the copies under way, oldest first, until `max_bytes` are copied: at most one piece more."""
        events: list[Event] = []
        copied = 0
        while self._copies and copied < max_bytes:
            copy = self._copies[0]
            try:
                copied += next(copy.pieces)
            except StopIteration as end:
                self._copies.popleft()
                events.append(self._finish(copy, end.value))
        return events

    @property
    def copying(self) -> bool:
        """Whether `copy` has something to do."""
        return bool(self._copies)

    @property
    def connected(self) -> bool:
        """Whether a Reserve would be sent."""
        return self._attached

    def fileno(self) -> int | None:
        """The socket to wait on for reading, or None. It changes with each connection."""
        return self._socket.fileno() if self._socket is not None else None

    def wait_s(self, now: float) -> float | None:
        """Seconds until `poll` has something to do by itself; None: not before the socket is readable."""
        if self._events:
            return 0.0
        times = [waiting.deadline for waiting in self._asks.values()]
        if self._socket is None:
            times.append(self._connect_at)
        if self._lost_at is not None:
            times.append(self._lost_at)
        if self._outbox and self._socket is not None:
            times.append(now + 0.05)  # the host cache does not read: try again soon
        return max(0.0, min(times) - now) if times else None

    def close(self) -> None:
        """End the connection, which gives all leases back, and unmap the arena."""
        self._drop_copies()
        self._disconnect()
        self._unmap()

    # actions ----------------------------------------------------------------------------------------------------------
    def _reserve(self, action: Reserve, now: float) -> None:
        if not self._attached:
            self._events.append(LeaseDenied(ask=action.ask, reason="no_host_cache"))
        elif self._late:  # it does not answer: do not make every park wait for a second
            self._events.append(LeaseDenied(ask=action.ask, reason="timeout"))
        else:
            self._asks[action.ask] = Ask(action.request_id, action.num_blocks, now + DEADLINE_S)
            self._outbox.append(
                messages.Reserve(ask=action.ask, request_id=action.request_id, nbytes=action.num_blocks * self.unit_bytes)
            )
            self._flush(now)

    def _save(self, action: Save) -> None:
        image = self._images.get(action.lease)
        if image is None or image.copies or len(action.blocks) * self.unit_bytes > sum(nbytes for _, nbytes in image.extents):
            self._events.append(Saved(request_id=action.request_id, ok=False))
            return
        image.seed = self._seed(action.request_id, action.position)
        image.committed = False
        image.checksums = []
        self._start(Copy(action, image, self._save_pieces(action, image)))

    def _load(self, action: Load) -> None:
        image = self._images.get(action.lease)
        if image is None or not image.committed or action.first + len(action.blocks) > len(image.checksums):
            self._events.append(Loaded(request_id=action.request_id, ok=False))
            return
        self._start(Copy(action, image, self._load_pieces(action, image)))

    def _release(self, lease: int) -> None:
        image = self._images.get(lease)
        if image is None:
            return  # void already: the host cache was lost
        if image.copies:
            image.released = True
            return
        del self._images[lease]
        if self._attached:
            self._outbox.append(messages.Release(lease=lease))

    # copies -----------------------------------------------------------------------------------------------------------
    def _start(self, copy: Copy) -> None:
        copy.image.copies += 1
        self._copies.append(copy)

    def _finish(self, copy: Copy, ok: bool) -> Event:
        """Book the end of a copy. A save is committed before the scheduler hears of it."""
        image = copy.image
        image.copies -= 1
        if isinstance(copy.action, Save) and ok:
            image.committed = True
            self._outbox.append(
                messages.Commit(lease=copy.action.lease, checksum=image_checksum(image.checksums), position=copy.action.position)
            )
        if image.released and not image.copies:
            self._release(copy.action.lease)
        return copy.ended(ok)

    def _save_pieces(self, action: Save, image: Image) -> Generator[int, None, bool]:
        for index, number in enumerate(action.blocks):
            place = self._place(image, index)
            image.checksums.append((yield from save_block(self._kv.block(number), place, image.seed, index)))
        return True

    def _load_pieces(self, action: Load, image: Image) -> Generator[int, None, bool]:
        for index, number in enumerate(action.blocks, action.first):
            place = self._place(image, index)
            found = yield from load_block(place, self._kv.block(number), image.seed, index)
            if found != image.checksums[index]:
                log.error("request %s: block %d of its image is damaged; it will be recomputed", action.request_id, index)
                return False
        return True

    def _place(self, image: Image, index: int) -> np.ndarray:
        """The bytes of the image's block `index` in the arena, mapped."""
        skip = index * self.unit_bytes
        for offset, nbytes in image.extents:
            if skip < nbytes:
                self._mapping.populate(offset + skip, self.unit_bytes)
                return self._mapping.view(offset + skip, self._kv.block_bytes)
            skip -= nbytes
        raise IndexError(f"block {index} lies beyond the lease")

    def _seed(self, request_id: str, position: int) -> int:
        return tag_seed(self._identity, request_id, f"{self._kv.block_bytes}", position)

    # answers ----------------------------------------------------------------------------------------------------------
    def _receive(self, now: float) -> None:
        for _ in range(MAX_RECEIVE):
            try:
                payload, fd = arena.receive(self._socket, descriptors=True)
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                return self._lose(now, str(error))
            if not payload:
                return self._lose(now, "it has ended")
            try:
                message = self._decoder.unpack(payload)
                self._heard(message, fd)
            except ProtocolError as error:
                return self._lose(now, str(error))
            finally:
                if fd is not None:
                    os.close(fd)

    def _heard(self, message: messages.FromHostCache, fd: int | None) -> None:
        match message:
            case messages.Attached():
                self._attach(message, fd)
            case messages.Granted(ask=ask, lease=lease, extents=extents):
                self._granted(ask, lease, extents)
            case messages.Denied(ask=ask, reason=reason):
                self._late.discard(ask)
                if self._asks.pop(ask, None):
                    self._events.append(LeaseDenied(ask=ask, reason=reason))
            case messages.Reclaim(slab=slab):
                self._reclaim(slab)

    def _granted(self, ask: int, lease: int, extents: list[tuple[int, int]]) -> None:
        self._late.discard(ask)
        waiting = self._asks.pop(ask, None)
        if waiting is not None and self._fits(waiting, extents) and lease not in self._images:
            self._images[lease] = Image(extents)
            self._events.append(LeaseGranted(ask=ask, lease=lease))
            return
        if lease not in self._images:
            self._outbox.append(messages.Release(lease=lease))
        if waiting is not None:
            log.error("ask %d was granted something else than it asked for", ask)
            self._events.append(LeaseDenied(ask=ask, reason="mismatch"))

    def _fits(self, waiting: Ask, extents: list[tuple[int, int]]) -> bool:
        """Whether the extents are what was asked for and lie in the arena, each a multiple of the unit."""
        end = self._arena.arena_bytes
        inside = all(
            n > 0 and n % self.unit_bytes == 0 and at >= 0 and at % arena.PAGE_BYTES == 0 and at + n <= end for at, n in extents
        )
        return inside and sum(n for _, n in extents) == waiting.num_blocks * self.unit_bytes

    def _reclaim(self, slab: int) -> None:
        """Let go of a slab. No lease of this worker lies in it: the host cache has all of them in its book."""
        start = slab * self._arena.slab_bytes
        if 0 <= start < self._arena.arena_bytes:
            self._mapping.drop(start, min(self._arena.slab_bytes, self._arena.arena_bytes - start))
        self._outbox.append(messages.Reclaimed(slab=slab))

    def _expire(self, ask: int) -> None:
        """No answer in time is a denial. One that was never sent is taken back; else its late grant will be released."""
        waiting = self._asks.pop(ask)
        self._events.append(LeaseDenied(ask=ask, reason="timeout"))
        unsent = messages.Reserve(ask=ask, request_id=waiting.request_id, nbytes=waiting.num_blocks * self.unit_bytes)
        if unsent in self._outbox:
            self._outbox.remove(unsent)
        else:
            self._late.add(ask)

    # the connection ---------------------------------------------------------------------------------------------------
    def _connect(self, now: float) -> None:
        """Try to connect and say Attach; what goes wrong is tried again after RECONNECT_S."""
        self._connect_at = now + RECONNECT_S
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            code = sock.connect_ex(self._path)
        except OSError as error:  # a path that is too long
            code = error.errno or errno.EINVAL
        if code:
            sock.close()
            return
        self._socket = sock
        held = [messages.HeldLease(lease, image.extents) for lease, image in self._images.items()]
        generation = self._arena.generation if self._arena is not None else 0
        self._outbox.append(
            messages.Attach(worker=self._identity, unit_bytes=self.unit_bytes, generation=generation, held=_bounded(held))
        )
        self._flush(now)

    def _attach(self, attached: messages.Attached, fd: int | None) -> None:
        """The host cache has answered: map its arena, or go on with the one that came back."""
        if fd is None or self._attached or not arena.is_arena(fd, attached.arena_bytes):
            raise ProtocolError("no arena came with Attached")
        if self._mapping is not None and attached.generation != self._arena.generation:
            self._give_up()
        if self._mapping is None:
            self._mapping = arena.Mapping(fd, attached.arena_bytes)
        self._images = {lease: image for lease, image in self._images.items() if lease in attached.kept}
        self._arena, self._attached, self._lost_at = attached, True, None
        log.info("attached to the host cache: arena of %d MiB, %d leases kept", attached.arena_bytes >> 20, len(attached.kept))

    def _lose(self, now: float, why: str) -> None:
        """The connection has ended: images are void unless their arena is stored and may come back."""
        if self._attached:
            log.warning("host cache lost: %s", why)
        attached, self._connect_at = self._attached, now + RECONNECT_S
        self._disconnect()
        if not attached:
            return
        if self._arena.stored:
            self._events += [LeaseDenied(ask=ask, reason="no_host_cache") for ask in self._asks]
            self._asks.clear()
            self._wait_for_arena(now)
        else:
            self._give_up()

    def _wait_for_arena(self, now: float) -> None:
        """Committed images stay, and may be loaded: they are verified. What was being saved is void."""
        self._lost_at = now + RETURN_S
        for copy in [copy for copy in self._copies if isinstance(copy.action, Save)]:
            self._copies.remove(copy)
            self._events.append(copy.ended(False))
        self._images = {lease: image for lease, image in self._images.items() if image.committed}

    def _give_up(self) -> None:
        """All leases are void; copies under way end with ok=False after the scheduler has heard of it."""
        self._lost_at = None
        self._events.append(HostCacheLost())
        self._asks.clear()
        self._images.clear()
        self._events += self._drop_copies()
        self._unmap()

    def _drop_copies(self) -> list[Event]:
        ended = [copy.ended(False) for copy in self._copies]
        for copy in self._copies:
            copy.pieces.close()
        self._copies.clear()
        return ended

    def _disconnect(self) -> None:
        self._attached = False
        self._outbox.clear()
        self._late.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        self._mapping = self._arena = None

    def _flush(self, now: float) -> None:
        """Send what can be sent. What the host cache has no room for waits; only its end loses it."""
        while self._outbox and self._socket is not None:
            try:
                arena.send(self._socket, pack(self._outbox[0]))
            except BlockingIOError:
                return
            except OSError as error:
                return self._lose(now, error.strerror or "lost")
            self._outbox.popleft()


def _bounded(held: list[messages.HeldLease]) -> list[messages.HeldLease]:
    """As many leases as fit an Attach; the others are lost."""
    room = arena.MAX_DATAGRAM_BYTES - 1024
    kept: list[messages.HeldLease] = []
    for lease in held:
        room -= 64 + 24 * len(lease.extents)
        if room < 0:
            break
        kept.append(lease)
    return kept
