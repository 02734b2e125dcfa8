"""One step on a card: rows are written into page-locked arrays, the work is enqueued, its results are read back once.

Drafts, draws and their judgement happen on the card; the host draws nothing. A step of decodes whose shape comes again is a
graph. Log probabilities are computed from downloaded logits by the functions that the CPU uses, and only where somebody asks.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from gpu_worker.device.cuda import Card, Graph
from gpu_worker.device.draw_params import DrawTable
from gpu_worker.device.step_buffers import Shape, StepBuffers
from gpu_worker.model.sampler import failure, token_logprobs
from gpu_worker.policy.events import Plan, Row, RowResult, StepDone
from gpu_worker.staging import Cut, Draws, Seats, Staged, stage

GRAPHS = 96  # that are kept


class EnqueuedModel(Cut, Protocol):
    """What a step needs of a model on a card. What is enqueued depends on the shape and on addresses only."""

    buffers: StepBuffers

    def enqueue_drafts(self, shape: Shape) -> None: ...
    def enqueue_forward(self, shape: Shape) -> None: ...
    def enqueue_draws(self, shape: Shape) -> None: ...
    def scratch(self, draw: int) -> int: ...  # address of the row in which the logits of a draw may be changed
    def enqueue_logits(self, first: int, count: int) -> None: ...  # of rows that go to the head, at most Limits.draws
    def logits_rows(self, count: int) -> Tensor: ...  # float32 [count, vocab] on the card, what the last two left there


class Tensors(Protocol):
    """What a step needs of torch on a card."""

    def zeros(self, nbytes: int) -> Tensor: ...
    def download(self, tensor: Tensor) -> Tensor: ...  # to host memory, when all that was enqueued is over


class CardRunner:
    """The model on a card, its step buffers and graphs. The results of a step are seen before the next begins."""

    def __init__(self, card: Card, on_card: Tensors, model: EnqueuedModel) -> None:
        self._card, self._on_card, self._model = card, on_card, model
        buffers = model.buffers
        self._buffers = buffers
        self._seats = Seats(buffers.limits.seats, buffers.tables, buffers.upload_table)
        records = buffers.draw_params.view(np.uint8)
        self._draws = Draws(DrawTable(records, self._lists), buffers.limits.sequences, model.scratch)
        self._lists_memory: Tensor | None = None
        self._graphs = Graphs(card)
        self._ended = card.event()

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepDone:
        """Feed every row of the plan and its drafts in one forward pass; draw the tokens of those that reach their newest."""
        rows, buffers = plan.rows, self._buffers
        seats = self._seats.place(rows)
        staged = stage(rows, seats, buffers, self._model)
        lists, address = self._draws.put(rows, seats, staged.first_draw)
        if len(lists):
            self._card.to_card(address, lists, self._card.compute)
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

    def _lists(self, count: int) -> tuple[np.ndarray, int]:
        """Room for the lists of draws: int32 [count] here, and the address of as much on the card."""
        self._lists_memory = self._on_card.zeros(count * 4)
        return self._card.pinned(count * 4).view(np.int32), self._lists_memory.data_ptr()

    def _results(self, rows: Rows[Row], staged: Staged) -> list[RowResult]:
        back = self._buffers.back
        drawn, accepted = back["drawn"][: staged.shape.draws].tolist(), back["accepted"][: len(rows)].tolist()
        results = []
        for row, first, agreed in zip(rows, staged.first_draw, accepted):
            tokens, error = _judged(drawn[first : first + 1 + agreed]) if first >= 0 else ([], "")
            results.append(RowResult(row.request_id, tokens, error=error))
        if any(row.sampling.logprobs is not None for row in rows):
            results = [self._with_logprobs(*one) for one in zip(rows, staged.first_draw, results)]
        if any(staged.prompt_rows):
            results = self._with_prompt_logprobs(rows, staged, results)
        return results

    def _with_logprobs(self, row: Row, first: int, result: RowResult) -> RowResult:
        """The logits are those of the draws, which are still there."""
        count = len(result.tokens)
        if row.sampling.logprobs is None or not count:
            return result
        logits = self._on_card.download(self._model.logits_rows(first + count)[first:])
        return structs.replace(result, logprobs=token_logprobs(logits, result.tokens, row.sampling.logprobs))

    def _with_prompt_logprobs(self, rows: Rows[Row], staged: Staged, results: list[RowResult]) -> list[RowResult]:
        """Logits are made piece by piece: there is no room for those of a whole prompt."""
        at, most = staged.shape.draws, self._buffers.limits.draws
        found = []
        for row, count, result in zip(rows, staged.prompt_rows, results, strict=True):
            targets = row.tokens[row.start + 1 : row.start + 1 + count]
            logprobs = []
            for first in range(0, count, most):
                part = targets[first : first + most]
                self._model.enqueue_logits(at + first, len(part))
                logits = self._on_card.download(self._model.logits_rows(len(part)))
                logprobs += token_logprobs(logits, part, row.prompt_logprobs)
            at += count
            found.append(structs.replace(result, prompt_logprobs=logprobs))
        return found


def _judged(drawn: list[int]) -> tuple[list[int], str]:
    """The tokens of a row and the line of its error, from its first draw and those behind accepted drafts. Only the first may
    have failed: `accept` in cuda/sample.cu leaves one behind an accepted draft to a step of its own."""
    return ([], failure(drawn[0])) if drawn[0] < 0 else (drawn, "")


class Graphs:
    """Captured steps by shape. The first step of a shape runs as it is, and what is made at first use is made outside a graph."""

    def __init__(self, card: Card, most: int = GRAPHS) -> None:
        self._card = card
        self._most = most
        self._seen: set[Shape] = set()
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, shape: Shape, enqueue: Callable[[Shape], None]) -> None:
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

    def _captured(self, shape: Shape, enqueue: Callable[[Shape], None]) -> Graph:
        with self._card.capture() as graphs:
            enqueue(shape)
        return graphs[0]
