"""What a step on a card reads and leaves behind, at addresses that never change, so that a captured graph can be repeated.

Every array has a place on the card and a twin in one page-locked area of the host. A step is: `clear`, fill in the host's
arrays, `upload`, enqueue the model's work, `download`, wait, read. Nothing of it may be touched from `upload` to that wait.
"""

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.device.cuda import Card
from gpu_worker.device.draw_params import DRAW_BYTES
from gpu_worker.device.torch_on_card import TorchOnCard

_ALIGN = 64  # bytes between the beginnings of two arrays


@dataclass(frozen=True, slots=True)
class Limits:
    """The greatest step that buffers and workspace hold."""

    rows: int  # tokens fed, drafts included
    sequences: int
    draft_max: int  # drafts of one sequence; 0: the model has no head, or is not to draft
    seats: int  # sequences that have a block table
    table_stride: int  # blocks of one table: the longest sequence

    @property
    def draws(self) -> int:
        """Tokens drawn in one step: the next of each sequence, and one more behind each draft."""
        return self.sequences * (1 + self.draft_max)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a step is. What is enqueued for a step depends on this and on nothing else: steps of one shape share a graph.

    Each number may be larger than what the step really has; the rest is padding, see StepBuffers.clear.
    """

    rows: int  # R: of the forward pass
    sequences: int  # S
    tiles: int  # of attention: up to 16 // (query heads a key-value head) consecutive rows of one sequence
    outs: int  # rows that go on to the head, those that are drawn from first
    draws: int  # N, of the outs
    depth: int = 0  # passes of the head that drafts
    splits: int = 1  # of attention over 256 cells each; 1: as many as a row needs, one after another


class StepBuffers:
    """Arrays by name, the host's as attributes (numpy), the card's by `at[name]` (address).

    tokens             int32 [R]     fed tokens; drafts are written here by the card: download reads them back
    positions          int32 [R]     -1: padding
    seq_of             int32 [R]     index into all arrays of [S]; 0 where padding
    tile_row           int32 [R]     first row of each tile of attention
    tile_count         int32 [R]     its rows; 0: padding
    out_rows           int32 [R + N] rows that go on to the head, -1: padding; the first Shape.draws of them are drawn from
    row_begin          int32 [S]     first of its rows
    row_count          int32 [S]     how many, drafts included; 0: padding
    drafts             int32 [S]     how many of them, the last ones, are drafts
    known              int32 [S]     position behind the last row that is no draft
    seats              int32 [S]     its row of `tables`
    slots              int32 [S]     its slot of the state cache
    first_draw         int32 [S]     index of its first draw, those of its drafts follow; -1: it draws nothing
    draw_seq           int32 [N]     sequence of each draw; -1: padding
    draft_positions    int32 [K, S]  position that each pass of the drafting head feeds; -1: this sequence drafts no more
    draft_tiles        int32 [K, S]  1 where it drafts, else 0
    draw_params        int32 [S, 22] struct DrawParams of each sequence that draws, see draw_params.py
    status             int32 [1]     0; the card sets 1 where a state slot is of another position
    results, which only download brings:
    drawn              int32 [N]     token, -1 logits not finite, -2 no token left
    accepted           int32 [S]     drafts that agree with the draws in their places; -1 where it draws nothing

    `back` has the results (tokens, status, drawn, accepted) after a download. `tables` int32 [seats, table_stride] lies apart:
    it stays from step to step and is uploaded by the piece.
    """

    tokens: np.ndarray
    positions: np.ndarray
    seq_of: np.ndarray
    tile_row: np.ndarray
    tile_count: np.ndarray
    out_rows: np.ndarray
    row_begin: np.ndarray
    row_count: np.ndarray
    drafts: np.ndarray
    known: np.ndarray
    seats: np.ndarray
    slots: np.ndarray
    first_draw: np.ndarray
    draw_seq: np.ndarray
    draft_positions: np.ndarray
    draft_tiles: np.ndarray
    draw_params: np.ndarray
    status: np.ndarray
    drawn: np.ndarray
    accepted: np.ndarray

    def __init__(self, card: Card, on_card: TorchOnCard, limits: Limits) -> None:
        self.limits = limits
        self._card = card
        r, s, n, k = limits.rows, limits.sequences, limits.draws, limits.draft_max
        if r < n:
            raise ValueError(f"{s} sequences with {k} drafts are more than {r} rows")
        shapes: dict[str, tuple[int, ...]] = {
            "positions": (r,),
            "seq_of": (r,),
            "tile_row": (r,),
            "tile_count": (r,),
            "out_rows": (r + n,),
            "row_begin": (s,),
            "row_count": (s,),
            "drafts": (s,),
            "known": (s,),
            "seats": (s,),
            "slots": (s,),
            "first_draw": (s,),
            "draw_seq": (n,),
            "draft_positions": (k, s),
            "draft_tiles": (k, s),
            "draw_params": (s, DRAW_BYTES // 4),
            # from here on they are read back; from `drawn` on they are not uploaded
            "tokens": (r,),
            "status": (1,),
            "drawn": (n,),
            "accepted": (s,),
        }
        places, nbytes = _places(shapes)
        self._memory = on_card.zeros(nbytes)
        self._host, host_back = card.pinned(nbytes), card.pinned(nbytes)
        base = self._memory.data_ptr()
        self.at: dict[str, int] = {name: base + place for name, place in places.items()}
        self.back: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            setattr(self, name, _view(self._host, places[name], shape))
            if places[name] >= places["tokens"]:
                self.back[name] = _view(host_back, places[name], shape)
        self._up = self._host[: places["drawn"]]
        self._down_at, self._down = base + places["tokens"], host_back[places["tokens"] :]

        stride = limits.table_stride
        self._tables_memory = on_card.zeros(limits.seats * stride * 4)
        self.at["tables"] = self._tables_memory.data_ptr()
        self.tables: np.ndarray = _view(card.pinned(limits.seats * stride * 4), 0, (limits.seats, stride))
        rows_in_order = np.arange(s, dtype=np.int32)  # of a draft pass: row i is sequence i
        self._in_order = on_card.upload(torch.from_numpy(rows_in_order))
        self.at["in_order"] = self._in_order.data_ptr()
        self.clear()

    def clear(self) -> None:
        """Everything is padding: what a step does not fill in is skipped."""
        for array in (self.positions, self.tokens, self.out_rows, self.first_draw, self.draw_seq, self.draft_positions):
            array.fill(-1)
        for array in (self.seq_of, self.tile_count, self.row_begin, self.row_count, self.drafts, self.draft_tiles, self.status):
            array.fill(0)
        for array in (self.tile_row, self.known, self.seats, self.slots):
            array.fill(0)

    def upload(self) -> None:
        """Enqueue all that a step reads, tables apart."""
        self._card.to_card(self._memory.data_ptr(), self._up, self._card.compute)

    def upload_table(self, seat: int, first: int, count: int) -> None:
        """Enqueue entries first .. first + count of the table of `seat`."""
        at = self.at["tables"] + (seat * self.limits.table_stride + first) * 4
        self._card.to_card(at, self.tables[seat, first : first + count].view(np.uint8), self._card.compute)

    def download(self) -> None:
        """Enqueue the results. They are in `back` when the compute stream has come this far."""
        self._card.to_host(self._down, self._down_at, self._card.compute)


def _places(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """Where each array begins, and the bytes of all."""
    places, at = {}, 0
    for name, shape in shapes.items():
        places[name] = at
        at += -(-int(np.prod(shape)) * 4 // _ALIGN) * _ALIGN
    return places, at


def _view(area: np.ndarray, at: int, shape: tuple[int, ...]) -> np.ndarray:
    return area[at : at + int(np.prod(shape)) * 4].view(np.int32).reshape(shape)
