"""What a park costs when its cells are saved, and when they are computed again: as measured, from events alone, so that a journal
replays to the same choices. This is `--park-mode auto`; the other modes only name their reason here.

    copying       image bytes * (seconds to save one + missing * seconds to load one), the state of a hybrid in full
    recomputing   the cells that are missing, each at the seconds per prefill token of its depth
    missing       the share of its cells that one parked for this kind of reason does not find again by hash when it comes back
    worth         (recomputing - copying) seconds per byte and second that the image is likely to stay in the budget
    price         a quarter of the mean worth of late parks * how far the budget is beyond half with this image (0 to 1)

Recompute if copying is not cheaper (`copy_dearer`), or if it is worth less than the price (`budget_dear`); else save (`cheaper`).
Every mean fades: what was seen last counts most. What is not tried because it is dear looks a little less dear each time, or one
slow copy would end all copying; the farther from worthwhile, the longer that takes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from gpu_worker.policy.events import Choice, Row
from gpu_worker.policy.limits import Limits
from wire.messages import DEFAULT_PARK_S, ParkKind

FADE = 7 / 8  # what is left of the older ones with each that is added: the last eight count for two thirds
LESS_DEAR = 0.98  # with each park that is recomputed because a copy is dearer
PREFILL_TOKENS = 16  # of a step, or it says nothing of prefills
SHALLOW_BITS = 8  # cells below 256 count as equally deep
STAY_S = {"pressure": 1.0, "forced": 1.0, "explicit": DEFAULT_PARK_S}  # before one of that kind has come back
LEAST_STAY_S = 1e-3
PRICE = 0.25  # of the mean worth, in a full budget: at the whole of it, half of the images are refused though there is room


@dataclass(slots=True)
class Mean:
    """A fading mean: `total` per `weight`, None before anything was added."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float = 1.0) -> None:
        self.total = self.total * FADE + total
        self.weight = self.weight * FADE + weight

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


class Ask(Struct, frozen=True):
    """A Reserve without an answer so far."""

    nbytes: int
    released: int  # bytes that had been released before it was sent


class ParkCost:
    """Feed it what has happened; `choose` answers for one park. Seconds, bytes, cells."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._save = Mean()  # seconds per byte
        self._load = Mean()
        self._prefill: dict[int, Mean] = {}  # by bits of the depth: seconds per token
        self._decode: dict[int, Mean] = {}  # by bits of the number of decodes: seconds of a step without prefill
        # share of the cells; before anything is known, one that finds nothing
        self._missing: dict[str, Mean] = {kind: Mean(1.0, 1.0) for kind in STAY_S}
        self._stay: dict[str, Mean] = {kind: Mean() for kind in STAY_S}
        self._worth = Mean()  # seconds saved per byte and second in the budget
        self._asks: dict[int, Ask] = {}
        self._budget_bytes = 0  # 0: not told so far
        self._fill = 0.0  # of the budget, at the last answer
        self._released = 0  # bytes, ever
        self._released_before = 0  # when what was answered last was asked

    # what has happened ----------------------------------------------------------------------------------------------------
    def stepped(self, rows: Iterable[Row], seconds: float) -> None:
        """A step of these rows took so long; 0: not measured. Its decodes are taken to cost what they cost without a prefill
        beside them. Only `auto` asks for it."""
        if not seconds or self.limits.park_mode != "auto":
            return
        prefills = []
        decodes = tokens = 0
        for row in rows:
            if row.count == 1:
                decodes += 1
            else:
                prefills.append(row)
                tokens += row.count
        if not prefills:
            self._decode.setdefault(decodes.bit_length(), Mean()).add(seconds)
        elif tokens >= PREFILL_TOKENS:
            beside = _nearest(self._decode, decodes.bit_length()) if decodes else 0.0
            if beside is not None:
                each = max(0.0, seconds - beside) / tokens
                for row in prefills:
                    mean = self._prefill.setdefault(_depth(row.start + row.count // 2), Mean())
                    mean.add(each * row.count, row.count)

    def saved(self, nbytes: int, seconds: float) -> None:
        """A save has copied so much in so long; 0: not measured."""
        if nbytes and seconds:
            self._save.add(seconds, nbytes)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """The same of a load."""
        if nbytes and seconds:
            self._load.add(seconds, nbytes)

    def found(self, kind: ParkKind, cells: int, found: int) -> None:
        """One comes back that had `cells` when it was parked; `found` of them are found by hash."""
        if cells:
            self._missing[kind].add(max(0, cells - found) / cells)

    def came_back(self, kind: ParkKind, pause_s: float) -> None:
        """One runs again after so long."""
        self._stay[kind].add(pause_s)

    def asked(self, ask: int, nbytes: int) -> None:
        """A Reserve was sent."""
        self._asks[ask] = Ask(nbytes, self._released)

    def answered(self, ask: int, fill: float, budget_bytes: int) -> int:
        """It was granted or denied; `budget_bytes` 0: without a word of the host cache. Returns the bytes asked for."""
        sent = self._asks.pop(ask, None)
        if sent is None:
            return 0
        if budget_bytes:
            self._fill, self._budget_bytes, self._released_before = fill, budget_bytes, sent.released
        return sent.nbytes

    def released(self, nbytes: int) -> None:
        """A lease goes back."""
        self._released += nbytes

    def lost(self) -> None:
        """The host cache is gone, and what it held."""
        self._asks.clear()
        self._fill, self._released_before = 0.0, self._released

    # what it is worth -----------------------------------------------------------------------------------------------------
    def choose(self, kind: ParkKind, cells: int, num_blocks: int) -> Choice:
        """Save or recompute a sequence of so many computed cells in so many blocks, and why. A save may still be denied."""
        mode = self.limits.park_mode
        if not cells:
            return Choice("recompute", "nothing_computed")
        if mode != "auto":
            return Choice(mode, "asked", cells)
        return self._by_cost(kind, cells, num_blocks)

    def _by_cost(self, kind: ParkKind, cells: int, num_blocks: int) -> Choice:
        """The rule at the top of this file. What it finds is remembered: the worth of this park, or that one more was dear."""
        nbytes = self.image_bytes(num_blocks)
        missing = self._missing[kind].value
        copy_s = self._copy_s(num_blocks, missing)
        recompute_s = self._recompute_s(cells, missing)
        if copy_s is None or recompute_s is None:
            return Choice("save", "unmeasured", cells, nbytes)
        stay_s = self._stay_s(kind)
        fill = self.fill(nbytes)
        benefit, byte_s = recompute_s - copy_s, nbytes * stay_s
        worth = benefit / byte_s
        price = PRICE * (self._worth.value or 0.0) * min(1.0, max(0.0, (fill - 0.5) / 0.5))
        if benefit <= 0:
            self._save.total *= LESS_DEAR
            self._load.total *= LESS_DEAR
            mode, reason = "recompute", "copy_dearer"
        else:
            self._worth.add(benefit, byte_s)
            mode, reason = ("save", "cheaper") if worth >= price else ("recompute", "budget_dear")
        return Choice(mode, reason, cells, nbytes, copy_s, recompute_s, stay_s, fill, worth, price)

    def image_bytes(self, num_blocks: int) -> int:
        """Of an image with so many blocks and the state."""
        return max(1, num_blocks * self.limits.block_bytes + self.limits.state_bytes)

    def fill(self, more_bytes: int = 0) -> float:
        """Share of the budget in use with `more_bytes`: the last answer, and what was asked for and released since."""
        if not self._budget_bytes:
            return 0.0
        since = sum(ask.nbytes for ask in self._asks.values()) - (self._released - self._released_before)
        return max(0.0, self._fill + (since + more_bytes) / self._budget_bytes)

    def _copy_s(self, num_blocks: int, missing: float) -> float | None:
        """Seconds to save its image and to load what is not found. Loads are taken to be like saves until one is measured."""
        save = self._save.value
        if save is None:
            return None
        load = self._load.value
        loaded = missing * num_blocks * self.limits.block_bytes + self.limits.state_bytes
        return self.image_bytes(num_blocks) * save + loaded * (save if load is None else load)

    def _recompute_s(self, cells: int, missing: float) -> float | None:
        """Seconds to compute the cells that are not found, which are its last: the beginning is found first."""
        if not self._prefill:
            return None
        at = cells - int(missing * cells)
        seconds = 0.0
        while at < cells:
            depth = _depth(at)
            end = min(cells, 1 << depth)
            seconds += (end - at) * _nearest(self._prefill, depth)
            at = end
        return seconds

    def _stay_s(self, kind: ParkKind) -> float:
        seen = self._stay[kind].value
        return STAY_S[kind] if seen is None else max(LEAST_STAY_S, seen)


def _depth(position: int) -> int:
    """Positions up to 2**this count as equally deep."""
    return max(SHALLOW_BITS, position.bit_length())


def _nearest(means: dict[int, Mean], key: int) -> float | None:
    """The mean that was measured nearest to `key`, a smaller one first; None: nothing was measured."""
    best = min(means, key=lambda other: (abs(other - key), other), default=None)
    return None if best is None else means[best].value
