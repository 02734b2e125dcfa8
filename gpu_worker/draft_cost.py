"""What a guess costs on this machine: measured once at the start, because the policy may not look at a clock later."""

import time
from collections.abc import Callable

import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model

COUNTS = (1, 2, 4, 8)  # decodes in a step
ROUNDS = 5
BUDGET_S = 2.0  # large models: the costs of many decodes are then those of fewer
TOO_MUCH = 80  # percent: more than a head can be expected to give back
_BLOCK = 16
_START = 4  # tokens before the row that is measured


@torch.inference_mode()
def measure(model: Model, most: int) -> tuple[int, ...]:
    """Percent of a step of d decodes that one guess for each of them costs, for d from 1 to `most` or less; rounded up to 5.

    The model must have a head. A guess is a pass of the head and one more row in the trunk's.
    """
    counts = [count for count in COUNTS if count <= most]
    kv = KvCache(model.spec, counts[-1], _BLOCK, model.kv_dtype, counts[-1], 1)
    deadline = time.monotonic() + BUDGET_S
    costs: list[int] = []
    for count in counts:
        costs += [_cost(model, kv, count)] * (count - len(costs))
        if time.monotonic() > deadline:
            break
    return tuple(costs)


def _cost(model: Model, kv: KvCache, count: int) -> int:
    prompt, plain, guessed = (
        Batch.of([(list(range(first, first + rows)), first, [block]) for block in range(count)], last_only=False)
        for first, rows in ((0, _START), (_START, 1), (_START, 2))
    )
    model.forward(prompt, kv)
    tokens = torch.full((count,), _START, dtype=torch.int64)
    positions = torch.full((count,), _START, dtype=torch.int32)
    hidden = kv.hidden[:count].clone()

    def step(batch: Batch) -> Callable[[], object]:
        return lambda: model.logits(model.forward(batch, kv))

    def guess() -> object:
        return model.draft_logits(model.draft(tokens, positions, hidden, plain.block_tables, kv))

    without, verified, head = _least((step(plain), step(guessed), guess))
    percent = 100 * (verified - without + head) / without
    return max(5, -int(-percent // 5) * 5)


def _least(works: tuple[Callable[[], object], ...]) -> list[float]:
    """Seconds of the fastest run of each; in turns, so that a busy moment hits all of them."""
    least = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for i, work in enumerate(works):
            began = time.perf_counter()
            work()
            least[i] = min(least[i], time.perf_counter() - began)
    return least
