"""Attention over paged blocks: equal to float64, and a row's bits depend on its own sequence's cells and on nothing else."""

import dataclasses
import math
import os
import types
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.reference import AttentionPlan, attention
from gpu_worker.model import card_program
from tests.kernels.harness import CUDA, KernelError, poisoned, relative, run

CELLS = 16  # of a block
SPLIT = card_program.SPLIT
LAYERS, LAYER = 2, 1
FAR = 1 << 28  # an index that nobody may use: it ends the process


def shared_bytes(dim: int) -> int:
    """What attend_d{dim} is launched with."""
    return 16 * (5 * 4 * (dim + 8) + 2 * (dim + 8) + 32) + 16


@dataclasses.dataclass(frozen=True)
class Text:
    """The whole of a sequence: a step computes some of its rows."""

    q: torch.Tensor  # bf16 [cells, heads, dim]
    keys: torch.Tensor  # bf16 [cells, kv_heads, dim]
    values: torch.Tensor
    gate: torch.Tensor  # bf16 [cells, heads, dim]

    @staticmethod
    def of(cells: int, heads: int, kv_heads: int, dim: int, seed: int, strength: float = 1.0) -> "Text":
        g = torch.Generator().manual_seed(seed)
        q, gate = (torch.randn(cells, heads, dim, generator=g) for _ in range(2))
        keys, values = (torch.randn(cells, kv_heads, dim, generator=g) for _ in range(2))
        return Text(*((x * s).bfloat16() for x, s in ((q, strength), (keys, 1), (values, 1), (gate, 1))))

    def expected(self, begin: int, end: int, first: int = 0, gated: bool = False) -> torch.Tensor:
        """float64 [end - begin, heads * dim]"""
        group, dim = self.q.shape[1] // self.keys.shape[1], self.q.shape[2]
        keys, values = (x[first:end].double().repeat_interleave(group, 1) for x in (self.keys, self.values))
        scores = torch.einsum("rhd,chd->hrc", self.q[begin:end].double(), keys) / math.sqrt(dim)
        late = torch.arange(first, end)[None] > torch.arange(begin, end)[:, None]
        out = torch.einsum("hrc,chd->rhd", scores.masked_fill(late, -math.inf).softmax(-1), values)
        if gated:
            out *= self.gate[begin:end].double().sigmoid()
        return out.flatten(1)


Piece = tuple[Text, int, int]  # rows begin..end of a sequence in a step


def attend(
    pieces: Sequence[Piece], splits: int = 1, first: int = 0, gated: bool = False, seed: int = 0, padding: int = 0
) -> list[torch.Tensor]:
    """One step: bf16 [rows, heads * dim] of each piece. `seed`: where blocks and tables lie; `padding`: so many
    tiles without rows and so many with a row that has no position."""
    rng = np.random.default_rng(seed)
    _, heads, dim = pieces[0][0].q.shape
    kv_heads = pieces[0][0].keys.shape[1]
    stride = max(-(-end // CELLS) for _, _, end in pieces) + int(rng.integers(3))
    needed = sum(-(-end // CELLS) for _, _, end in pieces)
    free = rng.permutation(needed + 3).tolist()
    block_values = LAYERS * 2 * kv_heads * CELLS * dim + 64  # something lies behind the cells
    pool = poisoned(needed + 3, block_values, dtype=torch.bfloat16)
    cells = pool[:, :-64].unflatten(1, (LAYERS, 2, kv_heads, CELLS, dim))
    seats = rng.permutation(len(pieces) + 1)[: len(pieces)]
    tables = np.full((len(pieces) + 1, stride), FAR, np.int32)
    tile_rows = 16 // (heads // kv_heads)
    positions, seq_of, tile_row, tile_count = [], [], [], []
    for i, (text, begin, end) in enumerate(pieces):
        for at in range(0, end, CELLS):
            tables[seats[i], at // CELLS] = block = free.pop()
            for part, source in enumerate((text.keys, text.values)):
                own = source[max(at, first) : min(at + CELLS, end)]
                cells[block, LAYER, part, :, max(at, first) - at :][:, : len(own)] = own.transpose(0, 1)
        for at in range(begin, end, tile_rows):
            tile_row.append(len(positions) + at - begin)
            tile_count.append(min(tile_rows, end - at))
        positions += range(begin, end)
        seq_of += [i] * (end - begin)
    rows, tiles = len(positions) + padding, len(tile_row) + 2 * padding
    q, gate, out = (poisoned(rows, n * heads * dim, dtype=torch.bfloat16) for n in (1, 2, 1))  # the gate's rows are wider
    q[: len(positions)] = torch.cat([text.q[begin:end].flatten(1) for text, begin, end in pieces])
    gate[: len(positions), : heads * dim] = torch.cat([text.gate[begin:end].flatten(1) for text, begin, end in pieces])
    tile_row += [FAR] * padding + list(range(len(positions), rows))
    tile_count += [0] * padding + [1] * padding
    ints = [tile_row, tile_count, positions + [-1] * padding, seq_of + [FAR] * padding, seats]
    part_o, part_ml = (poisoned(tiles, kv_heads, splits, 16, n) if splits > 1 else None for n in (dim, 2))
    done = torch.zeros(tiles, kv_heads, dtype=torch.int32) if splits > 1 else None
    tile_row, tile_count, positions, seq_of, seats = (np.array(x, np.int32) for x in ints)
    shape = [heads, kv_heads, LAYER, first, 1 / math.sqrt(dim)]
    args = [out, q, pool, block_values * 2, gate if gated else None, 2 * heads * dim, tile_row, tile_count, positions, seq_of]
    args += [seats, tables, stride, *shape, part_o, part_ml, done]
    run("attention", f"attend_d{dim}", (tiles, kv_heads, splits), 128, args, shared_bytes(dim))
    assert splits == 1 or not done.any()
    assert same(out[rows - padding :], poisoned(padding, heads * dim, dtype=torch.bfloat16))
    return list(out[: rows - padding].split([end - begin for _, begin, end in pieces]))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "gated", "first"),
    [(64, 2, 2, False, 0), (64, 16, 1, True, 1), (96, 6, 2, False, 0), (128, 5, 1, True, 0), (256, 8, 2, True, 1)],
)
def test_equals_float64(dim: int, heads: int, kv_heads: int, gated: bool, first: int):
    texts = [Text.of(cells, heads, kv_heads, dim, seed) for seed, cells in enumerate((530, 270, 40, 2))]
    # a token far on, a chunk over the border of two splits, one with 4 drafts, one at the beginning
    pieces = [(texts[0], 529, 530), (texts[1], 249, 270), (texts[2], 35, 40), (texts[3], 1, 2)]
    walked = attend(pieces, 1, first, gated, seed=dim, padding=2)
    split = attend(pieces, 4, first, gated, seed=dim + 1, padding=1)
    for piece, a, b in zip(pieces, walked, split):
        assert relative(a, piece[0].expected(*piece[1:], first, gated)) < 6e-3
        assert same(a, b)


@pytest.mark.usefixtures("schedule")
def test_peaks_anywhere_move_the_running_maximum():
    text = Text.of(600, 2, 1, 64, 3, strength=30.0)
    (out,) = attend([(text, 590, 600)])
    assert relative(out, text.expected(590, 600)) < 6e-3


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 3, 1), (96, 2, 2), (128, 8, 1), (256, 4, 1)])
def test_a_row_is_the_same_in_every_chunk_company_and_place(dim: int, heads: int, kv_heads: int):
    rng = np.random.default_rng(dim)
    text, other = (Text.of(cells, heads, kv_heads, dim, cells) for cells in (290, 600))
    begin = 230
    (whole,) = attend([(text, begin, 290)])
    for _ in range(2):
        at = begin
        while at < 290:
            end = min(at + int(rng.choice([1, 2, 5, 16, 31])), 290)
            company = int(rng.integers(1, 600))
            pieces = [(text, at, end), (other, max(company - int(rng.integers(1, 9)), 0), company)]
            order = rng.permutation(2)
            out = attend([pieces[i] for i in order], int(rng.choice([1, 3, 5])), seed=int(rng.integers(1 << 30)))
            assert same(out[order.tolist().index(0)], whole[at - begin : end - begin]), f"rows {at} to {end}"
            at = end


@pytest.mark.usefixtures("schedule")
def test_a_row_before_the_first_cell_gets_zeros():
    text = Text.of(3, 2, 1, 64, 1)
    (out,) = attend([(text, 0, 3)], first=1)
    assert not out[0].any() and relative(out[1:], text.expected(1, 3, 1)) < 6e-3


@pytest.mark.skipif("KERNELS_ON" in os.environ, reason="a trap ends the context of a card, and so all later tests")
def test_splits_that_do_not_reach_the_last_cell_are_refused():
    text = Text.of(2 * SPLIT + 1, 1, 1, 64, 1)
    attend([(text, 2 * SPLIT - 1, 2 * SPLIT)], splits=2)
    with pytest.raises(KernelError, match="trap"):
        attend([(text, 2 * SPLIT, 2 * SPLIT + 1)], splits=2)


def test_equals_its_twin_on_the_cpu():
    heads, kv_heads, dim, cells, begin = 6, 2, 64, 300, 275
    text = Text.of(cells, heads, kv_heads, dim, 7)
    spec = types.SimpleNamespace(kv_layers=1, num_kv_heads=kv_heads, head_dim=dim, hidden=0, delta=None, mtp=None)
    blocks = -(-cells // CELLS)
    kv = KvCache(spec, blocks, CELLS, torch.bfloat16)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    for cell in range(cells):
        kv.tensor[table[cell // CELLS], 0, 0, :, cell % CELLS] = text.keys[cell]
        kv.tensor[table[cell // CELLS], 0, 1, :, cell % CELLS] = text.values[cell]
    positions = torch.arange(begin, cells)
    plan = AttentionPlan.of(positions, torch.zeros(cells - begin, dtype=torch.int32), table[None].int(), kv, heads)
    (out,) = attend([(text, begin, cells)])
    assert relative(out, attention(text.q[begin:], kv, 0, plan)) < 2e-2


def test_python_cuts_attention_as_the_kernel_does():
    text = (CUDA / "attention.cu").read_text()
    for name, value in (("SPLIT", card_program.SPLIT), ("TILE", card_program.TILE)):
        assert f"constexpr int {name} = {value};" in text
