"""The device's operations in plain torch: the CPU device where no native library is, and the oracle for every other one.

With `exact`, a row's result depends on its own sequence only. That rests on measured properties of torch on the CPU, which
`model/exactness.py` proves again at start: every dense product has one number of rows (which multiple would do differs between
processors), attention sees at least 4 query rows a task and keys gathered to a multiple of 512 cells (SDPA's own split).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache

F = torch.nn.functional

PRODUCT_ROWS = 16  # of every dense product, where results are to be exact
KEY_SPLIT = 512  # cells: SDPA on the CPU reduces keys in splits of this size
QUERY_ROWS = 16  # rows of one sequence that share one attention task
GROUP = 32  # weights that share a scale in 4-bit and 8-bit formats


# linear layers --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DenseLinear:
    """y = x W^T + b in the weight's own type; with `exact` in products of PRODUCT_ROWS rows, for rows padded to that."""

    weight: Tensor  # [N, K] float32 or bfloat16
    bias: Tensor | None = None  # [N]
    exact: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if not self.exact or len(x) <= PRODUCT_ROWS:
            return F.linear(x, self.weight, self.bias)
        return torch.cat([F.linear(rows, self.weight, self.bias) for rows in x.split(PRODUCT_ROWS)])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """y = x W^T + b with W = (q - 8) * scale + zero in groups of 32 along K, through torch's int4 operator (bf16 rows)."""

    packed: Tensor  # of _convert_weight_to_int4pack_for_cpu
    scale_zero: Tensor  # bfloat16 [K / 32, N, 2]
    bias: Tensor | None = None  # bfloat16 [N]

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scale_zero)
        return y if self.bias is None else y + self.bias

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale_zero.nbytes + (self.bias.nbytes if self.bias is not None else 0)


Linear = DenseLinear | Int4Linear


def int4_linear(quants: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> Int4Linear:
    """From quants uint8 [N, K] in 0..15 with W = q * scale + minimum, both float [N, K / 32]."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants.to(torch.int32), 1)
    scale, minimum = scale.float(), minimum.float()
    scale_zero = torch.stack([scale, minimum + 8 * scale], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
    return Int4Linear(packed, scale_zero, None if bias is None else bias.to(torch.bfloat16))


def padded_rows(count: int) -> int:
    """`count` rounded up to whole products of PRODUCT_ROWS."""
    return max(-(-count // PRODUCT_ROWS), 1) * PRODUCT_ROWS


# row operations -------------------------------------------------------------------------------------------------------
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; result in x's type."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, 2 * I] with the gate's columns first; [T, I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the first dimensions of each head, the others stay; float32 inside.

    x [T, heads, head_dim], cos and sin float32 [T, rotated dimensions / 2].
    """
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


# cells and attention --------------------------------------------------------------------------------------------------
def write_cells(kv: KvCache, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write one cell a row: keys and values [T, kv_heads, head_dim] to cell `offsets` of `blocks` (int64 [T])."""
    kv.tensor[blocks, layer, 0, :, offsets] = keys.to(kv.dtype)
    kv.tensor[blocks, layer, 1, :, offsets] = values.to(kv.dtype)


@dataclass(frozen=True, slots=True)
class _Task:
    """Query rows that attend together: one sequence in tiles, or one row each of several sequences."""

    tables: Tensor  # int64 [sequences, blocks]
    ends: list[int]  # cells of each sequence that are read; what lies behind is zeroed
    rows: Tensor  # int64 [tasks, rows per task]; padding repeats a row
    mask: Tensor  # bool [tasks, 1, query rows, cells]: True where a cell is read
    keep: int  # rows, in flattened order, that are no padding
    first: int  # the cell at which attention begins


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the attention of one step looks like in every layer."""

    tasks: list[_Task]
    group: int  # query heads a key-value head

    @staticmethod
    def of(positions: Tensor, seq_of: Tensor, tables: Tensor, kv: KvCache, heads: int, first_cell: int = 0) -> "AttentionPlan":
        """From positions, seq_of [T] and tables [S, blocks]; the rows of a sequence are contiguous. Cells before `first_cell`
        are not read; no position may lie there."""
        group = heads // kv.tensor.shape[3]
        starts = [0, *((seq_of[1:] != seq_of[:-1]).nonzero()[:, 0] + 1).tolist(), len(seq_of)]
        tasks = []
        singles: dict[int, list[int]] = {}  # rows alone in their sequence, by gathered cells
        for first, last in zip(starts, starts[1:]):
            cells = _round_up(int(positions[last - 1]) + 1, KEY_SPLIT)
            if last - first == 1:
                singles.setdefault(cells, []).append(first)
            else:
                table = tables[int(seq_of[first])][None]
                tasks.append(_task(torch.arange(first, last), QUERY_ROWS, positions, table, cells, kv, group, first_cell))
        for cells, rows in singles.items():
            index = torch.tensor(rows)
            tasks.append(_task(index, 1, positions, tables[seq_of[index].long()], cells, kv, group, first_cell))
        return AttentionPlan(tasks, group)


def attention(q: Tensor, kv: KvCache, layer: int, plan: AttentionPlan) -> Tensor:
    """Causal attention over the blocks: q [T, heads, head_dim] -> [T, heads * head_dim] in q's type.

    Every row's own cell is already written. Softmax over q k / sqrt(head_dim), the query heads of a key-value head folded
    into rows (as a group dimension they are 5 to 8 times slower in bf16).
    """
    tokens, heads, dim = q.shape
    kv_heads, group = heads // plan.group, plan.group
    out = torch.empty(tokens, heads * dim, dtype=q.dtype)
    for task in plan.tasks:
        count, rows = task.rows.shape
        keys, values = _gather(kv, layer, task)
        query = q[task.rows].view(count, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(count, kv_heads, group * rows, dim)
        padding = task.mask.shape[2] - group * rows
        if padding:
            query = torch.cat([query, query[:, :, :1].expand(-1, -1, padding, -1)], 2)
        keys, values = keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1)
        result = F.scaled_dot_product_attention(query, keys, values, attn_mask=task.mask)[:, :, : group * rows]
        result = result.reshape(count, kv_heads, group, rows, dim).permute(0, 3, 1, 2, 4).reshape(count * rows, heads * dim)
        out[task.rows.view(-1)[: task.keep]] = result[: task.keep]
    return out


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _task(rows: Tensor, tile: int, positions: Tensor, tables: Tensor, cells: int, kv: KvCache, group: int, first: int) -> _Task:
    keep = len(rows)
    rows = torch.cat([rows, rows[-1:].expand(-keep % tile)]).view(-1, tile)
    blocks = cells // kv.block_size
    if tables.shape[1] < blocks:
        scratch = torch.full((len(tables), blocks - tables.shape[1]), kv.scratch, dtype=tables.dtype)
        tables = torch.cat([tables, scratch], 1)
    at = positions[rows].long()
    cell = torch.arange(cells)[None, None]
    mask = (cell <= at[:, :, None]) & (cell >= first)
    mask = mask[:, None].expand(-1, group, -1, -1).reshape(len(rows), group * tile, cells)
    padding = -(group * tile) % 4
    if padding:
        mask = torch.cat([mask, mask[:, :1].expand(-1, padding, -1)], 1)
    ends = [int(at.max()) + 1] if len(tables) == 1 else (at[:, 0] + 1).tolist()
    return _Task(tables[:, :blocks].long(), ends, rows, mask[:, None].contiguous(), keep, first)


def _gather(kv: KvCache, layer: int, task: _Task) -> tuple[Tensor, Tensor]:
    """Keys and values [sequences, kv_heads, cells, head_dim]; zero where nothing is read, as old bytes may be NaN."""
    _, _, _, kv_heads, block_size, dim = kv.tensor.shape
    sequences, blocks = task.tables.shape
    part = torch.arange(2)[None, :, None, None]
    head = torch.arange(kv_heads)[None, None, :, None]
    index = kv.row(task.tables[:, None, None, :], layer, part, head)
    rows = kv.rows.index_select(0, index.reshape(-1))
    both = rows.view(sequences, 2, kv_heads, blocks * block_size, dim)
    for sequence, end in enumerate(task.ends):
        both[sequence, :, :, end:] = 0
        both[sequence, :, :, : task.first] = 0
    return both[:, 0], both[:, 1]
