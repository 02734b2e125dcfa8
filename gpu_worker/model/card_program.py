"""What a step on a card enqueues, in order: kernels (`device/ops.py`) and matrix products, all prepared for one shape of step.

The residual stream `x` is float32; what enters a product is bf16, as is what comes out of it; its sum goes into `x` at the start
of the next norm. Sizes in comments: R rows, S sequences, N draws, H hidden.
"""

from functools import partial
from math import prod

import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.ops import Call, Ops
from gpu_worker.device.step_buffers import Limits, Shape, StepBuffers
from gpu_worker.device.torch_on_card import TorchOnCard
from gpu_worker.model.card_weights import CardAttention, CardDelta, CardHead, CardMlp, CardWeights, Product
from wire.model_spec import DeltaSpec, ModelSpec

SPLIT = 256  # cells that one block of attention reads before it folds or hands over
TILE = 16  # rows times query heads a key-value head that one block of attention works on
EXACT_ROWS = 64  # of every product, where results are to be exact
PARTIALS = 8192  # of attention, at most, that wait in memory to be folded: 16 KiB each where heads have 256 dimensions
LOG_BLOCKS = 8  # for each sequence's logs
BUSY = 264  # tiles times key-value heads from which a card is busy without splits; not measured on a card


def kernel_names(spec: ModelSpec) -> list[str]:
    """What a model of this shape launches."""
    names = ["embed", "rms_norm", "silu_mul", f"write_cells_d{spec.head_dim}", f"attend_d{spec.head_dim}"]
    names += ["draw", "accept"]
    if spec.delta:
        kind = f"k{spec.delta.key_dim}"
        names += [f"delta_inputs_{kind}", f"delta_rule_{kind}", "delta_check", "delta_log", "delta_gate", "delta_finish"]
    if spec.mtp:
        names += ["pair", "pair_draft", "draw_draft", "keep_hidden", "keep_accepted"]
    return names


def splits(spec: ModelSpec, tiles: int, longest: int) -> int:
    """Shape.splits for a step whose longest sequence has `longest` cells: a power of two, or 1 where the card is busy anyway."""
    parts, blocks = _covering(longest), tiles * spec.num_kv_heads
    return parts if blocks < BUSY and blocks * parts <= PARTIALS else 1


class Workspace:
    """Memory on the card that a step writes before it reads. Rows have room for whole products of EXACT_ROWS."""

    def __init__(self, spec: ModelSpec, weights: CardWeights, limits: Limits, on_card: TorchOnCard) -> None:
        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            count = prod(shape)
            return on_card.zeros(max(count, 1) * dtype.itemsize).view(dtype)[:count].view(*shape)

        rows, draws = _padded(limits.rows), _padded(limits.draws)
        bf16, f32 = torch.bfloat16, torch.float32
        mlps = [layer.mlp for layer in weights.layers] + ([weights.mtp.layer.mlp] if weights.mtp else [])
        products = [layer.qkv if isinstance(layer, CardAttention) else layer.mixed for layer in weights.layers]
        products += [mlp.gate_up for mlp in mlps] + ([weights.mtp.layer.qkv] if weights.mtp else [])
        wide = max(len(product.weight) for product in products)
        inner = [spec.num_heads * spec.head_dim, *(mlp.down.weight.shape[1] for mlp in mlps)]
        self.x = make(f32, rows, spec.hidden)
        self.normed = make(bf16, rows, spec.hidden)
        self.added = make(bf16, rows, spec.hidden)
        self._wide = make(bf16, rows * wide)
        self.q = make(bf16, rows, spec.num_heads * spec.head_dim)
        if delta := spec.delta:
            inner.append(delta.value_width)
            self.delta_q, self.delta_k = make(f32, rows, delta.key_width), make(f32, rows, delta.key_width)
            self.delta_v, self.delta_out = make(f32, rows, delta.value_width), make(f32, rows, delta.value_width)
            self.delta_g, self.delta_beta = make(f32, rows, delta.value_heads), make(f32, rows, delta.value_heads)
        self._inner = make(bf16, rows * max(inner))
        self.out_hidden = make(bf16, rows + draws + EXACT_ROWS, spec.hidden)  # products of its rows begin anywhere
        if spec.mtp:
            self.hidden = make(bf16, rows, spec.hidden)
            self.pairs = make(bf16, rows, 2 * spec.hidden)
            self.before = make(f32, _padded(limits.sequences), spec.hidden)
        self.logits = make(f32, draws, spec.vocab)
        self.changed = make(f32, draws, spec.vocab)
        partials = min(PARTIALS, min(BUSY, limits.rows * spec.num_kv_heads) * _covering(limits.table_stride * 16))
        self.part_o = make(f32, partials, TILE, spec.head_dim)
        self.part_ml = make(f32, partials, TILE, 2)
        self.done = make(torch.int32, limits.rows, spec.num_kv_heads)  # zero before and after every launch

    def wide(self, width: int) -> Tensor:
        """bf16 [R, width]: what comes out of a fused product."""
        return self._wide[: len(self.x) * width].view(-1, width)

    def inner(self, width: int) -> Tensor:
        """bf16 [R, width]: what enters the product that closes half a layer."""
        return self._inner[: len(self.x) * width].view(-1, width)


class Program:
    """Makes the calls of each part of a step, for one pool."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: CardWeights,
        ops: Ops,
        on_card: TorchOnCard,
        workspace: Workspace,
        buffers: StepBuffers,
        kv: KvCache,
        exact: bool,
    ) -> None:
        if kv.dtype != torch.bfloat16 or kv.block_size != 16 or kv.layers != spec.kv_layers:
            raise ValueError(f"{kv.layers} layers of cells of {kv.dtype} in blocks of {kv.block_size} do not fit this model")
        self._spec, self._weights, self._ops, self._on_card = spec, weights, ops, on_card
        self._work, self._kv, self._exact = workspace, kv, exact
        self._at = buffers.at
        self._table = (buffers.at["seats"], buffers.at["tables"], buffers.limits.table_stride)
        self._sequences = buffers.limits.sequences
        self._pool = (kv.memory.data_ptr(), kv.block_bytes)
        cells, recurrent = spec.attention_layers, spec.delta.layers if spec.delta else ()
        self._place = {index: at for at, index in enumerate(cells)} | {index: at for at, index in enumerate(recurrent)}

    def forward(self, shape: Shape, layers: list[int] | None = None) -> list[Call]:
        """From `tokens` to `out_hidden` [outs], after the final norm; writes cells, states and hidden rows of blocks."""
        spec, weights, work, at = self._spec, self._weights, self._work, self._at
        rows, delta = shape.rows, spec.delta
        calls = []
        if delta:
            calls.append(self._state_call("delta_check", shape))
        calls.append(self._call("embed", rows, work.x, at["tokens"], weights.embed, spec.hidden))
        added: Tensor | None = None
        for index in layers if layers is not None else range(spec.num_layers):
            layer = weights.layers[index]
            calls.append(self._norm(rows, work.normed, layer.norm, added))
            added = work.added
            if isinstance(layer, CardDelta):
                assert delta is not None
                calls += self._recur(layer, self._place[index], shape, delta)
            else:
                calls += self._attend(layer, self._place[index], shape)
            calls += self._feed_forward(layer.mlp, rows)
        if weights.mtp:
            calls.append(self._norm(rows, work.hidden, weights.norm, added))
            added = None
        if shape.outs:
            calls.append(self._norm(shape.outs, work.out_hidden, weights.norm, added, rows_at=at["out_rows"]))
        if delta:
            calls.append(self._state_call("delta_finish", shape))
        if weights.mtp:
            calls += self._fill(weights.mtp, shape)
        return calls

    def logits(self, first: int, count: int) -> list[Call]:
        """`logits` [count] of `out_hidden` from row `first` on."""
        return self._product(self._weights.head, self._work.out_hidden[first:], self._work.logits, count)

    def draft_logits(self, count: int) -> list[Call]:
        """`logits` [count, rows of the drafting head] of the rows in `normed`."""
        assert self._weights.mtp is not None
        return self._product(self._weights.mtp.logits, self._work.normed, self.draft_columns, count)

    @property
    def draft_columns(self) -> Tensor:
        """The memory of `logits` for as many columns as the drafting head has: float32 [N, rows of the drafting head]."""
        assert self._weights.mtp is not None
        logits, columns = self._work.logits, len(self._weights.mtp.logits.weight)
        return logits.view(-1)[: len(logits) * columns].view(-1, columns)

    def draft_pass(self, shape: Shape, depth: int, positions: int, tiles: int) -> list[Call]:
        """One pass of the head, one row a sequence: `normed` bf16 and `before` float32 [S], for the logits and the next pass.

        `positions` and `tiles`: addresses of int32 [S]; where a tile is 0, the sequence drafts no more.
        """
        spec, work, at, head = self._spec, self._work, self._at, self._weights.mtp
        assert head is not None
        count = shape.sequences
        seats, tables, stride = self._table
        arguments = (at["tokens"], at["row_begin"], positions, seats, tables, stride, *self._pool, self._kv.hidden_at)
        arguments += (self._weights.embed, work.before, head.embed_norm, head.hidden_norm, spec.hidden, depth, spec.rms_eps)
        calls = [self._call("pair_draft", count, work.pairs, *arguments)]
        calls += self._product(head.fc, work.pairs, work.x, count)
        calls.append(self._norm(count, work.normed, head.layer.norm, None))
        one_each = Shape(rows=count, sequences=count, tiles=count, outs=0, draws=0, splits=shape.splits)
        places = (at["in_order"], tiles, positions, at["in_order"])
        calls += self._attend(head.layer, self._kv.layers - 1, one_each, first=1, places=places)
        calls += self._feed_forward(head.layer.mlp, count)
        calls.append(self._norm(count, work.normed, head.norm, work.added, work.before))
        return calls

    def drafts(self, shape: Shape) -> list[Call]:
        """All passes of the head; each token goes to `tokens`, where the next pass and the forward pass find it."""
        at, head, calls = self._at, self._weights.mtp, []
        assert head is not None
        for depth in range(shape.depth):
            positions, tiles = (at[name] + depth * self._sequences * 4 for name in ("draft_positions", "draft_tiles"))
            calls += self.draft_pass(shape, depth, positions, tiles)
            calls += self.draft_logits(shape.sequences)
            arguments = (at["tokens"], self.draft_columns, self.draft_columns.shape[1], head.draft_ids, head.column_of)
            arguments += (self._spec.vocab, at["draw_params"], positions, at["row_begin"], depth)
            calls.append(self._call("draw_draft", shape.sequences, *arguments))
        return calls

    def draws(self, shape: Shape) -> list[Call]:
        """Logits of the first rows of `out_hidden`, the tokens drawn from them, and the drafts that agree with these."""
        at, work = self._at, self._work
        calls = self.logits(0, shape.draws)
        names = ("draw_params", "tokens", "positions", "row_begin", "row_count", "drafts", "out_rows", "draw_seq")
        arguments = (at["drawn"], work.logits, self._spec.vocab, *(at[name] for name in names))
        calls.append(self._call("draw", shape.draws, *arguments))
        names = ("accepted", "drawn", "tokens", "row_begin", "row_count", "drafts", "first_draw")
        arguments = (*(at[name] for name in names), shape.sequences)
        calls.append(self._call("accept", -(-shape.sequences // 128), *arguments))
        if shape.depth:
            names = ("positions", "row_begin", "row_count", "drafts", "accepted")
            arguments = (*self._pool, self._kv.hidden_at, work.hidden, *(at[name] for name in names), *self._table)
            calls.append(self._call("keep_accepted", shape.sequences, *arguments, self._spec.hidden))
        return calls

    # parts ------------------------------------------------------------------------------------------------------------
    def _attend(
        self,
        layer: CardAttention,
        index: int,
        shape: Shape,
        first: int = 0,
        places: tuple[int, int, int, int] | None = None,
    ) -> list[Call]:
        """`normed` to `added`. `index`: of its cells; `first`: the cell at which attention begins; `places`: addresses of
        tile_row, tile_count, positions and seq_of, the step's if not given."""
        spec, work, at, rows = self._spec, self._work, self._at, shape.rows
        width = spec.num_heads * spec.head_dim
        tile_row, tile_count, positions, seq_of = places or (at["tile_row"], at["tile_count"], at["positions"], at["seq_of"])
        qkv = work.wide(len(layer.qkv.weight))
        attended = work.inner(width)
        calls = self._product(layer.qkv, work.normed, qkv, rows)
        calls.append(self._write_cells(layer, index, rows, qkv, (2 if spec.attn_gate else 1) * width, positions, seq_of, work.q))
        gate = qkv.data_ptr() + width * qkv.itemsize if spec.attn_gate else 0
        arguments = (*self._pool, gate, qkv.shape[1], tile_row, tile_count, positions, seq_of, *self._table)
        arguments += (spec.num_heads, spec.num_kv_heads, index, first, spec.head_dim**-0.5)
        arguments += (work.part_o, work.part_ml, work.done)
        grid = (shape.tiles, spec.num_kv_heads, shape.splits)
        calls.append(self._call(f"attend_d{spec.head_dim}", grid, attended, work.q, *arguments))
        return calls + self._product(layer.o, attended, work.added, rows)

    def _write_cells(
        self,
        layer: CardAttention,
        index: int,
        rows: int,
        qkv: Tensor,
        k_at: int,
        positions: int,
        seq_of: int,
        q: Tensor | None,
    ) -> Call:
        """Keys and values from columns `k_at` on, and from the first on the queries, if `q` is there for them."""
        spec, weights = self._spec, self._weights
        heads = 2 * spec.num_kv_heads + (spec.num_heads if q is not None else 0)
        v_at = k_at + spec.num_kv_heads * spec.head_dim
        arguments = (q, *self._pool, qkv, qkv.shape[1], 0, k_at, v_at, positions, seq_of, *self._table)
        arguments += (weights.cos, weights.sin, 2 * weights.cos.shape[1], layer.q_norm, layer.k_norm)
        arguments += (spec.num_heads, spec.num_kv_heads, index, spec.rms_eps)
        return self._call(f"write_cells_d{spec.head_dim}", (rows, -(-heads // 8)), *arguments)

    def _recur(self, layer: CardDelta, index: int, shape: Shape, delta: DeltaSpec) -> list[Call]:
        """`normed` to `added`. `index`: of its state."""
        work, at, rows, states = self._work, self._at, shape.rows, self._kv.states
        assert states is not None, "a model with recurrent layers needs a cache with states"
        parts = {name: states.offsets[name] + index * getattr(states, name)[0, 0].numel() for name in _STATE_PARTS}
        conv_entries, log_entries = states.conv.shape[2], states.log_k.shape[2]
        memory, stride = states.flat, states.stride
        mixed = work.wide(len(layer.mixed.weight))
        z_at = delta.conv_width
        a_at = z_at + delta.value_width
        heads = (delta.key_heads, delta.value_heads)
        begin, count, slots, positions = at["row_begin"], at["row_count"], at["slots"], at["positions"]
        calls = self._product(layer.mixed, work.normed, mixed, rows)
        qkv = (work.delta_q, work.delta_k, work.delta_v, work.delta_g, work.delta_beta)
        arguments = (memory, stride, parts["conv"], conv_entries, mixed, mixed.shape[1], a_at, a_at + delta.value_heads)
        arguments += (layer.conv, layer.dt_bias, layer.decay, positions, at["seq_of"], begin, slots)
        arguments += (*heads, delta.value_dim, delta.kernel)
        units = 2 * delta.key_heads + -(-delta.value_width // delta.key_dim) + -(-delta.value_heads // 32)
        calls.append(self._call(f"delta_inputs_k{delta.key_dim}", (rows, -(-units // 8)), *qkv, *arguments))
        arguments = (memory, stride, parts["state"], parts["log_k"], parts["log_d"], parts["log_g"], states.offsets["folded"])
        arguments += (log_entries, begin, count, positions, at["known"], slots, *heads, delta.value_dim)
        grid = (delta.value_dim // 32, delta.value_heads, shape.sequences)
        calls.append(self._call(f"delta_rule_k{delta.key_dim}", grid, work.delta_out, *qkv, *arguments))
        arguments = (memory, stride, parts["conv"], parts["log_k"], parts["log_g"], conv_entries, log_entries, mixed)
        arguments += (mixed.shape[1], work.delta_k, work.delta_g, begin, count, positions, slots)
        arguments += (*heads, delta.key_dim, delta.conv_width)
        calls.append(self._call("delta_log", (shape.sequences, LOG_BLOCKS), *arguments))
        y = work.inner(delta.value_width)
        arguments = (mixed, mixed.shape[1], z_at, layer.state_norm, positions, delta.value_heads, delta.value_dim)
        calls.append(
            self._call("delta_gate", (rows, -(-delta.value_heads // 8)), y, work.delta_out, *arguments, self._spec.rms_eps)
        )
        return calls + self._product(layer.out, y, work.added, rows)

    def _state_call(self, name: str, shape: Shape) -> Call:
        """Where the states stand: before the step, whether its rows can go on from there; after it, where they stand now."""
        states, at = self._kv.states, self._at
        assert states is not None, "a model with recurrent layers needs a cache with states"
        arguments = (states.flat, states.stride, states.offsets["folded"])
        arguments += tuple(at[array] for array in ("row_begin", "row_count", "positions", "known", "slots", "status"))
        return self._call(name, shape.sequences, *arguments)

    def _feed_forward(self, mlp: CardMlp, rows: int) -> list[Call]:
        """`x` + `added` to `x` and `added`."""
        work = self._work
        gate_up = work.wide(len(mlp.gate_up.weight))
        inner = gate_up.shape[1] // 2
        y = work.inner(inner)
        return [
            self._norm(rows, work.normed, mlp.norm, work.added),
            *self._product(mlp.gate_up, work.normed, gate_up, rows),
            self._call("silu_mul", min(-(-rows * inner // 2048), 1024), y, gate_up, rows, inner),
            *self._product(mlp.down, y, work.added, rows),
        ]

    def _fill(self, head: CardHead, shape: Shape) -> list[Call]:
        """The head's cells of all rows, from `hidden`; and the newest hidden row of each block. Leaves nothing in `x`."""
        spec, work, at, rows = self._spec, self._work, self._at, shape.rows
        hidden_at = self._kv.hidden_at
        where = (at["positions"], at["seq_of"])
        arguments = (at["tokens"], *where, at["row_begin"], *self._table, *self._pool, hidden_at)
        arguments += (self._weights.embed, work.hidden, head.embed_norm, head.hidden_norm, spec.hidden, spec.rms_eps)
        calls = [self._call("pair", rows, work.pairs, *arguments)]
        calls += self._product(head.fc, work.pairs, work.x, rows)
        calls.append(self._norm(rows, work.normed, head.layer.norm, None))
        cells = head.layer.qkv.rows(len(head.layer.qkv.weight) - 2 * spec.num_kv_heads * spec.head_dim)
        kv = work.wide(len(cells.weight))
        calls += self._product(cells, work.normed, kv, rows)
        calls.append(self._write_cells(head.layer, self._kv.layers - 1, rows, kv, 0, *where, None))
        arguments = (work.hidden, *where, at["row_begin"], at["row_count"], *self._table, spec.hidden)
        calls.append(self._call("keep_hidden", rows, *self._pool, hidden_at, *arguments))
        return calls

    def _norm(
        self, rows: int, y: Tensor, weight: Tensor, added: Tensor | None, y32: Tensor | None = None, *, rows_at: int = 0
    ) -> Call:
        """`x` + `added` normalised into `y`, and in float32 into `y32`. `rows_at`: address of which rows; `x` stays then."""
        spec = self._spec
        return self._call("rms_norm", rows, y, y32, self._work.x, added, weight, rows_at, spec.hidden, spec.rms_eps)

    def _product(self, product: Product, x: Tensor, out: Tensor, rows: int) -> list[Call]:
        """`out` [rows] = `x` [rows] W^T + b; if it is to be exact, in products of one size."""
        step = EXACT_ROWS if self._exact else rows
        parts = ((x[first : first + step], out[first : first + step]) for first in range(0, rows, step))
        return [partial(self._on_card.linear, part, product.weight, product.bias, into) for part, into in parts]

    def _call(self, name: str, grid: int | tuple[int, ...], *arguments: Tensor | float | None) -> Call:
        """A launch; a tensor stands for its address, None for no address."""
        plain = (a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments)
        return self._ops.prepare(name, grid if isinstance(grid, tuple) else (grid,), *plain)


_STATE_PARTS = ("state", "log_k", "log_d", "log_g", "conv")


def _covering(longest: int) -> int:
    """The least power of two of splits that hold `longest` cells."""
    return 1 << (-(-longest // SPLIT) - 1).bit_length()


def _padded(rows: int) -> int:
    return -(-rows // EXACT_ROWS) * EXACT_ROWS
