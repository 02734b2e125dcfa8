"""The worker's end of the host cache: leases, copies in bounded pieces, deadlines, the loss and return of the arena.

It carries the scheduler's actions out and answers with events; what to park and what a denial means is decided there.
The worker's loop leads the copies, through `copy`: on the CPU it copies itself, a card copies beside it. Nothing here blocks
but `close`.

A lease has two numbers: the host cache's, which may come again after its restart, and one that this worker never gives twice
and that the scheduler knows.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from gpu_worker.device.copies import image_checksum
from gpu_worker.hostcache_socket import HostCacheGone, HostCacheSocket, fitting
from gpu_worker.image import BlockStore, Copy, Image, ImageCopies, MappedArena, Pieces
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
from wire import arena, failpoints, messages
from wire.messages import Attached, Denied, Granted, HeldLease, Reclaim

DEADLINE_S = 1.0  # of an ask
RECONNECT_S = 0.5
RETRY_S = 0.05  # between tries to send to a host cache that does not read
POLL_S = 0.001  # between looks at copies that all wait for their device
RETURN_S = 5.0  # how long images wait for a stored arena to come back with its host cache

log = logging.getLogger("parkade")


@dataclass
class Ask:
    """A Reserve without an answer so far."""

    message: messages.Reserve
    deadline: float


class Parking:
    """Owns the connection, the mapping of the arena, the leases of this worker and the copies under way."""

    def __init__(
        self,
        kv: BlockStore | None,
        path: str,
        worker_identity: str,
        clock: Callable[[], float],
        device: ImageCopies | None = None,
    ) -> None:
        """`path`: the host cache's socket, which need not exist; `worker_identity`: name-pid-boot; `clock`: monotonic seconds;
        `device`: what copies (None: the loop, from and to `kv`, which is in host memory)."""
        self._device: ImageCopies = device or Pieces(kv, worker_identity)
        self._identity = worker_identity
        self._clock = clock
        self.unit_bytes = self._device.layout.unit_bytes
        self._state_units = self._device.layout.state_units
        self._socket = HostCacheSocket(path)
        self._attached = False
        self.on_attached: Callable[[int], None] = lambda arena_bytes: None  # told each time, with the size of the budget
        self._arena: Attached | None = None  # what is mapped
        self._mapping: MappedArena | None = None
        self._reclaims: list[int] = []  # slabs that the host cache wants back
        self._images: dict[int, Image] = {}  # by the scheduler's number
        self._last_lease = 0
        self._asks: dict[int, Ask] = {}
        self._late: set[int] = set()  # asks that passed their deadline and are still unanswered
        self._copies: deque[Copy] = deque()
        self._stalled = False  # the last `copy` found nothing to do
        self.damaged = 0  # images that could not be loaded as they were saved
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
        self._flush(now)

    def poll(self, now: float) -> list[Event]:
        """What has happened since the last call: answers, deadlines, loss. Reconnects when it is time."""
        if not self._socket.open and now >= self._connect_at and not any(copy.abandoned for copy in self._copies):
            self._connect(now)  # not while the device may still write where the host cache lets others write afterwards
        try:
            for message, fd in self._socket.receive():
                self._heard(message, fd)
        except HostCacheGone as error:
            self._lose(now, str(error))
        self._let_go()
        for ask, waiting in list(self._asks.items()):
            if now >= waiting.deadline:
                self._expire(ask)
        if self._lost_at is not None and now >= self._lost_at:
            self._give_up()
        self._flush(now)
        events, self._events = self._events, []
        return events

    def copy(self, max_bytes: int) -> list[Event]:
        """Go on with the copies under way, oldest first, until `max_bytes` are copied: at most one piece more. One that
        waits for its device lets the next go on."""
        events: list[Event] = []
        copied = 0
        for copy in list(self._copies):
            try:
                while copied < max_bytes and (nbytes := copy.go_on(self._clock)):
                    copied += nbytes
                    if failpoints.armed:
                        failpoints.hit("copy" if isinstance(copy.action, Save) else "load")
            except StopIteration as end:
                self._copies.remove(copy)
                events.append(self._finish(copy, end.value))
            if copied >= max_bytes:
                break
        self._stalled = not copied and not events
        return events

    @property
    def copying(self) -> bool:
        """Whether `copy` has something to do."""
        return bool(self._copies)

    @property
    def waiting(self) -> bool:
        """Whether all copies under way wait for their device."""
        return self._stalled and self.copying

    @property
    def connected(self) -> bool:
        """Whether a Reserve would be sent."""
        return self._attached

    def fileno(self) -> int | None:
        """The socket to wait on for reading, or None. It changes with each connection."""
        return self._socket.fileno()

    def wait_s(self, now: float) -> float | None:
        """Seconds until `poll` has something to do by itself; None: not before the socket is readable."""
        if self._events:
            return 0.0
        times = [waiting.deadline for waiting in self._asks.values()]
        if not self._socket.open:
            times.append(self._connect_at)
        if self._lost_at is not None:
            times.append(self._lost_at)
        if self._socket.backlog:
            times.append(now + RETRY_S)
        if self.waiting or self._reclaims:
            times.append(now + POLL_S)
        return max(0.0, min(times) - now) if times else None

    def close(self) -> None:
        """Unmap the arena, which waits until nothing is copied any more, and end the connection, which gives all leases back."""
        self._abandon(self._copies)
        self._copies.clear()
        self._unmap()
        self._device.close()
        self._disconnect()

    # actions ----------------------------------------------------------------------------------------------------------
    def _reserve(self, action: Reserve, now: float) -> None:
        if not self._attached:
            self._events.append(LeaseDenied(ask=action.ask, reason="no_host_cache"))
        elif self._late:  # it does not answer: do not make every park wait for a second
            self._events.append(LeaseDenied(ask=action.ask, reason="timeout"))
        else:
            nbytes = (action.num_blocks + self._state_units) * self.unit_bytes
            message = messages.Reserve(ask=action.ask, request_id=action.request_id, nbytes=nbytes)
            self._asks[action.ask] = Ask(message, now + DEADLINE_S)
            self._socket.send(message)

    def _save(self, action: Save) -> None:
        image = self._images.get(action.lease)
        if image is None or image.copies or len(action.blocks) + self._state_units > len(image.offsets):
            self._events.append(Saved(request_id=action.request_id, ok=False))
            return
        image.position, image.num_blocks, image.committed, image.checksums = action.position, len(action.blocks), False, []
        self._start(action, image, self._device.save(action, image, self._mapping))

    def _load(self, action: Load) -> None:
        image = self._images.get(action.lease)
        if image is None or not image.committed or action.first + len(action.blocks) > image.num_blocks:
            self._events.append(Loaded(request_id=action.request_id, ok=False))
            return
        self._start(action, image, self._device.load(action, image, self._mapping))

    def _release(self, lease: int) -> None:
        image = self._images.get(lease)
        if image is None:
            return  # void already: the host cache was lost
        if image.copies:
            image.released = True
            return
        del self._images[lease]
        if self._attached:
            self._socket.send(messages.Release(lease=image.number))

    # copies -----------------------------------------------------------------------------------------------------------
    def _start(self, action: Save | Load, image: Image, pieces: Generator[int, None, bool]) -> None:
        image.copies += 1
        self._stalled = False
        self._copies.append(Copy(action, image, pieces, self._device.beside))

    def _finish(self, copy: Copy, ok: bool) -> Event:
        """Book the end of a copy. A save is committed before the scheduler hears of it."""
        image, action = copy.image, copy.action
        image.copies -= 1
        if isinstance(action, Save) and ok:
            failpoints.hit("before_commit")
            image.committed = True
            checksum = image_checksum(image.checksums)
            self._socket.send(messages.Commit(lease=image.number, checksum=checksum, position=action.position))
            if failpoints.armed:
                self._socket.flush()
                failpoints.hit("committed")
        elif not ok and isinstance(action, Load) and not copy.abandoned:
            self.damaged += 1
        if image.released and not image.copies:
            self._release(action.lease)
        return copy.ended(ok)

    # answers ----------------------------------------------------------------------------------------------------------
    def _heard(self, message: messages.FromHostCache, fd: int | None) -> None:
        if not self._attached and not isinstance(message, Attached):
            raise HostCacheGone(f"{type(message).__name__} before Attached")
        match message:
            case Attached():
                self._attach(message, fd)
            case Granted():
                self._granted(message)
            case Denied(ask=ask, reason=reason, used_bytes=used_bytes):
                self._late.discard(ask)
                if self._asks.pop(ask, None):
                    self._events.append(LeaseDenied(ask, reason, *self._budget(used_bytes)))
            case Reclaim(slab=slab):
                self._reclaim(slab)

    def _granted(self, granted: Granted) -> None:
        """A lease of the host cache's. One that nobody waits for any more, or of another size, goes back at once."""
        ask, number, extents = granted.ask, granted.lease, granted.extents
        self._late.discard(ask)
        waiting = self._asks.pop(ask, None)
        if waiting is not None and self._fits(waiting.message.nbytes, extents):
            offsets = [at + skip for at, nbytes in extents for skip in range(0, nbytes, self.unit_bytes)]
            failpoints.hit("granted")
            self._last_lease += 1
            self._images[self._last_lease] = Image(number, extents, offsets)
            self._events.append(LeaseGranted(ask, self._last_lease, *self._budget(granted.used_bytes)))
            return
        self._socket.send(messages.Release(lease=number))
        if waiting is not None:
            log.error("%d bytes were asked for and something else was granted", waiting.message.nbytes)
            self._events.append(LeaseDenied(ask=ask, reason="mismatch"))

    def _budget(self, used_bytes: int) -> tuple[float, int]:
        """The share of the budget in use, and its bytes."""
        budget_bytes = self._arena.arena_bytes
        return (used_bytes / budget_bytes, budget_bytes) if budget_bytes else (1.0, 0)

    def _fits(self, wanted: int, extents: list[tuple[int, int]]) -> bool:
        """Whether the extents are `wanted` bytes of the arena, each a multiple of the unit."""
        end = self._arena.arena_bytes
        inside = all(0 <= at <= end - n and at % arena.PAGE_BYTES == 0 and n % self.unit_bytes == 0 < n for at, n in extents)
        return inside and sum(n for _, n in extents) == wanted

    def _reclaim(self, slab: int) -> None:
        """Let go of a slab in which no lease lies; should one be granted there later, its pages are entered again."""
        if 0 <= slab * self._arena.slab_bytes < self._arena.arena_bytes:
            self._reclaims.append(slab)
            self._mapping.drop(slab)
        else:
            self._socket.send(messages.Reclaimed(slab=slab))

    def _let_go(self) -> None:
        """Answer the reclaims of slabs that have been let go of. One answer for each: a second would stand for the next."""
        if self._mapping is None:
            return
        for slab in self._mapping.dropped():
            if slab in self._reclaims:
                self._reclaims.remove(slab)
                self._socket.send(messages.Reclaimed(slab=slab))

    def _expire(self, ask: int) -> None:
        """No answer in time is a denial. An ask that was never sent is taken back; else its late grant will be released."""
        message = self._asks.pop(ask).message
        self._events.append(LeaseDenied(ask=ask, reason="timeout"))
        if not self._socket.withdraw(message):
            self._late.add(ask)

    # the connection ---------------------------------------------------------------------------------------------------
    def _connect(self, now: float) -> None:
        """Try to connect and say Attach; what goes wrong is tried again after RECONNECT_S."""
        self._connect_at = now + RECONNECT_S
        if not self._socket.connect():
            return
        held = [HeldLease(image.number, image.extents) for image in self._images.values()]
        generation = self._arena.generation if self._arena is not None else 0
        self._socket.send(messages.Attach(self._identity, self.unit_bytes, generation, fitting(held)))
        self._flush(now)

    def _attach(self, attached: Attached, fd: int | None) -> None:
        """The host cache has answered: map its arena, or go on with the one that came back."""
        if fd is None or self._attached or not arena.is_arena(fd, attached.arena_bytes):
            raise HostCacheGone("no arena came with Attached")
        if self._mapping is not None and attached.generation != self._arena.generation:
            self._give_up()
        if self._mapping is None:
            try:
                self._mapping = self._device.map(fd, attached.arena_bytes, attached.slab_bytes)
            except OSError as error:  # a limit on address space: serve without a host cache
                raise HostCacheGone(f"its arena cannot be mapped: {error.strerror}") from None
        kept = set(attached.kept)
        self._images = {lease: image for lease, image in self._images.items() if image.number in kept}
        self._arena, self._attached, self._lost_at = attached, True, None
        used = {at // attached.slab_bytes for image in self._images.values() for at, _ in image.extents}
        for slab in range(-(-attached.arena_bytes // attached.slab_bytes)):
            if slab not in used:  # the host cache may have given it back, and taken it again, while nobody could say Reclaim
                self._mapping.drop(slab)
        log.info("attached to the host cache: arena of %d MiB, %d leases kept", attached.arena_bytes >> 20, len(kept))
        self.on_attached(attached.arena_bytes)

    def _lose(self, now: float, why: str) -> None:
        """The connection has ended: images are void unless their arena is stored and may come back."""
        was_attached, self._connect_at = self._attached, now + RECONNECT_S
        self._disconnect()
        if not was_attached:
            return
        log.warning("host cache lost: %s", why)
        if self._arena.stored:
            self._wait_for_arena(now)
        else:
            self._give_up()

    def _wait_for_arena(self, now: float) -> None:
        """Committed images stay, and may even be loaded: their bytes are verified. What was being saved is void."""
        self._lost_at = now + RETURN_S
        self._events += [LeaseDenied(ask=ask, reason="no_host_cache") for ask in self._asks]
        self._asks.clear()
        self._events += self._abandon(copy for copy in self._copies if isinstance(copy.action, Save))
        self._images = {lease: image for lease, image in self._images.items() if image.committed and not image.released}

    def _give_up(self) -> None:
        """All leases are void; copies under way end with ok=False after the scheduler has heard of it."""
        self._lost_at = None
        self._events.append(HostCacheLost())
        self._asks.clear()
        self._images.clear()
        self._events += self._abandon(self._copies)
        self._unmap()

    def _abandon(self, copies: Iterable[Copy]) -> list[Event]:
        """Stop copies, and the events of those that have ended. What a device has begun ends later, in `copy`: until then
        its blocks are not to be used."""
        ended = []
        for copy in list(copies):
            if copy.abandon():
                self._copies.remove(copy)
                ended.append(copy.ended(False))
        return ended

    def _disconnect(self) -> None:
        self._attached = False
        self._late.clear()
        self._reclaims.clear()
        self._socket.close()

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        self._mapping = self._arena = None

    def _flush(self, now: float) -> None:
        try:
            self._socket.flush()
        except HostCacheGone as error:
            self._lose(now, str(error))
