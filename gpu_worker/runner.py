"""One step: rows in, tokens out. The head drafts, the model computes tokens and drafts, the draws judge them.

Nothing of a draft outlives the step: what the model wrote for rejected ones is scratch, and the one thing that is not, the
hidden row of a block's newest cell, is put right here.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model
from gpu_worker.model.sampler import Candidates, SampleRow, draft, draw, takes_best, token_logprobs
from gpu_worker.policy.events import Plan, Row, RowResult, StepDone
from wire import failpoints


class Runner:
    """The model and its pool. Stateless between steps: what a row needs is in the row, in the cells and in the state."""

    def __init__(self, model: Model, kv: KvCache) -> None:
        self.model = model
        self.kv = kv
        self._candidates: Candidates | None = None
        if model.spec.mtp is not None and model.draft_ids is not None:
            self._candidates = Candidates(model.draft_ids.numpy(), model.spec.vocab)

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepDone:
        """Feed every row of the plan and its drafts in one forward pass; draw the tokens of those that reach their newest."""
        rows = plan.rows
        tables = _tables(rows)
        drafts = self._drafts(rows, tables)
        batch, outs = _batch(rows, drafts, tables)
        hidden = self.model.forward(batch, self.kv)
        logits = self.model.logits(hidden) if len(hidden) else None
        if failpoints.armed and any(drafts):
            failpoints.hit("verify")
        results = []
        for row, drafted, out in zip(rows, drafts, outs, strict=True):
            prompt_logprobs = []
            if out.prompt_rows:
                part = logits[out.first : out.samples_at]
                targets = row.tokens[row.start + 1 : row.start + 1 + out.prompt_rows]
                prompt_logprobs = token_logprobs(part, targets, row.prompt_logprobs)
            result = RowResult(row.request_id, prompt_logprobs=prompt_logprobs)
            if row.samples:
                result = _judge(row, drafted, logits[out.samples_at :].numpy(), prompt_logprobs)
                self._keep_hidden(row, drafted, result, hidden[out.samples_at :])
            results.append(result)
        return StepDone(results, plan.epoch)

    # drafts -----------------------------------------------------------------------------------------------------------
    def _drafts(self, rows: Rows[Row], tables: Tensor) -> list[list[int]]:
        """What the head drafts behind each row's token: one draft for each row that wants one, then the next from it, and so on.

        The first is made from the hidden row of the newest computed cell, which lies in the cell's block; a sequence's first
        token has none before it.
        """
        drafts: list[list[int]] = [[] for _ in rows]
        chained = [index for index, row in enumerate(rows) if wanted_drafts(row)]
        if not chained:
            return drafts
        blocks = [rows[index].blocks[(rows[index].start - 1) // self.kv.block_size] for index in chained]
        hidden = self.kv.hidden[torch.tensor(blocks)]
        tokens = [rows[index].tokens[rows[index].start] for index in chained]
        if self.model.draft_greedy is not None and all(takes_best(rows[index]) for index in chained):
            # nothing is drawn between the passes, so all of them are one call
            starts = torch.tensor([rows[index].start for index in chained], dtype=torch.int32)
            counts = [rows[index].draft for index in chained]
            own = tables[torch.tensor(chained)]
            found = self.model.draft_greedy(torch.tensor(tokens), starts, hidden, own, counts, self.kv)
            for index, drafted in zip(chained, found, strict=True):
                drafts[index] = drafted
            return drafts
        depth = 0
        while chained:
            positions = torch.tensor([rows[index].start + depth for index in chained], dtype=torch.int32)
            hidden = self.model.draft(torch.tensor(tokens), positions, hidden, tables[torch.tensor(chained)], self.kv)
            logits = self.model.draft_logits(hidden).numpy()
            for index, values in zip(chained, logits, strict=True):
                if (token := draft(values, _sample_row(rows[index], drafts[index]), self._candidates)) >= 0:
                    drafts[index].append(token)
            depth += 1
            more = [len(drafts[index]) == depth < rows[index].draft for index in chained]
            chained = [index for index, goes_on in zip(chained, more, strict=True) if goes_on]
            hidden = hidden[torch.tensor(more)]
            tokens = [drafts[index][-1] for index in chained]
        return drafts

    def _keep_hidden(self, row: Row, drafted: list[int], result: RowResult, hidden: Tensor) -> None:
        """Leave in its block the hidden row of the last cell that counts, where the pass has left that of a rejected draft."""
        accepted = len(result.tokens) - 1
        if 0 <= accepted < len(drafted):
            self.kv.hidden[row.blocks[(row.start + accepted) // self.kv.block_size]] = hidden[accepted]


class _Out:
    """Which of the rows that go on to the logits belong to one Row: first its prompt logprobs, then its samples."""

    __slots__ = ("first", "prompt_rows")

    def __init__(self, first: int, prompt_rows: int) -> None:
        self.first, self.prompt_rows = first, prompt_rows

    @property
    def samples_at(self) -> int:
        return self.first + self.prompt_rows


def wanted_drafts(row: Row) -> int:
    """What the head is to draft behind the row's token: nothing behind a sequence's first, which has no hidden row before it."""
    return row.draft if row.start else 0


def prompt_rows_of(row: Row) -> int:
    """How many of the row's tokens predict prompt tokens whose log probabilities are wanted: its first ones."""
    return 0 if row.prompt_logprobs is None else max(0, min(row.count, row.prompt_len - 1 - row.start))


def _tables(rows: Rows[Row]) -> Tensor:
    """The rows' blocks: int32 [rows, most blocks], filled up with block 0."""
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = row.blocks
    return torch.from_numpy(tables)


def _batch(rows: Rows[Row], drafts: list[list[int]], tables: Tensor) -> tuple[Batch, list[_Out]]:
    """The step as tensors, and where each row's hidden rows will stand."""
    token_ids: list[int] = []
    positions: list[int] = []
    seq_of: list[int] = []
    out_rows: list[int] = []
    outs: list[_Out] = []
    for index, (row, drafted) in enumerate(zip(rows, drafts, strict=True)):
        base = len(token_ids)
        fed = row.count + len(drafted)
        token_ids += row.tokens[row.start : row.start + row.count]
        token_ids += drafted
        positions += range(row.start, row.start + fed)
        seq_of += [index] * fed
        prompt_rows = prompt_rows_of(row)
        outs.append(_Out(len(out_rows), prompt_rows))
        out_rows += range(base, base + prompt_rows)
        if row.samples:
            out_rows += range(base + row.count - 1, base + fed)
    batch = Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int32),
        seq_of=torch.tensor(seq_of, dtype=torch.int32),
        block_tables=tables,
        out_rows=torch.tensor(out_rows, dtype=torch.int64),
        known=torch.tensor([row.start + row.count for row in rows], dtype=torch.int32),
        state_slots=torch.tensor([max(row.state_slot, 0) for row in rows], dtype=torch.int32),
    )
    return batch, outs


def _sample_row(row: Row, drafted: list[int]) -> SampleRow:
    """What the draw behind the row's tokens and `drafted` depends on."""
    position = row.start + row.count + len(drafted)
    return SampleRow(row.sampling, position, row.tokens, row.prompt_len, row.banned, list(drafted))


def _judge(row: Row, drafted: list[int], logits: np.ndarray, prompt_logprobs: list) -> RowResult:
    """The drawn token, and one more for each draft that the draw in its place agrees with. `logits`: [1 + drafts, vocab]

    A draw that fails behind an accepted draft is left to a step of its own: what came before it may end the text.
    """
    tokens, logprobs = [], []
    for j in range(1 + len(drafted)):
        if tokens != drafted[:j]:
            break
        one = draw(logits[j], _sample_row(row, drafted[:j]))
        if one.error and not tokens:
            return RowResult(row.request_id, error=one.error)
        if one.error:
            break
        tokens.append(one.token)
        if one.logprob is not None:
            logprobs.append(one.logprob)
    return RowResult(row.request_id, tokens, logprobs, prompt_logprobs)
