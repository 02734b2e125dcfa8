"""Proves at start, on this machine and for this model's own shapes, that a row's result depends on its sequence only."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from wire.model_spec import ModelSpec

BLOCK = 16
ROWS = 256  # of the long chunk
FAR = 640  # cells before the rows that are far into a sequence


class ProvableModel(Protocol):
    """What the proof needs of a model."""

    spec: ModelSpec
    kv_dtype: torch.dtype
    exact: bool

    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def distinct_layers(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Trial:
    """What every check works on: some tokens, two sets of scattered blocks, the layers to run."""

    model: ProvableModel
    kv: KvCache
    tokens: list[int]
    one: list[int]
    two: list[int]
    far: int
    layers: list[int]

    def run(self, *rows: tuple[list[int], int, list[int]], last_only: bool = True) -> Tensor:
        return self.model.forward(Batch.of(list(rows), last_only), self.kv, self.layers)


def prove(model: ProvableModel) -> tuple[bool, str]:
    """(True, "") if every comparison of bytes held, else (False, what differed, in one line).

    Runs one layer of each kind that the model has, so it takes a few passes over a few layers.
    """
    if not model.exact:
        return False, "exactness is turned off"
    rows = min(ROWS, model.spec.max_context)
    far = min(FAR, model.spec.max_context - rows)
    blocks = -(-(far + rows) // BLOCK)
    kv = KvCache(model.spec, 2 * blocks + 4, BLOCK, model.kv_dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.spec.vocab, (rows,), generator=generator).tolist()
    order = torch.randperm(2 * blocks, generator=generator).tolist()
    trial = _Trial(model, kv, tokens, order[:blocks], order[blocks:], far, model.distinct_layers())
    for same, what in (
        (_chunks, "one long chunk and several short ones"),
        (_logits, "many rows and few rows in the head"),
        (_company, "a row alone and a row beside others"),
        (_far, "rows of a chunk and single rows far into a sequence"),
    ):
        if not same(trial):
            return False, f"results of a row differ between {what}"
    return True, ""


def _chunks(t: _Trial) -> bool:
    whole = t.run((t.tokens, 0, t.one), last_only=False)
    parts, start = [], 0
    for size in (1, 7, 33, 2, 64, 5, len(t.tokens)):
        if fed := t.tokens[start : start + size]:
            parts.append(t.run((fed, start, t.two), last_only=False))
        start += size
    return torch.equal(whole, torch.cat(parts)) and _same_cells(t)


def _logits(t: _Trial) -> bool:
    hidden = t.run((t.tokens[:64], 0, t.one), last_only=False)
    logits = t.model.logits(hidden)
    few = ((0, 1), (1, 1), (3, 2), (2, 5), (5, 13))
    return all(torch.equal(logits[i : i + n], t.model.logits(hidden[i : i + n])) for i, n in few)


def _company(t: _Trial) -> bool:
    last = len(t.tokens) - 1
    own = (t.tokens[last:], last, t.one)
    alone = t.run(own)
    others = [(t.tokens[i : i + 1 + 3 * (i % 2)], 0, [t.kv.num_blocks - 1 - i]) for i in range(4)]
    return all(torch.equal(alone[0], t.run(*others[:at], own, *others[at:])[at]) for at in range(len(others) + 1))


def _far(t: _Trial) -> bool:
    fed = t.tokens[:20]
    used = t.one[: -(-(t.far + len(fed)) // BLOCK)]
    for block in used:
        t.kv.tensor[block].normal_(generator=torch.Generator().manual_seed(block))
    whole = t.run((fed, t.far, used), last_only=False)
    single = [t.run(([token], t.far + i, used)) for i, token in enumerate(fed)]
    return torch.equal(whole, torch.cat(single))


def _same_cells(t: _Trial) -> bool:
    for index in range(-(-len(t.tokens) // BLOCK)):
        cells = min(BLOCK, len(t.tokens) - index * BLOCK)
        for layer in t.layers:
            a, b = (t.kv.tensor[blocks[index], layer, :, :, :cells] for blocks in (t.one, t.two))
            if not torch.equal(a, b):
                return False
    return True
