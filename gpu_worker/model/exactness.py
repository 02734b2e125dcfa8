"""Proves at start, on this machine and for this model's own shapes, that a row's result depends on its sequence only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.memory import HostMemory, Memory
from gpu_worker.device.state_cache import FOLD
from gpu_worker.model.batch import Batch
from wire.model_spec import ModelSpec

BLOCK = 16
ROWS = 256  # of the long chunk
FAR = 640  # cells before the rows that are far into a sequence
DRAFTS = 8  # at most, in a row of the trial
OTHERS = 4  # sequences beside the one that is looked at


class ProvableModel(Protocol):
    """What the proof needs of a model."""

    spec: ModelSpec
    kv_dtype: torch.dtype
    exact: bool

    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def distinct_layers(self) -> list[int]: ...
    def draft(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, tables: Tensor, kv: KvCache) -> Tensor: ...
    def draft_logits(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence lies: its blocks and its state slot."""

    blocks: list[int]
    slot: int


@dataclass(frozen=True, slots=True)
class _Trial:
    """What every check works on: some tokens, two sets of scattered blocks, the layers to run."""

    model: ProvableModel
    kv: KvCache
    memory: Memory
    tokens: list[int]
    one: _Place
    two: _Place
    others: list[_Place]
    far: int
    layers: list[int]

    def run(self, *rows: tuple[list[int], int, _Place], last_only: bool = True, drafts: int = 0) -> Tensor:
        """`drafts`: how many of the last rows of each sequence are drafts."""
        fed = [(tokens, start, place.blocks) for tokens, start, place in rows]
        slots = [place.slot for _, _, place in rows]
        return self.model.forward(Batch.of(fed, last_only, [drafts] * len(rows), slots), self.kv, self.layers)

    def hidden(self, block: int) -> Tensor:
        """The hidden row that a block keeps."""
        assert self.kv.hidden is not None
        return self.memory.download(self.kv.hidden[block])

    def fill(self, target: Tensor, generator: torch.Generator) -> None:
        """With normal numbers, the same on every device."""
        self.memory.put(target, torch.empty(target.shape, dtype=target.dtype).normal_(generator=generator))

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Whether two parts of the pool hold the same."""
        return torch.equal(self.memory.download(a), self.memory.download(b))

    def draft(self, *rows: tuple[int, int, _Place]) -> Tensor:
        """Two chained passes of the head, [n, 2, hidden], for n sequences: a token, its position, a place."""
        width = max(len(place.blocks) for _, _, place in rows)
        tables = torch.tensor([(place.blocks * width)[:width] for _, _, place in rows], dtype=torch.int32)
        ids, at = torch.tensor([token for token, _, _ in rows]), torch.tensor([at for _, at, _ in rows], dtype=torch.int32)
        before = torch.stack([self.hidden(place.blocks[(at - 1) // BLOCK]) for _, at, place in rows])
        first = self.model.draft(ids, at, before, tables, self.kv)
        second = self.model.draft(ids, at + 1, first, tables, self.kv)
        return torch.stack([first, second], 1)


def prove(model: ProvableModel, memory: Memory | None = None) -> tuple[bool, str]:
    """(True, "") if every comparison of bytes held, else (False, what differed, in one line). `memory`: of the model's device,
    for a pool of the trial's own; None: the host's.

    Runs one layer of each kind that the model has, and its head, so it takes a few passes over a few layers.
    """
    if not model.exact:
        return False, "exactness is turned off"
    trial = _trial(model, memory or HostMemory())
    checks = [
        (_chunks, "one long chunk and several short ones"),
        (_logits, "many rows and few rows in the head"),
        (_company, "a row alone and a row beside others"),
        (_far, "rows of a chunk and single rows far into a sequence"),
    ]
    if model.spec.delta or model.spec.mtp:
        checks.append((_rejected, "rows behind rejected drafts and rows without drafts"))
    if model.spec.mtp:
        checks.append((_drafts, "the drafting head alone and beside others"))
    for same, what in checks:
        if not same(trial):
            return False, f"results of a row differ between {what}"
    return True, ""


def _trial(model: ProvableModel, memory: Memory) -> _Trial:
    rows = min(ROWS, model.spec.max_context)
    far = min(FAR, model.spec.max_context - rows)
    blocks = -(-(far + rows) // BLOCK)
    slots = 2 + OTHERS
    kv = KvCache(model.spec, 2 * blocks + OTHERS, BLOCK, model.kv_dtype, slots, draft_max=DRAFTS, allocate=memory.zeros)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.spec.vocab, (rows,), generator=generator).tolist()
    order = torch.randperm(2 * blocks, generator=generator).tolist()
    one, two = _Place(order[:blocks], 0), _Place(order[blocks:], 1)
    others = [_Place([2 * blocks + i], 2 + i) for i in range(OTHERS)]
    return _Trial(model, kv, memory, tokens, one, two, others, far, model.distinct_layers())


def _chunks(t: _Trial) -> bool:
    whole = t.run((t.tokens, 0, t.one), last_only=False)
    parts = [t.run((fed, start, t.two), last_only=False) for fed, start in _split(t.tokens, 1, 7, 33, 2, 64, 5, len(t.tokens))]
    return torch.equal(whole, torch.cat(parts)) and _same_cells(t)


def _logits(t: _Trial) -> bool:
    hidden = t.run((t.tokens[:64], 0, t.one), last_only=False)
    few = ((0, 1), (1, 1), (3, 2), (2, 5), (5, 13))
    heads = [t.model.logits, t.model.draft_logits] if t.model.spec.mtp else [t.model.logits]
    for head in heads:
        logits = head(hidden.float())
        if not all(torch.equal(logits[i : i + n], head(hidden[i : i + n].float())) for i, n in few):
            return False
    return True


def _company(t: _Trial) -> bool:
    last = len(t.tokens) - 1
    t.run((t.tokens[:last], 0, t.one))
    own = (t.tokens[last:], last, t.one)
    alone = t.run(own)
    others = [(t.tokens[i : i + 1 + 3 * (i % 2)], 0, place) for i, place in enumerate(t.others)]
    return all(torch.equal(alone[0], t.run(*others[:at], own, *others[at:])[at]) for at in range(len(others) + 1))


def _far(t: _Trial) -> bool:
    fed = t.tokens[:20]
    used = t.one.blocks[: -(-(t.far + len(fed)) // BLOCK)]
    for block in used:
        generator = torch.Generator().manual_seed(block)
        t.fill(t.kv.tensor[block], generator)
        if t.kv.hidden is not None:
            t.fill(t.kv.hidden[block], generator)
    one, two = _Place(used, t.one.slot), _Place(used, t.two.slot)
    for place in (one, two):
        _fill_state(t, place.slot)
    whole = t.run((fed, t.far, one), last_only=False)
    single = [t.run(([token], t.far + i, two)) for i, token in enumerate(fed)]
    return torch.equal(whole, torch.cat(single))


def _rejected(t: _Trial) -> bool:
    """Rows with drafts, of which some and then all others are rejected, before and behind a fold of the state."""
    plain = t.run((t.tokens[:64], 0, t.one), last_only=False)
    at = 11
    t.run((t.tokens[:at], 0, t.two))
    for drafts, right in ((8, 0), (8, 2), (3, 0), (1, 1), (8, 7), (5, 1), (2, 2), (8, 0)):
        drafted = t.tokens[at + 1 : at + 1 + right]
        wrong = [(token + 1) % t.model.spec.vocab for token in t.tokens[at + 1 + right : at + 1 + drafts]]
        rows = t.run(([t.tokens[at], *drafted, *wrong], at, t.two), last_only=False, drafts=drafts)
        if not torch.equal(rows[: right + 1], plain[at : at + 1 + right]):
            return False
        at += 1 + right
        if t.kv.hidden is not None:
            t.memory.put(t.kv.hidden[t.two.blocks[(at - 1) // BLOCK]], rows[right].float())
    return torch.equal(t.run((t.tokens[at:64], at, t.two), last_only=False), plain[at:])


def _drafts(t: _Trial) -> bool:
    last = len(t.tokens) - 2
    t.run((t.tokens[:last], 0, t.one))
    t.run(*((t.tokens[i : i + 3], 0, place) for i, place in enumerate(t.others)))
    own = (t.tokens[last], last, t.one)
    alone = t.draft(own)
    others = [(t.tokens[i], 3, place) for i, place in enumerate(t.others)]
    return all(torch.equal(alone[0], t.draft(*others[:at], own, *others[at:])[at]) for at in range(len(others) + 1))


def _same_cells(t: _Trial) -> bool:
    """Whether the two places hold the same: cells of the layers that were run and of the head, hidden rows, states."""
    spec, kv = t.model.spec, t.kv
    layers = [spec.attention_layers.index(i) for i in t.layers if i in spec.attention_layers]
    layers += [kv.layers - 1] if spec.mtp else []
    for index in range(-(-len(t.tokens) // BLOCK)):
        cells = min(BLOCK, len(t.tokens) - index * BLOCK)
        a, b = t.one.blocks[index], t.two.blocks[index]
        if not all(t.same(*(kv.tensor[block, layer, :, :, :cells] for block in (a, b))) for layer in layers):
            return False
        if kv.hidden is not None and not t.same(kv.hidden[a], kv.hidden[b]):
            return False
    states = [spec.delta.layers.index(i) for i in t.layers if i in spec.delta.layers] if spec.delta else []
    return all(kv.states is not None and t.same(*(kv.states.state[p.slot, i] for p in (t.one, t.two))) for i in states)


def _fill_state(t: _Trial, slot: int) -> None:
    """A state that a sequence could have at `far`, the same in every slot."""
    states = t.kv.states
    if states is None:
        return
    generator = torch.Generator().manual_seed(2)
    log_k = torch.empty(states.log_k.shape[1:]).normal_(generator=generator)
    t.memory.put(states.log_k[slot], log_k / log_k.norm(dim=-1, keepdim=True))
    t.memory.put(states.log_g[slot], -torch.empty(states.log_g.shape[1:]).normal_(generator=generator).abs())
    for part in (states.state, states.log_d, states.conv):
        t.fill(part[slot], generator)
    t.memory.put(states.folded[slot], torch.tensor([t.far // FOLD * FOLD], dtype=torch.int32))


def _split(tokens: list[int], *sizes: int) -> Iterator[tuple[list[int], int]]:
    start = 0
    for size in sizes:
        if fed := tokens[start : start + size]:
            yield fed, start
        start += size
