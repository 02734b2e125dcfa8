"""Proves at start, on this machine and for this model's own shapes, that a row's result depends on its sequence only."""

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
    layers = model.distinct_layers()
    for check in (_chunks, _company, _far):
        if not check(model, kv, tokens, order[:blocks], order[blocks:], far, layers):
            return False, f"results of a row differ between {(check.__doc__ or '').rstrip('.')}"
    return True, ""


def _chunks(model: ProvableModel, kv: KvCache, tokens: list[int], one: list[int], two: list[int], far: int, layers: list[int]) -> bool:
    """one long chunk and several short ones."""
    whole = model.forward(Batch.of([(tokens, 0, one)], last_only=False), kv, layers)
    parts, start = [], 0
    for size in (1, 7, 33, 2, 64, 5, len(tokens)):
        fed = tokens[start : start + size]
        if fed:
            parts.append(model.forward(Batch.of([(fed, start, two)], last_only=False), kv, layers))
        start += size
    if not torch.equal(whole, torch.cat(parts)) or not _same_cells(kv, one, two, len(tokens), layers):
        return False
    head = whole[:64]
    logits = model.logits(head)
    return all(torch.equal(logits[i : i + n], model.logits(head[i : i + n])) for i, n in ((0, 1), (1, 1), (3, 2), (2, 5), (5, 13)))


def _company(model: ProvableModel, kv: KvCache, tokens: list[int], one: list[int], two: list[int], far: int, layers: list[int]) -> bool:
    """a row alone and a row beside others."""
    last = len(tokens) - 1
    own = (tokens[last:], last, one)
    alone = model.forward(Batch.of([own]), kv, layers)
    others = [(tokens[i : i + 1 + 3 * (i % 2)], 0, [kv.num_blocks - 1 - i]) for i in range(4)]
    for at in range(len(others) + 1):
        batch = Batch.of([*others[:at], own, *others[at:]])
        if not torch.equal(alone[0], model.forward(batch, kv, layers)[at]):
            return False
    return True


def _far(model: ProvableModel, kv: KvCache, tokens: list[int], one: list[int], two: list[int], far: int, layers: list[int]) -> bool:
    """rows of a chunk and single rows far into a sequence."""
    fed = tokens[:20]
    used = one[: -(-(far + len(fed)) // BLOCK)]
    for block in used:
        kv.tensor[block].normal_(generator=torch.Generator().manual_seed(block))
    whole = model.forward(Batch.of([(fed, far, used)], last_only=False), kv, layers)
    single = [model.forward(Batch.of([([token], far + i, used)]), kv, layers) for i, token in enumerate(fed)]
    return torch.equal(whole, torch.cat(single))


def _same_cells(kv: KvCache, one: list[int], two: list[int], count: int, layers: list[int]) -> bool:
    for index in range(-(-count // BLOCK)):
        cells = min(BLOCK, count - index * BLOCK)
        for layer in layers:
            a, b = kv.tensor[one[index], layer, :, :, :cells], kv.tensor[two[index], layer, :, :, :cells]
            if not torch.equal(a, b):
                return False
    return True
