"""A card and a model on it for tests of the runner: no driver, no kernels, and nothing happens before somebody waits.

The model is one of `test_runner.py` (hashes), its draws are those of `model/sampler.py`. It reads the step's arrays where a card
would, and checks what a card would go wrong by.
"""

import contextlib
import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from gpu_worker.device.draw_params import DRAW_BYTES, DrawRecord
from gpu_worker.device.step_buffers import Limits, Shape, StepBuffers
from gpu_worker.model.batch import Batch
from gpu_worker.model.sampler import Candidates, SampleRow, draft, draw, failure
from gpu_worker.policy.events import Row


class Event:
    def __init__(self, card: "StandInCard") -> None:
        self._card = card

    def record(self, stream: object) -> None:
        assert stream is self._card.compute

    def synchronize(self) -> None:
        self._card.run()


class StandInGraph:
    def __init__(self, card: "StandInCard", work: list[Callable]) -> None:
        self.card, self.work, self.open = card, work, True

    def launch(self) -> None:
        assert self.open
        self.card.graphs_launched += 1
        self.card.work += self.work

    def close(self) -> None:
        assert self.open and not self.card.work, "closed while it may be under way"
        self.open = False
        self.card.graphs_open -= 1


class StandInCard:
    """Its memory is the host's. What is enqueued waits in `work` until an event is waited for."""

    def __init__(self) -> None:
        self.compute = object()
        self.work: list[Callable] = []
        self.graphs_launched = self.graphs_captured = self.graphs_open = 0
        self.uploads: list[int] = []  # bytes

    def event(self) -> Event:
        return Event(self)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def to_card(self, address: int, source: np.ndarray, stream: object) -> None:
        assert stream is self.compute and source.flags.c_contiguous
        self.uploads.append(source.nbytes)
        self.work.append(lambda: ctypes.memmove(address, source.ctypes.data, source.nbytes))

    def to_host(self, target: np.ndarray, address: int, stream: object) -> None:
        assert stream is self.compute
        self.work.append(lambda: ctypes.memmove(target.ctypes.data, address, target.nbytes))

    @contextlib.contextmanager
    def capture(self):
        before, self.work = self.work, []
        graphs: list[StandInGraph] = []
        try:
            yield graphs
        finally:
            captured, self.work = self.work, before
        self.graphs_captured += 1
        self.graphs_open += 1
        graphs.append(StandInGraph(self, captured))

    def run(self) -> None:
        work, self.work = self.work, []
        for one in work:
            one()

    # torch_on_card
    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.run()
        return tensor.clone()


class StandInModel:
    """`model` behind the interface of CardModel. Tests say in `rows` what the next step is about."""

    tile_rows = 3

    def __init__(self, model, kv: SimpleNamespace, card: StandInCard, limits: Limits) -> None:
        self.model, self.kv, self.card = model, kv, card
        self.buffers = StepBuffers(card, card, limits)
        self.rows: list[Row] = []
        self.shapes: list[Shape] = []
        self._logits = torch.full((limits.draws, model.spec.vocab), torch.nan)
        self._hidden = torch.full((limits.rows + limits.draws, kv.hidden.shape[1]), torch.nan)
        self._ids = model.draft_ids.numpy() if model.draft_ids is not None else None
        self._scratch = np.zeros((limits.draws, model.spec.vocab), np.float32)

    def splits(self, tiles: int, longest: int) -> int:
        return max(1, longest // 16)

    def scratch(self, draw: int) -> int:
        return self._scratch[draw].ctypes.data

    def enqueue_drafts(self, shape: Shape) -> None:
        self.card.work.append(lambda: self._drafts(shape))

    def enqueue_forward(self, shape: Shape) -> None:
        self.card.work.append(lambda: self._forward(shape))

    def enqueue_draws(self, shape: Shape) -> None:
        self.card.work.append(lambda: self._draws(shape))

    def enqueue_logits(self, first: int, count: int) -> None:
        assert count <= self.buffers.limits.draws

        def work() -> None:
            self._logits[:count] = self.model.logits(self._hidden[first : first + count])

        self.card.work.append(work)

    def logits_rows(self, count: int) -> torch.Tensor:
        return self._logits[:count]

    # what the card does -----------------------------------------------------------------------------------------------
    def at(self, name: str) -> np.ndarray:
        """An array of the step as it lies on the card."""
        shape = getattr(self.buffers, name).shape
        return view(self.buffers.at[name], shape)

    def _table(self, index: int) -> np.ndarray:
        return self.at("tables")[self.at("seats")[index]]

    def _drafts(self, shape: Shape) -> None:
        tokens, begins, tiles = self.at("tokens"), self.at("row_begin"), self.at("draft_tiles")
        hidden: dict[int, torch.Tensor] = {}
        for depth in range(shape.depth):
            positions = self.at("draft_positions")[depth]
            going = [s for s in range(shape.sequences) if positions[s] >= 0 and tokens[begins[s] + depth] >= 0]
            assert (tiles[depth] == (positions >= 0)).all()
            if not going:
                return
            if not depth:
                hidden = {s: self.kv.hidden[self._table(s)[(positions[s] - 1) // self.kv.block_size]] for s in going}
            out = self.model.draft(
                torch.tensor([tokens[begins[s] + depth] for s in going]),
                torch.tensor(positions[going]),
                torch.stack([hidden[s] for s in going]),
                torch.tensor(np.stack([self._table(s) for s in going])),
                self.kv,
            )
            hidden = dict(zip(going, out, strict=True))
            candidates = Candidates(self._ids, self.model.spec.vocab) if self._ids is not None else None
            for s, logits in zip(going, self.model.draft_logits(out).numpy(), strict=True):
                drafted = tokens[begins[s] + 1 : begins[s] + 1 + depth].tolist()
                tokens[begins[s] + 1 + depth] = draft(logits, self._sample_row(s, int(positions[s]) + 1, drafted), candidates)

    def _forward(self, shape: Shape) -> None:
        self.shapes.append(shape)
        positions, counts = self.at("positions"), self.at("row_count")
        real = positions >= 0
        rows = int(real.sum())
        assert real[:rows].all() and rows <= shape.rows and not real[shape.rows :].any()
        assert counts.sum() == rows and not counts[shape.sequences :].any()
        self._check_tiles(shape, rows)
        outs = self.at("out_rows")
        assert (outs[shape.outs :] == -1).all()
        sequences = int((counts > 0).sum())
        failed = self.at("tokens")[:rows] < 0
        batch = Batch(
            token_ids=torch.tensor(np.where(failed, 0, self.at("tokens")[:rows]), dtype=torch.int64),
            positions=torch.tensor(positions[:rows]),
            seq_of=torch.tensor(self.at("seq_of")[:rows]),
            block_tables=torch.tensor(np.stack([self._table(s) for s in range(sequences)])),
            out_rows=torch.arange(rows),
            known=torch.tensor(self.at("known")[:sequences]),
            state_slots=torch.tensor(self.at("slots")[:sequences]),
        )
        hidden = self.model.forward(batch, self.kv)
        self._rows = hidden
        for out, row in enumerate(outs[: shape.outs].tolist()):
            self._hidden[out] = hidden[row] if row >= 0 else torch.nan

    def _check_tiles(self, shape: Shape, rows: int) -> None:
        covered = []
        for first, count in zip(self.at("tile_row"), self.at("tile_count"), strict=True):
            covered += range(first, first + count)
            assert len({int(s) for s in self.at("seq_of")[first : first + count]}) <= 1 and count <= self.tile_rows
        assert covered == list(range(rows)) and not self.at("tile_count")[shape.tiles :].any()

    def _draws(self, shape: Shape) -> None:
        drawn, accepted, tokens = self.at("drawn"), self.at("accepted"), self.at("tokens")
        of, rows, begins, firsts = (self.at(name) for name in ("draw_seq", "out_rows", "row_begin", "first_draw"))
        drafts, counts = self.at("drafts"), self.at("row_count")
        assert (of[shape.draws :] == -1).all()
        real = int((of >= 0).sum())
        self._logits[:real] = self.model.logits(self._hidden[:real])
        for n in range(shape.draws):
            if of[n] < 0:
                assert rows[n] == -1
                continue
            s = int(of[n])
            j = n - int(firsts[s])
            newest = int(begins[s] + counts[s] - 1 - drafts[s])
            assert rows[n] == newest + j
            drafted = tokens[newest + 1 : newest + 1 + j].tolist()
            self._check_record(s)
            one = draw(self._logits[n].numpy(), self._sample_row(s, int(self.at("positions")[newest]) + 1 + j, drafted))
            drawn[n] = one.token if not one.error else next(code for code in (-1, -2) if failure(code) == one.error)
        for s in range(shape.sequences):
            accepted[s] = self._agreed(s) if firsts[s] >= 0 else -1
            if 0 <= accepted[s] < drafts[s]:
                last = int(begins[s] + counts[s] - 1 - drafts[s] + accepted[s])
                position = int(self.at("positions")[last])
                self.kv.hidden[self._table(s)[position // self.kv.block_size]] = self._rows[last]

    def _agreed(self, s: int) -> int:
        first, newest = self.at("first_draw")[s], self.at("row_begin")[s] + self.at("row_count")[s] - 1 - self.at("drafts")[s]
        drawn, tokens = self.at("drawn")[first:], self.at("tokens")[newest + 1 :]
        agreed = 0
        while agreed < self.at("drafts")[s] and drawn[agreed] == tokens[agreed] >= 0:
            agreed += 1
        return agreed - 1 if agreed and drawn[agreed] < 0 else agreed

    def _sample_row(self, s: int, position: int, drafted: list[int]) -> SampleRow:
        row = self.rows[s]
        return SampleRow(row.sampling, position, row.tokens[: position - len(drafted)], row.prompt_len, row.banned, drafted)

    def _check_record(self, s: int) -> None:
        """What the card would read of the draw's settings: the record's own bytes, and its lists by their addresses."""
        row, record = self.rows[s], self.at("draw_params").view(np.uint8)[s]
        assert record.nbytes == DRAW_BYTES
        fresh = DrawRecord(row.sampling, row.prompt_len)
        lists = fresh.seen(row.tokens, row.start + row.count), fresh.bias, np.array(row.banned, np.int32)
        packed = np.frombuffer(fresh.packed, np.uint8)
        assert (record[:16] == packed[:16]).all() and (record[60:] == packed[60:]).all()
        addresses, counts = record[16:48].view(np.int64), record[48:60].view(np.int32)
        if not fresh.changes(row.banned):
            assert not addresses.any() and not counts.any()
            return
        assert addresses[3] == self.scratch(int(self.at("first_draw")[s]))
        assert counts.tolist() == [len(part) for part in lists]
        for address, part in zip(addresses, lists):
            found = view(int(address), part.shape)
            assert sorted(found.tolist()) == sorted(part.tolist())


def view(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32 at an address."""
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).reshape(shape) if count else np.zeros(shape, int)
