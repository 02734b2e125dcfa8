"""What the tests of models share: logits of a text, greedy text with and without drafts, transformers on the same folder."""

from pathlib import Path

import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.memory import HostMemory, Memory
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model

DRAFT_MAX = 8


HOST = HostMemory()


def cache(model: Model, cells: int, memory: Memory = HOST) -> KvCache:
    """A pool for as many cells, full of what no test may read."""
    kv = KvCache(model.spec, -(-cells // 16), 16, model.kv_dtype, state_slots=2, draft_max=DRAFT_MAX, allocate=memory.zeros)
    memory.put(kv.rows, torch.full(kv.rows.shape, torch.nan, dtype=kv.dtype))
    if kv.states:
        memory.put(kv.states.flat, torch.full(kv.states.flat.shape, torch.nan))
    return kv


def logits_of(model: Model, tokens: list[int], chunk: int = 100, memory: Memory = HOST) -> torch.Tensor:
    """Of every position, fed in chunks."""
    kv = cache(model, len(tokens), memory)
    blocks = list(range(kv.num_blocks))[::-1]
    parts = [Batch.of([(tokens[at : at + chunk], at, blocks)], last_only=False) for at in range(0, len(tokens), chunk)]
    return torch.cat([model.logits(model.forward(part, kv)) for part in parts])


def theirs(path: Path):
    """transformers' model of a folder."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    """`tokens` and `count` more."""
    kv = cache(model, len(tokens) + count)
    blocks = list(range(kv.num_blocks))
    tokens, fed = list(tokens), 0
    for _ in range(count):
        logits = model.logits(model.forward(Batch.of([(tokens[fed:], fed, blocks)]), kv))
        fed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens


def chain(
    model: Model, kv: KvCache, blocks: list[int], token: int, position: int, count: int, memory: Memory = HOST
) -> list[int]:
    """The head's greedy drafts of the `count` tokens behind `token`, which is the newest and not computed."""
    assert kv.hidden is not None
    table, hidden = torch.tensor([blocks], dtype=torch.int32), memory.download(kv.hidden[blocks[(position - 1) // 16]])[None]
    drafts = []
    for at in range(position, position + count):
        hidden = model.draft(torch.tensor([token]), torch.tensor([at], dtype=torch.int32), hidden, table, kv)
        best = int(model.draft_logits(hidden)[0].argmax())
        token = best if model.draft_ids is None else int(model.draft_ids[best])
        drafts.append(token)
    return drafts


def verify(model: Model, kv: KvCache, blocks: list[int], fed: list[int], position: int) -> torch.Tensor:
    """Rows [len(fed), hidden] of the newest token and the drafts behind it."""
    return model.forward(Batch.of([(fed, position, blocks)], last_only=False, drafts=[len(fed) - 1]), kv)


def accept(kv: KvCache, blocks: list[int], rows: torch.Tensor, position: int, right: int) -> None:
    """Keeps `right` of the drafts that were verified from `position` on."""
    if kv.hidden is not None:
        kv.hidden[blocks[(position + right) // 16]] = rows[right].float()


def drafted_greedy(model: Model, tokens: list[int], count: int, drafts: int) -> tuple[list[int], int]:
    """As `greedy`, with drafts; and how many of them were right."""
    kv = cache(model, len(tokens) + count + drafts)
    blocks = list(range(kv.num_blocks))[::-1]
    tokens, end, total = list(tokens), len(tokens) + count, 0
    model.forward(Batch.of([(tokens[:-1], 0, blocks)]), kv)
    while len(tokens) < end:
        at = len(tokens) - 1
        drafted = chain(model, kv, blocks, tokens[-1], at, drafts)
        rows = verify(model, kv, blocks, [tokens[-1], *drafted], at)
        best = model.logits(rows).argmax(-1).tolist()
        right = next((i for i, (draft, token) in enumerate(zip(drafted, best)) if draft != token), drafts)
        accept(kv, blocks, rows, at, right)
        tokens += best[: right + 1]
        total += right
    return tokens[:end], total
