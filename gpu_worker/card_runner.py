"""One step on a card: rows are written into page-locked arrays, the work is enqueued, its results are read back once.

Drafts, draws and their judgement happen on the card; the host draws nothing. A step of decodes whose shape comes again is a
graph. Log probabilities are computed from downloaded logits by the functions that the CPU uses, and only where somebody asks.
"""

from collections import OrderedDict
from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.cuda import Card, Graph
from gpu_worker.device.step_buffers import Shape, StepBuffers
from gpu_worker.model.sampler import failure, token_logprobs
from gpu_worker.policy.events import Plan, Row, RowResult, StepDone
from gpu_worker.staging import Geometry, Seats, Staged, stage

GRAPHS = 96  # that are kept


class EnqueuedModel(Protocol):
    """What a step needs of a model on a card. What is enqueued depends on the shape and on addresses only."""

    buffers: StepBuffers

    def enqueue_drafts(self, shape: Shape) -> None: ...
    def enqueue_forward(self, shape: Shape) -> None: ...
    def enqueue_draws(self, shape: Shape) -> None: ...
    def read_logits(self, outs: list[int]) -> Tensor: ...  # float32 [n, vocab] in host memory, of a step that is over


class CardRunner:
    """The model on a card, its step buffers and graphs. The results of a step are seen before the next begins."""

    def __init__(self, card: Card, model: EnqueuedModel, geometry: Geometry) -> None:
        self._card, self._model, self._geometry = card, model, geometry
        buffers = model.buffers
        self._buffers = buffers
        self._seats = Seats(buffers.limits.seats, buffers.tables, buffers.upload_table)
        self._graphs = Graphs(card)
        self._ended = card.event()

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepDone:
        """Feed every row of the plan and its drafts in one forward pass; draw the tokens of those that reach their newest."""
        rows, buffers = plan.rows, self._buffers
        staged = stage(rows, self._seats.place(rows), buffers, self._geometry)
        buffers.upload()
        if staged.repeats:
            self._graphs.run(staged.shape, self._enqueue)
        else:
            self._enqueue(staged.shape)
        buffers.download()
        self._ended.record(self._card.compute)
        self._ended.synchronize()
        if buffers.back["status"][0]:
            raise RuntimeError("a recurrent state on the card is not of the position that its sequence has reached")
        return StepDone(self._results(rows, staged), plan.epoch)

    def close(self) -> None:
        """Give the graphs back, before the card is closed."""
        self._graphs.close()

    def _enqueue(self, shape: Shape) -> None:
        if shape.depth:
            self._model.enqueue_drafts(shape)
        self._model.enqueue_forward(shape)
        if shape.draws:
            self._model.enqueue_draws(shape)

    def _results(self, rows: Rows[Row], staged: Staged) -> list[RowResult]:
        back = self._buffers.back
        drawn, accepted = back["drawn"][: staged.shape.draws].tolist(), back["accepted"][: len(rows)].tolist()
        results = []
        for index, row in enumerate(rows):
            first = staged.first_draw[index]
            tokens, error = ([], "") if first < 0 else _judged(drawn[first : first + 1 + accepted[index]])
            if row.sampling.logprobs is None and not staged.prompt_rows[index]:
                results.append(RowResult(row.request_id, tokens, error=error))
            else:
                results.append(self._with_logprobs(row, staged, index, tokens, error))
        return results

    def _with_logprobs(self, row: Row, staged: Staged, index: int, tokens: list[int], error: str) -> RowResult:
        logprobs, prompt_logprobs = [], []
        if tokens and row.sampling.logprobs is not None:
            first = staged.first_draw[index]
            logits = self._model.read_logits(range(first, first + len(tokens)))
            logprobs = token_logprobs(logits, tokens, row.sampling.logprobs)
        if count := staged.prompt_rows[index]:
            first = staged.first_out[index]
            targets = row.tokens[row.start + 1 : row.start + 1 + count]
            prompt_logprobs = token_logprobs(self._model.read_logits(range(first, first + count)), targets, row.prompt_logprobs)
        return RowResult(row.request_id, tokens, logprobs, prompt_logprobs, error)


def _judged(drawn: list[int]) -> tuple[list[int], str]:
    """The tokens of a row and the line of its error, from its first draw and those behind accepted drafts. A draw that fails
    behind an accepted draft is left to a step of its own: what came before it may end the text."""
    if drawn[0] < 0:
        return [], failure(drawn[0])
    return (drawn[:-1] if drawn[-1] < 0 else drawn), ""


class Graphs:
    """Captured steps by shape. The first step of a shape runs as it is, and what is made at first use is made outside a graph."""

    def __init__(self, card: Card, most: int = GRAPHS) -> None:
        self._card = card
        self._most = most
        self._seen: set[Shape] = set()
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, shape: Shape, enqueue) -> None:
        """Enqueue what `enqueue(shape)` does, which must depend on the shape only. Nothing of a graph may be under way."""
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
        elif shape not in self._seen:
            self._seen.add(shape)
            enqueue(shape)
            return
        else:
            graph = self._graphs[shape] = self._captured(shape, enqueue)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)[1].close()
        graph.launch()

    def close(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

    def _captured(self, shape: Shape, enqueue) -> Graph:
        with self._card.capture() as graphs:
            enqueue(shape)
        return graphs[0]
