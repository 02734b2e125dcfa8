"""A model on a card: what the runner enqueues for a step, and the same with host tensors in and out, as in `model/decoder.py`.

Everything that is enqueued is fixed by the Shape of the step, so it may be captured into a graph. Nothing here waits, apart from
the functions with host tensors.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from gpu_worker.device.cuda import Card
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.ops import Call, Ops
from gpu_worker.device.step_buffers import Shape, StepBuffers
from gpu_worker.device.torch_on_card import TorchOnCard
from gpu_worker.model.batch import Batch
from gpu_worker.model.card_program import TILE, Program, Workspace, kernel_names, splits
from gpu_worker.model.card_weights import CardWeights
from wire.model_spec import ModelSpec

_PROGRAMS = 64  # prepared parts of steps that are kept: a fraction of a MiB each for a model of 32 layers


class CardModel:
    """Weights, kernels and workspace of one card. `bind` it to a pool before anything is enqueued."""

    backend = "cuda"
    dtype_name = "bf16"
    dtype = kv_dtype = torch.bfloat16
    draft_greedy = None

    def __init__(
        self, spec: ModelSpec, weights: CardWeights, card: Card, on_card: TorchOnCard, buffers: StepBuffers, exact: bool = False
    ) -> None:
        """`exact`: every product has one number of rows. ConfigError if the kernels cannot be compiled."""
        self.spec, self.exact, self.buffers = spec, exact, buffers
        self.weight_bytes = weights.nbytes
        self._weights, self._card, self._on_card = weights, card, on_card
        self._ops = Ops(card, kernel_names(spec))
        self._work = Workspace(spec, weights, buffers.limits, on_card)
        self._program: Program | None = None
        self._kv: KvCache | None = None
        self._calls: OrderedDict[Hashable, list[Call]] = OrderedDict()  # least recently used first

    @property
    def draft_ids(self) -> Tensor | None:
        """int64: the only tokens that the head drafts, in the order of `draft_logits`; None: all."""
        ids = self._weights.mtp.draft_ids if self._weights.mtp else None
        return None if ids is None else self._on_card.download(ids).long()

    @property
    def tile_rows(self) -> int:
        """Rows of one sequence in a tile of attention, at most."""
        return TILE // (self.spec.num_heads // self.spec.num_kv_heads)

    def splits(self, tiles: int, longest: int) -> int:
        """Shape.splits for a step of `tiles` whose longest sequence has `longest` cells."""
        return splits(self.spec, tiles, longest)

    def bind(self, kv: KvCache) -> None:
        """From now on steps read and write the cells and states of `kv`."""
        self._kv = kv
        self._program = Program(self.spec, self._weights, self._ops, self._on_card, self._work, self.buffers, kv, self.exact)
        self._calls.clear()

    # steps ------------------------------------------------------------------------------------------------------------
    def enqueue_drafts(self, shape: Shape) -> None:
        """`shape.depth` passes of the head; the drafts go to `tokens`, behind the first row of each sequence."""
        self._run(("drafts", shape), lambda program: program.drafts(shape))

    def enqueue_forward(self, shape: Shape) -> None:
        """`tokens` to hidden rows; writes cells, states, and the hidden rows of blocks."""
        self._run(("forward", shape), lambda program: program.forward(shape))

    def enqueue_draws(self, shape: Shape) -> None:
        """Logits of the first `shape.draws` hidden rows, the draws, and how many drafts agree with them."""
        self._run(("draws", shape), lambda program: program.draws(shape))

    def enqueue_logits(self, first: int, count: int) -> None:
        """`logits_rows` of hidden rows first .. first + count that go to the head, at most Limits.draws at once."""
        self._run(("logits", first, count), lambda program: program.logits(first, count))

    def logits_rows(self, count: int) -> Tensor:
        """float32 [count, vocab] on the card: what `enqueue_draws` or `enqueue_logits` has left there."""
        return self._work.logits[:count]

    def hidden_rows(self) -> Tensor:
        """bf16 [R, hidden] on the card: every row of the last forward pass of a model with a head."""
        return self._work.hidden

    def scratch(self, draw: int) -> int:
        """Address of the row in which the logits of a draw may be changed."""
        return self._work.changed[draw].data_ptr()

    def _run(self, key: Hashable, prepare: Callable[[Program], list[Call]]) -> None:
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = prepare(self._bound())
            if len(self._calls) > _PROGRAMS:
                self._calls.popitem(last=False)
        self._calls.move_to_end(key)
        with self._on_card.streaming():
            for call in calls:
                call()

    # host tensors in and out ------------------------------------------------------------------------------------------
    def distinct_layers(self) -> list[int]:
        """One layer with attention, one with a state."""
        return sorted({type(layer): index for index, layer in enumerate(self._weights.layers)}.values())

    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor:
        """Hidden rows after the final norm, bf16 [n_out, hidden], and all that a step leaves in `kv`, which must be on the card.

        Takes the seats of running sequences: not for a model that serves. `layers` runs only some layers (the proof of
        exactness does). ValueError if a slot's state is not one that its rows can go on from.
        """
        self._use(kv)
        b, rows, outs = self.buffers, len(batch.positions), len(batch.out_rows)
        tiles, longest = self._place(batch)
        b.tokens[:rows] = batch.token_ids.numpy()
        b.out_rows[:outs] = batch.out_rows.numpy()
        b.upload()
        shape = Shape(rows, len(batch.block_tables), tiles, outs, draws=0, splits=self.splits(tiles, longest))
        only = None if layers is None else tuple(layers)
        self._run(("forward", shape, only), lambda program: program.forward(shape, layers))
        b.download()
        hidden = self._on_card.download(self._work.out_hidden[:outs])
        if b.back["status"][0]:
            raise ValueError("a state slot holds the state of another position")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of hidden rows [n, hidden]."""
        self._bound()
        found = []
        for rows in hidden.split(self.buffers.limits.draws):
            self._on_card.put(self._work.out_hidden, rows.to(self.dtype))
            self.enqueue_logits(0, len(rows))
            found.append(self._on_card.download(self.logits_rows(len(rows))))
        return torch.cat(found)

    def draft(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, tables: Tensor, kv: KvCache) -> Tensor:
        """float32 [n, hidden]: one pass of the head for one row of each of n sequences, see TorchModel.draft."""
        if int(positions.min()) < 1:
            raise ValueError("the head has nothing to pair the first token with")
        self._use(kv)
        b, count = self.buffers, len(positions)
        b.clear()
        self._place_tables(tables)
        b.row_begin[:count] = range(count)
        b.tokens[1 : count + 1] = token_ids.numpy()  # a pass that is not the first takes the token behind its first row's
        b.draft_positions[0, :count] = positions.numpy()
        b.draft_tiles[0, :count] = 1
        b.upload()
        self._on_card.put(self._work.before, hidden.float())
        shape = Shape(count, count, count, 0, 0, splits=self.splits(count, int(positions.max()) + 1))
        self._run(("pass", shape), lambda program: program.draft_pass(shape, 1, b.at["draft_positions"], b.at["draft_tiles"]))
        return self._on_card.download(self._work.before[:count])

    def draft_logits(self, rows: Tensor) -> Tensor:
        """float32 [n, draft vocabulary] of rows that `draft` gave."""
        columns, found = self._bound().draft_columns, []
        for part in rows.split(self.buffers.limits.draws):
            count = len(part)
            self._on_card.put(self._work.normed, part.to(self.dtype))
            self._run(("draft logits", count), lambda program, count=count: program.draft_logits(count))
            found.append(self._on_card.download(columns[:count]))
        return torch.cat(found)

    def _use(self, kv: KvCache) -> None:
        """`kv` may have been written to by others than this model."""
        self._card.synchronize()
        if kv is not self._kv:
            self.bind(kv)

    def _bound(self) -> Program:
        assert self._program, "the model is not bound to a pool"
        return self._program

    def _place(self, batch: Batch) -> tuple[int, int]:
        """Rows, sequences and tiles of a batch into the buffers; (tiles, cells of the longest sequence)."""
        b = self.buffers
        b.clear()
        self._place_tables(batch.block_tables)
        sequences, rows = len(batch.block_tables), len(batch.positions)
        b.positions[:rows] = batch.positions.numpy()
        b.seq_of[:rows] = batch.seq_of.numpy()
        b.known[:sequences] = batch.known.numpy()
        b.slots[:sequences] = batch.state_slots.numpy()
        counts = torch.bincount(batch.seq_of, minlength=sequences)
        b.row_count[:sequences] = counts.numpy()
        b.row_begin[:sequences] = (counts.cumsum(0) - counts).numpy()
        tiles = 0
        for begin, count in zip(b.row_begin[:sequences].tolist(), counts.tolist()):
            for row in range(begin, begin + count, self.tile_rows):
                b.tile_row[tiles], b.tile_count[tiles] = row, min(self.tile_rows, begin + count - row)
                tiles += 1
        return tiles, int(batch.positions.max()) + 1

    def _place_tables(self, tables: Tensor) -> None:
        """Sequence i takes seat i."""
        b, (sequences, width) = self.buffers, tables.shape
        b.seats[:sequences] = range(sequences)
        b.tables[:sequences, :width] = tables.numpy()
        for seat in range(sequences):
            b.upload_table(seat, 0, width)
