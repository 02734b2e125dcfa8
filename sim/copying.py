"""The host cache and the copies of images in virtual time: a budget that grants or denies, a rate, bounded pieces.

Bytes are only counted. The bounds are those of the worker's loop, which this must not import (it needs a device).
"""

from collections import deque

from msgspec import Struct

from gpu_worker.policy.events import LeaseDenied, LeaseGranted, Load, Loaded, Reserve, Save, Saved
from sim.costs import CostModel

COPY_BYTES_PER_STEP = 4 << 20  # as gpu_worker.worker
COPY_BYTES_IDLE = 64 << 20  # as gpu_worker.worker
PIECE_BYTES = 256 << 10  # as gpu_worker.device.copies


class Copy(Struct):
    """A Save or a Load under way."""

    action: Save | Load
    nbytes: int
    left: int
    bytes_per_s: float  # 0: takes no time
    seconds: float = 0.0

    def seconds_of(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def ended(self) -> Saved | Loaded:
        return (Saved if type(self.action) is Save else Loaded)(self.action.request_id, True, self.nbytes, self.seconds)


class HostCache:
    """Leases, the budget in bytes, and what was copied in and out."""

    def __init__(self, costs: CostModel, budget_bytes: int) -> None:
        self._costs = costs
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.most_used_bytes = 0
        self.saved_bytes = 0
        self.loaded_bytes = 0
        self._leases: dict[int, int] = {}  # bytes
        self._last_lease = 0
        self._copies: deque[Copy] = deque()

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    # leases ---------------------------------------------------------------------------------------------------------------
    def answer(self, ask: Reserve) -> LeaseGranted | LeaseDenied:
        """A grant, if the budget has room for the image."""
        nbytes = self._costs.lease_bytes(ask.num_blocks)
        if self.used_bytes + nbytes > self.budget_bytes:
            return LeaseDenied(ask.ask, "full", self._fill(), self.budget_bytes)
        self.used_bytes += nbytes
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        self._last_lease += 1
        self._leases[self._last_lease] = nbytes
        return LeaseGranted(ask.ask, self._last_lease, self._fill(), self.budget_bytes)

    def release(self, lease: int) -> None:
        self.used_bytes -= self._leases.pop(lease)

    def _fill(self) -> float:
        return self.used_bytes / self.budget_bytes if self.budget_bytes else 1.0

    # copies ---------------------------------------------------------------------------------------------------------------
    def start(self, action: Save | Load) -> None:
        """Behind the copies that are under way."""
        costs = self._costs
        nbytes = costs.image_bytes(len(action.blocks))
        if type(action) is Save:
            self.saved_bytes += nbytes
            rate = costs.save_bytes_per_s
        else:
            self.loaded_bytes += nbytes
            rate = costs.load_bytes_per_s
        self._copies.append(Copy(action, nbytes, nbytes, rate))

    def copy(self, step_s: float | None) -> tuple[float, list[Saved | Loaded]]:
        """Copies of one turn of the loop, in which a step of `step_s` has run, or none. Returns the seconds that the loop has
        spent with it beyond the step, and the events of the copies that have ended."""
        return self._beside(step_s) if self._costs.copy_overlaps else self._between(step_s is not None)

    def _between(self, rows: bool) -> tuple[float, list[Saved | Loaded]]:
        """The loop itself copies, in bounded pieces between its steps. An end is seen by the call after its last piece."""
        allowance = COPY_BYTES_PER_STEP if rows else COPY_BYTES_IDLE
        events: list[Saved | Loaded] = []
        took_s = 0.0
        while self._copies and allowance > 0:
            copy = self._copies[0]
            if not copy.left:
                events.append(self._copies.popleft().ended())
                continue
            nbytes = min(copy.left, -(-allowance // PIECE_BYTES) * PIECE_BYTES)
            seconds = copy.seconds_of(nbytes)
            copy.left -= nbytes
            copy.seconds += seconds
            allowance -= nbytes
            took_s += seconds
        return took_s, events

    def _beside(self, step_s: float | None) -> tuple[float, list[Saved | Loaded]]:
        """Copies run beside the step; without one the loop waits for the oldest."""
        events: list[Saved | Loaded] = []
        left_s = step_s if step_s is not None else self._copies[0].seconds_of(self._copies[0].left)
        took_s = 0.0 if step_s is not None else left_s
        while self._copies:
            copy = self._copies[0]
            need_s = copy.seconds_of(copy.left)
            copy.seconds += min(need_s, left_s)
            if need_s > left_s:
                copy.left -= int(left_s * copy.bytes_per_s)
                break
            left_s -= need_s
            events.append(self._copies.popleft().ended())
        return took_s, events
