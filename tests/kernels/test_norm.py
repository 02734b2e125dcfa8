"""cuda/norm.cu against float64, on odd shapes: norms, the embedding, what the drafting head pairs and keeps."""

import pytest
import torch

from tests.kernels.harness import poisoned, relative, run
from tests.kernels.paging import Paged, Shape

pytestmark = pytest.mark.usefixtures("schedule")
EPS = 1e-6
HIDDEN = [64, 1048]  # the second: no multiple of a warp's or a block's vectors


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("hidden", HIDDEN)
def test_embed(hidden: int):
    table = _random(1, 9, hidden, dtype=torch.bfloat16)
    tokens = torch.tensor([3, -1, 8, 0], dtype=torch.int32)
    x = torch.full((4, hidden), 7.0)
    run("norm", "embed", (4,), 256, [x, tokens, table, hidden])
    assert torch.equal(x, table[[3, 0, 8, 0]].float())


# 17 k: more than the registers hold
@pytest.mark.parametrize("hidden", [*HIDDEN, 17 * 1024 + 8])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(hidden: int, add: bool):
    x, more, weight = _random(1, 3, hidden), _random(2, 3, hidden, dtype=torch.bfloat16), _random(3, hidden)
    v = x + more.float() if add else x.clone()
    original = x.clone()
    y, y32 = poisoned(3, hidden, dtype=torch.bfloat16), poisoned(3, hidden)
    run("norm", "rms_norm", (3,), 256, [y, y32, x, more if add else None, weight, None, hidden, EPS])
    assert torch.equal(x, v)
    assert relative(y32, _rms(v, weight)) < 1e-6
    assert torch.equal(y, y32.bfloat16())

    # chosen rows: x stays, either result may be left out, a row that is padding is skipped; the same bits
    rows = torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    chosen, given = poisoned(4, hidden), original.clone()
    run("norm", "rms_norm", (4,), 256, [None, chosen, given, more if add else None, weight, rows, hidden, EPS])
    assert torch.equal(chosen[[0, 2, 3]], y32[[2, 0, 2]]) and chosen[1].isnan().all()
    first = poisoned(1, hidden, dtype=torch.bfloat16)
    run("norm", "rms_norm", (1,), 256, [first, None, given, more if add else None, weight, rows, hidden, EPS])
    assert torch.equal(first[0], y[2])
    assert torch.equal(given, original)


def _pairs(hidden: int) -> tuple[Paged, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences that begin, go on in a block, go on at its border; the kept rows of their newest cells; then padding."""
    paged = Paged.of(Shape(hidden=hidden, mtp=True), [0, 5, 16, 0], [3, 1, 20, 1], seed=hidden, padding=2)
    kept = _random(4, 4, hidden)
    for s, start in enumerate([0, 5, 16, 0]):
        if start:
            paged.kv.hidden[paged.block(s, start - 1)] = kept[s]
    tokens = torch.randint(0, 11, (27,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    return paged, kept, tokens, _random(5, 11, hidden, dtype=torch.bfloat16), _random(6, 27, hidden, dtype=torch.bfloat16)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_pair(hidden: int):
    paged, kept, tokens, embed, rows = _pairs(hidden)
    embed_norm, hidden_norm = _random(7, hidden), _random(8, hidden)
    y = poisoned(27, 2 * hidden, dtype=torch.bfloat16)
    kv = paged.kv
    places = [paged.positions, paged.seq_of, paged.row_begin, paged.seats, paged.tables, paged.tables.shape[1]]
    pool = [kv.memory, kv.block_bytes, kv.hidden_at]
    run("norm", "pair", (27,), 256, [y, tokens, *places, *pool, embed, rows, embed_norm, hidden_norm, hidden, EPS])
    before = rows.roll(1, 0).float()
    for s, begin in enumerate(paged.row_begin.tolist()):
        before[begin] = kept[s] if paged.positions[begin] else 0
    assert y[25:].isnan().all()
    assert relative(y[:25, :hidden], _rms(embed[tokens[:25]], embed_norm)) < 4e-3
    assert relative(y[:25, hidden:], _rms(before[:25], hidden_norm)) < 4e-3


@pytest.mark.parametrize("depth", [0, 2])
def test_pair_draft(depth: int):
    hidden = HIDDEN[0]
    paged, kept, tokens, embed, _ = _pairs(hidden)
    before, embed_norm, hidden_norm = _random(9, 4, hidden), _random(7, hidden), _random(8, hidden)
    positions = torch.tensor([0, 5, -1, 16], dtype=torch.int32) + depth * torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    order = [0, 1, 3, 2]  # of sequences: the third of this pass drafts no more
    begins, seats = paged.row_begin[order].contiguous(), paged.seats[order].contiguous()
    tokens[int(begins[1]) + depth] = -1  # a draw that failed counts as token 0
    y = poisoned(4, 2 * hidden, dtype=torch.bfloat16)
    table = [positions, seats, paged.tables, paged.tables.shape[1], paged.kv.memory, paged.kv.block_bytes, paged.kv.hidden_at]
    args = [y, tokens, begins, *table, embed, before, embed_norm, hidden_norm, hidden, depth, EPS]
    run("norm", "pair_draft", (4,), 256, args)
    fed = tokens[begins + depth].clamp(min=0)
    if not depth:
        before = kept[order]
        before[0] = 0
    real = [0, 1, 3]
    assert y[2].isnan().all()
    assert relative(y[real, :hidden], _rms(embed[fed[real]], embed_norm)) < 4e-3
    assert relative(y[real, hidden:], _rms(before[real], hidden_norm)) < 4e-3


@pytest.mark.parametrize("hidden", HIDDEN)
def test_keep_hidden(hidden: int):
    paged, _, _, _, rows = _pairs(hidden)
    kv = paged.kv
    cells, expected = kv.tensor.clone(), kv.hidden.clone()
    for r, (position, s) in enumerate(zip(paged.positions.tolist(), paged.seq_of.tolist())):
        if position >= 0 and (position % 16 == 15 or r == paged.row_begin[s] + paged.row_count[s] - 1):
            expected[paged.block(s, position)] = rows[r].float()
    where = [paged.positions, paged.seq_of, paged.row_begin, paged.row_count, paged.seats, paged.tables, paged.tables.shape[1]]
    run("norm", "keep_hidden", (27,), 256, [kv.memory, kv.block_bytes, kv.hidden_at, rows, *where, hidden])
    assert torch.equal(kv.hidden.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
    assert torch.equal(kv.tensor.view(torch.int16), cells.view(torch.int16))


def test_keep_accepted():
    """Four sequences of 1 + 3 rows: all accepted, none, one of them across a block's border, and one that draws nothing."""
    hidden = HIDDEN[0]
    paged = Paged.of(Shape(hidden=hidden, mtp=True), [3, 4, 14, 8, 0], [4, 4, 4, 4, 0], seed=3)
    kv, rows = paged.kv, _random(6, 16, hidden, dtype=torch.bfloat16)
    drafts = torch.tensor([3, 3, 3, 3, 0], dtype=torch.int32)
    accepted = torch.tensor([3, 0, 1, -1, 0], dtype=torch.int32)
    expected = kv.hidden.clone()
    expected[paged.block(1, 4)] = rows[4].float()
    expected[paged.block(2, 15)] = rows[9].float()
    where = [paged.positions, paged.row_begin, paged.row_count, drafts, accepted, paged.seats, paged.tables]
    run(
        "norm", "keep_accepted", (5,), 256, [kv.memory, kv.block_bytes, kv.hidden_at, rows, *where, paged.tables.shape[1], hidden]
    )
    assert torch.equal(kv.hidden.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
