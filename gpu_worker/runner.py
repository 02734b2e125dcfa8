"""One step: rows in, tokens out. Turns the scheduler's rows into tensors, runs the model, draws the tokens."""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model
from gpu_worker.model.sampler import Sampled, SampleRow, sample, token_logprobs
from gpu_worker.policy.events import Plan, Row, RowResult, StepDone


class Runner:
    """The model and its pool. Stateless between steps: what a row needs is in the row and in the cells."""

    def __init__(self, model: Model, kv: KvCache) -> None:
        self.model = model
        self.kv = kv

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepDone:
        """Feed every row of the plan in one forward pass and draw the next tokens of those that reach their newest one."""
        rows = plan.rows
        batch, heads = _batch(rows)
        hidden = self.model.forward(batch, self.kv)
        logits = self.model.logits(hidden) if len(hidden) else None
        results = []
        drawn = iter(self._draw(rows, heads, logits))
        for row, head in zip(rows, heads, strict=True):
            prompt_logprobs = []
            if head.prompt_rows:
                part = logits[head.first : head.first + head.prompt_rows]
                targets = row.tokens[row.start + 1 : row.start + 1 + head.prompt_rows]
                prompt_logprobs = token_logprobs(part, targets, row.prompt_logprobs)
            sampled = [next(drawn) for _ in range(head.sample_rows)]
            results.append(_result(row, sampled, prompt_logprobs))
        return StepDone(results, plan.epoch)

    def _draw(self, rows: Rows[Row], heads: list["_Head"], logits: torch.Tensor | None) -> list[Sampled]:
        """The tokens of all sampling rows of the step, drawn in one call."""
        wanted = []
        for row, head in zip(rows, heads, strict=True):
            for j in range(head.sample_rows):
                seen = [*row.tokens, *row.draft[:j]] if j else row.tokens
                wanted.append(SampleRow(row.sampling, row.start + row.count + j, seen, row.prompt_len, row.banned))
        if not wanted:
            return []
        if any(head.prompt_rows for head in heads):
            index = [head.first + head.prompt_rows + j for head in heads for j in range(head.sample_rows)]
            logits = logits[torch.tensor(index)]
        return sample(logits, wanted)


class _Head:
    """Which of the rows that go on to the head belong to one Row: first its prompt logprobs, then its samples."""

    __slots__ = ("first", "prompt_rows", "sample_rows")

    def __init__(self, first: int, prompt_rows: int, sample_rows: int) -> None:
        self.first, self.prompt_rows, self.sample_rows = first, prompt_rows, sample_rows


def _batch(rows: Rows[Row]) -> tuple[Batch, list[_Head]]:
    """The step as tensors, and where each row's hidden states will stand."""
    token_ids: list[int] = []
    positions: list[int] = []
    seq_of: list[int] = []
    out_rows: list[int] = []
    heads: list[_Head] = []
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        base = len(token_ids)
        fed = row.count + len(row.draft)
        token_ids += row.tokens[row.start : row.start + row.count]
        token_ids += row.draft
        positions += range(row.start, row.start + fed)
        seq_of += [index] * fed
        tables[index, : len(row.blocks)] = row.blocks
        prompt_rows = 0
        if row.prompt_logprobs is not None:
            prompt_rows = max(0, min(row.count, row.prompt_len - 1 - row.start))
        sample_rows = 1 + len(row.draft) if row.samples else 0
        heads.append(_Head(len(out_rows), prompt_rows, sample_rows))
        out_rows += range(base, base + prompt_rows)
        if row.samples:
            out_rows += range(base + row.count - 1, base + fed)
    batch = Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int32),
        seq_of=torch.tensor(seq_of, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        out_rows=torch.tensor(out_rows, dtype=torch.int64),
    )
    return batch, heads


def _result(row: Row, sampled: list[Sampled], prompt_logprobs: list) -> RowResult:
    """The drawn token, and one more for each draft that agrees with the token drawn before it."""
    tokens, logprobs = [], []
    for j, one in enumerate(sampled):
        if one.error:
            return RowResult(row.request_id, error=one.error)
        if j and row.draft[j - 1] != tokens[-1]:
            break
        tokens.append(one.token)
        if one.logprob is not None:
            logprobs.append(one.logprob)
    return RowResult(row.request_id, tokens, logprobs, prompt_logprobs)
