"""Writes the rows of a plan into the arrays that a card reads, and says how large the step is.

What is enqueued depends on the step's shape only. A step of decodes is rounded up to a few shapes, so that graphs of them can be
repeated; the rest of such a step is padding, which kernels skip.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from gpu_worker.device.step_buffers import Limits, Shape, StepBuffers
from gpu_worker.policy.events import Row
from gpu_worker.runner import prompt_rows_of, wanted_drafts

SPLIT_CELLS = 256  # of attention
TILE_ROWS = 16  # query rows of one tile of attention: rows of the step times the query heads that share a key-value head


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of the model and the card decides how attention is cut."""

    group: int  # query heads of each key-value head
    kv_heads: int
    processors: int  # of the card
    splits_most: int  # that the workspace holds of a row; 1: none

    @property
    def tile_rows(self) -> int:
        """Rows of one sequence in a tile."""
        return TILE_ROWS // self.group

    def splits(self, longest: int, tiles: int) -> int:
        """In how many parts rows of up to `longest` cells are worked on at once: one, unless processors would be idle."""
        needed = -(-longest // SPLIT_CELLS)
        wanted = 1 << (needed - 1).bit_length()
        if tiles * self.kv_heads >= 2 * self.processors or wanted > self.splits_most:
            return 1
        return wanted


@dataclass(frozen=True, slots=True)
class Staged:
    """What the runner still has to know of the step: lists by row of the plan."""

    shape: Shape
    repeats: bool  # a step of decodes, so its shape comes again
    first_draw: list[int]  # index of its first draw; -1: none
    first_out: list[int]  # index among the rows that go to the head of its first row for prompt logprobs
    prompt_rows: list[int]  # how many those are


class Seats:
    """Which row of the block tables each sequence has. Only what has come since the last step is uploaded.

    A sequence's list of blocks grows at its end while it is the same list; a shorter one or another list is read anew.
    """

    def __init__(self, count: int, tables: np.ndarray, upload: Callable[[int, int, int], None]) -> None:
        """`tables`: int32 [count, blocks], the host's; `upload(seat, first, count)` sends a part of one row to the card."""
        self._tables = tables
        self._upload = upload
        self._seats: dict[str, _Seat] = {}
        self._free = list(range(count - 1, -1, -1))
        self._step = 0

    def place(self, rows: Rows[Row]) -> list[int]:
        """The seat of each row's sequence, its table up to date. There must be no more rows than seats."""
        self._step += 1
        seats = self._seats
        found = []
        for row in rows:
            seat = seats.get(row.request_id)
            if seat is None:
                seat = seats[row.request_id] = _Seat(self._free.pop() if self._free else self._taken_from(rows), row.blocks)
            blocks = row.blocks
            if seat.blocks is not blocks:
                seat.blocks, seat.known = blocks, 0
            if seat.known != len(blocks):
                self._add(seat, blocks)
            seat.used = self._step
            found.append(seat.number)
        return found

    def _add(self, seat: "_Seat", blocks: list[int]) -> None:
        first, seat.known = min(seat.known, len(blocks)), len(blocks)
        if first < len(blocks):
            self._tables[seat.number, first : len(blocks)] = blocks[first:]
            self._upload(seat.number, first, len(blocks) - first)

    def _taken_from(self, rows: Rows[Row]) -> int:
        """The seat of the sequence that has had no row for longest, and has none now."""
        now = {row.request_id for row in rows}
        gone = min((seat.used, request_id) for request_id, seat in self._seats.items() if request_id not in now)[1]
        return self._seats.pop(gone).number


class _Seat:
    __slots__ = ("blocks", "known", "number", "used")

    def __init__(self, number: int, blocks: list[int]) -> None:
        self.number = number
        self.blocks = blocks  # held, so that no other list can be mistaken for it
        self.known = 0  # of its blocks, those that the card knows
        self.used = 0  # the last step it had a row in


def stage(rows: Rows[Row], seats: list[int], buffers: StepBuffers, geometry: Geometry) -> Staged:
    """Fill in the host's arrays for one step. Each sequence's rows follow one another: its tokens, then its drafts."""
    b, count = buffers, len(rows)
    b.clear()
    starts = np.array([row.start for row in rows], dtype=np.int32)
    fed = np.array([row.count for row in rows], dtype=np.int32)
    drafts = np.array([wanted_drafts(row) for row in rows], dtype=np.int32)
    counts = fed + drafts
    begins = _before(counts)
    total, depth = int(counts.sum()), int(drafts.max())
    in_order = np.arange(count, dtype=np.int32)

    b.row_begin[:count], b.row_count[:count], b.drafts[:count] = begins, counts, drafts
    b.known[:count] = starts + fed
    b.seats[:count] = seats
    b.slots[:count] = [max(row.state_slot, 0) for row in rows]
    b.seq_of[:total] = np.repeat(in_order, counts)
    b.positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(starts - begins, counts)
    repeats = total == count + int(drafts.sum())  # one token of each
    if repeats:
        b.tokens[begins] = [row.tokens[row.start] for row in rows]
    else:
        for row, begin in zip(rows, begins.tolist(), strict=True):
            b.tokens[begin : begin + row.count] = row.tokens[row.start : row.start + row.count]
    for pass_ in range(depth):
        drafting = drafts > pass_
        b.draft_positions[pass_, :count] = np.where(drafting, starts + pass_, -1)
        b.draft_tiles[pass_, :count] = drafting

    tiles = _stage_tiles(b, begins, counts, geometry.tile_rows)
    first_draw, first_out, prompt_rows, draws, outs = _stage_outs(b, rows, begins, fed, drafts)
    longest = int((starts + counts).max())
    if repeats and draws == outs == total:
        shape = _rounded(count, depth, longest, b.limits, geometry)
    else:
        repeats = False
        shape = Shape(total, count, tiles, outs, draws, depth, geometry.splits(longest, tiles))
    return Staged(shape, repeats, first_draw, first_out, prompt_rows)


def _stage_tiles(b: StepBuffers, begins: np.ndarray, counts: np.ndarray, tile_rows: int) -> int:
    """Cut each sequence's rows into tiles; how many."""
    each = -(-counts // tile_rows)
    tiles = int(each.sum())
    within = np.arange(tiles, dtype=np.int32) - np.repeat(_before(each), each)  # number of the tile in its sequence
    b.tile_row[:tiles] = np.repeat(begins, each) + tile_rows * within
    b.tile_count[:tiles] = np.minimum(tile_rows, np.repeat(counts, each) - tile_rows * within)
    return tiles


def _stage_outs(
    b: StepBuffers, rows: Rows[Row], begins: np.ndarray, fed: np.ndarray, drafts: np.ndarray
) -> tuple[list[int], list[int], list[int], int, int]:
    """The rows that go to the head: first those that are drawn from, then those for prompt logprobs."""
    samples = np.array([row.samples for row in rows])
    each = np.where(samples, 1 + drafts, 0)
    draws = int(each.sum())
    first = _before(each)
    first_draw = np.where(samples, first, -1)
    b.first_draw[: len(rows)] = first_draw
    b.draw_seq[:draws] = np.repeat(np.arange(len(rows), dtype=np.int32), each)
    b.out_rows[:draws] = np.arange(draws, dtype=np.int32) + np.repeat(begins + fed - 1 - first, each)
    first_out, prompt_rows, at = [], [], draws
    for row, begin in zip(rows, begins, strict=True):
        wanted = prompt_rows_of(row)
        b.out_rows[at : at + wanted] = np.arange(begin, begin + wanted)
        first_out.append(at)
        prompt_rows.append(wanted)
        at += wanted
    return first_draw.tolist(), first_out, prompt_rows, draws, at


def _rounded(count: int, depth: int, longest: int, limits: Limits, geometry: Geometry) -> Shape:
    """The shape of a step of decodes: sequences rounded up, and as many rows as if each had all drafts."""
    sequences = round_up(count, limits.sequences)
    rows = sequences * (1 + depth)
    tiles = sequences * -(-(1 + depth) // geometry.tile_rows)
    return Shape(rows, sequences, tiles, rows, rows, depth, geometry.splits(longest, tiles))


_STEPS = sorted(n << k for k in range(12) for n in (1, 3))  # up to 6144


def round_up(count: int, most: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ..., but at most `most`."""
    return min(_STEPS[bisect_left(_STEPS, count)], most)


def _before(counts: np.ndarray) -> np.ndarray:
    """How many come before each: [3, 1, 2] -> [0, 3, 4]."""
    ends = np.cumsum(counts, dtype=np.int32)
    return ends - counts.astype(np.int32)
