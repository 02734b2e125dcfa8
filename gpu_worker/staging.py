"""Writes the rows of a plan into the arrays that a card reads, and says how large the step is.

What is enqueued depends on the step's shape only. A step of decodes is rounded up to a few shapes, so that graphs of them can be
repeated; the rest of such a step is padding, which kernels skip.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gpu_worker.device.draw_params import DrawRecord, DrawTable
from gpu_worker.device.step_buffers import Limits, Shape, StepBuffers
from gpu_worker.policy.events import Row
from gpu_worker.runner import prompt_rows_of, wanted_drafts

ROWS_STEP = 16  # of a step that feeds prompts: rounding up makes its shape come again now and then, so less is prepared


class Cut(Protocol):
    """How a model cuts attention."""

    @property
    def tile_rows(self) -> int: ...  # rows of one sequence in a tile
    def splits(self, tiles: int, longest: int) -> int: ...  # parts in which a row of up to `longest` cells is worked on at once


@dataclass(frozen=True, slots=True)
class Staged:
    """What the runner still has to know of the step: lists by row of the plan."""

    shape: Shape
    repeats: bool  # a step of decodes, so its shape comes again
    first_draw: list[int]  # index of its first draw; -1: none
    prompt_rows: list[int]  # how many go to the head for prompt logprobs, behind all draws, those of one row after another


class Seat:
    """What is kept of a sequence from step to step."""

    __slots__ = ("blocks", "known", "number", "record", "sampling", "used")

    def __init__(self, number: int, row: Row) -> None:
        self.number = number
        self.blocks = row.blocks  # held, so that no other list can be mistaken for it
        self.known = 0  # of its blocks, those that the card knows
        self.used = 0  # the last step it had a row in
        self.sampling = row.sampling
        self.record = DrawRecord(row.sampling, row.prompt_len)


class Seats:
    """Which row of the block tables each sequence has. Only what has come since the last step is uploaded.

    A sequence's list of blocks changes at its end only while it is the same list; another list is read anew.
    """

    def __init__(self, count: int, tables: np.ndarray, upload: Callable[[int, int, int], None]) -> None:
        """`tables`: int32 [count, blocks], the host's; `upload(seat, first, count)` sends a part of one row to the card."""
        self._tables = tables
        self._upload = upload
        self._seats: dict[str, Seat] = {}
        self._free = list(range(count - 1, -1, -1))
        self._step = 0

    def place(self, rows: Rows[Row]) -> list[Seat]:
        """The seat of each row's sequence, its table up to date. There must be no more rows than seats."""
        self._step += 1
        seats = self._seats
        found = []
        for row in rows:
            seat = seats.get(row.request_id)
            if seat is None:
                seat = seats[row.request_id] = Seat(self._free.pop() if self._free else self._taken_from(rows), row)
            elif seat.sampling is not row.sampling:  # another request of that name
                seat = seats[row.request_id] = Seat(seat.number, row)
            blocks = row.blocks
            if seat.blocks is not blocks:
                seat.blocks, seat.known = blocks, 0
            if seat.known != len(blocks):
                self._add(seat, blocks)
            seat.used = self._step
            found.append(seat)
        return found

    def _add(self, seat: Seat, blocks: list[int]) -> None:
        first, seat.known = min(seat.known, len(blocks)), len(blocks)
        if first < len(blocks):
            self._tables[seat.number, first : len(blocks)] = blocks[first:]
            self._upload(seat.number, first, len(blocks) - first)

    def _taken_from(self, rows: Rows[Row]) -> int:
        """The seat of the sequence that has had no row for longest, and has none now."""
        now = {row.request_id for row in rows}
        gone = min((seat.used, request_id) for request_id, seat in self._seats.items() if request_id not in now)[1]
        return self._seats.pop(gone).number


class Draws:
    """What the draws of each step depend on, written where the card reads it. A sequence in the place it had in the step before,
    whose settings do not speak of its tokens, is there already."""

    def __init__(self, table: DrawTable, sequences: int, scratch: Callable[[int], int]) -> None:
        """`scratch(draw)`: address of the row in which the logits of a draw may be changed."""
        self._table, self._scratch = table, scratch
        self._there: list[DrawRecord | None] = [None] * sequences

    def put(self, rows: Rows[Row], seats: list[Seat], first_draw: list[int]) -> tuple[np.ndarray, int]:
        """Fill in the records; (lists that they speak of, the address where these must be)."""
        table, there = self._table, self._there
        table.clear()
        for index, (row, seat, first) in enumerate(zip(rows, seats, first_draw, strict=True)):
            record = seat.record
            if first < 0 or there[index] is record and not record.changes(row.banned):
                continue
            table.put(index, record, row.tokens, row.start + row.count, row.banned, self._scratch(first))
            there[index] = None if record.changes(row.banned) else record
        return table.place()


def stage(rows: Rows[Row], seats: list[Seat], buffers: StepBuffers, cut: Cut) -> Staged:
    """Fill in the host's arrays for one step. Each sequence's rows follow one another: its tokens, then its drafts."""
    b, count = buffers, len(rows)
    b.clear()
    starts = np.array([row.start for row in rows], dtype=np.int32)
    fed = np.array([row.count for row in rows], dtype=np.int32)
    drafts = np.array([wanted_drafts(row) for row in rows], dtype=np.int32)
    counts = fed + drafts
    begins = _before(counts)
    total, depth = int(counts.sum()), int(drafts.max())

    b.row_begin[:count], b.row_count[:count], b.drafts[:count] = begins, counts, drafts
    b.known[:count] = starts + fed
    b.seats[:count] = [seat.number for seat in seats]
    b.slots[:count] = [max(row.state_slot, 0) for row in rows]
    b.seq_of[:total] = np.repeat(np.arange(count, dtype=np.int32), counts)
    b.positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(starts - begins, counts)
    for pass_ in range(depth):
        drafting = drafts > pass_
        b.draft_positions[pass_, :count] = np.where(drafting, starts + pass_, -1)
        b.draft_tiles[pass_, :count] = drafting
    decodes = bool((fed == 1).all())
    if decodes:
        b.tokens[begins] = [row.tokens[row.start] for row in rows]
    else:
        for row, begin in zip(rows, begins.tolist(), strict=True):
            b.tokens[begin : begin + row.count] = row.tokens[row.start : row.start + row.count]

    tiles = _stage_tiles(b, begins, counts, cut.tile_rows)
    samples = np.array([row.samples for row in rows])
    prompt_rows = [prompt_rows_of(row) for row in rows]
    repeats = decodes and bool(samples.all()) and not any(prompt_rows)
    first_draw, draws = _stage_draws(b, samples, begins + fed - 1, drafts)
    if repeats:
        shape = _of_decodes(count, depth, int((starts + counts).max()), b.limits, cut)
        return Staged(shape, True, first_draw, prompt_rows)
    draws = round_up(draws, b.limits.draws) if draws else 0
    outs = _stage_prompt_rows(b, begins, prompt_rows, draws)
    tiles = round_up(tiles, b.limits.rows)
    shape = Shape(
        rows=min(-(-total // ROWS_STEP) * ROWS_STEP, b.limits.rows),
        sequences=round_up(count, b.limits.sequences),
        tiles=tiles,
        outs=outs,
        draws=draws,
        depth=depth,
        splits=cut.splits(tiles, int((starts + counts).max())),
    )
    return Staged(shape, False, first_draw, prompt_rows)


def _stage_tiles(b: StepBuffers, begins: np.ndarray, counts: np.ndarray, tile_rows: int) -> int:
    """Cut each sequence's rows into tiles; how many."""
    each = -(-counts // tile_rows)
    tiles = int(each.sum())
    within = np.arange(tiles, dtype=np.int32) - np.repeat(_before(each), each)  # number of the tile in its sequence
    b.tile_row[:tiles] = np.repeat(begins, each) + tile_rows * within
    b.tile_count[:tiles] = np.minimum(tile_rows, np.repeat(counts, each) - tile_rows * within)
    return tiles


def _stage_draws(b: StepBuffers, samples: np.ndarray, newest: np.ndarray, drafts: np.ndarray) -> tuple[list[int], int]:
    """The first draw of each sequence, -1 for none, and how many draws there are. `newest`: the row of its newest token."""
    each = np.where(samples, 1 + drafts, 0)
    draws = int(each.sum())
    first = _before(each)
    b.first_draw[: len(each)] = np.where(samples, first, -1)
    b.draw_seq[:draws] = np.repeat(np.arange(len(each), dtype=np.int32), each)
    b.out_rows[:draws] = np.arange(draws, dtype=np.int32) + np.repeat(newest - first, each)
    return b.first_draw[: len(each)].tolist(), draws


def _stage_prompt_rows(b: StepBuffers, begins: np.ndarray, prompt_rows: list[int], draws: int) -> int:
    """The rows for prompt logprobs go to the head behind those for `draws`; how many rows do in all."""
    at = draws
    for begin, count in zip(begins.tolist(), prompt_rows, strict=True):
        b.out_rows[at : at + count] = range(begin, begin + count)
        at += count
    return at


def _of_decodes(count: int, depth: int, longest: int, limits: Limits, cut: Cut) -> Shape:
    """The shape of a step of decodes: sequences rounded up, and as many rows as if each had all drafts."""
    sequences = round_up(count, limits.sequences)
    rows = sequences * (1 + depth)
    tiles = sequences * -(-(1 + depth) // cut.tile_rows)
    return Shape(rows, sequences, tiles, rows, rows, depth, cut.splits(tiles, longest))


_STEPS = sorted(n << k for k in range(16) for n in (1, 3))  # up to 98304, more than a step can have of anything


def round_up(count: int, most: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ..., but at most `most`."""
    return min(_STEPS[bisect_left(_STEPS, count)], most)


def _before(counts: np.ndarray) -> np.ndarray:
    """How many come before each: [3, 1, 2] -> [0, 3, 4]."""
    ends = np.cumsum(counts, dtype=np.int32)
    return ends - counts.astype(np.int32)
