"""The runner with real models and a head that is right as often as the test wants: every draft, every part of it accepted.

The drafts fall around block borders and folds, the sequence is alone and in company, and between steps it is moved to other
blocks and another state slot. Text, cells and hidden rows must be those of a run without drafts.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.load import load_model
from gpu_worker.policy.events import Plan, Row
from gpu_worker.runner import Runner
from tests.make_models import write_hf
from wire.messages import Sampling
from wire.model_files import find_model

BLOCK, MOST, TOKENS = 16, 8, 90
SURE = 1e6  # a logit that no noise outweighs
PROMPTS = [list(range(5, 42)), list(range(60, 75))]  # the one across folds and blocks, the other within the first
SAMPLING = [Sampling(temperature=0, seed=0), Sampling(temperature=1.0, seed=11)]


class Foretold:
    """A model whose head is told what comes, and says it or something else. Its passes are made all the same."""

    draft_greedy = None  # one by one, so that each can be told

    def __init__(self, model) -> None:
        self._model = model
        self.truth: dict[int, list[int]] = {}  # the first block of a sequence -> its tokens
        self.right = lambda: True
        self._wanted: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def draft(self, token_ids, positions, hidden, tables, kv):
        self._wanted = []
        for first, position in zip(tables[:, 0].tolist(), positions.tolist(), strict=True):
            token = self.truth[first][position + 1]
            self._wanted.append(token if self.right() else (token + 1) % self.spec.vocab)
        return self._model.draft(token_ids, positions, hidden, tables, kv)

    def draft_logits(self, rows):
        logits = self._model.draft_logits(rows)  # [n, all tokens]: these models have no vocabulary of drafts
        logits[torch.arange(len(rows)), torch.tensor(self._wanted)] = SURE
        return logits


@dataclass
class Run:
    """One sequence, driven by hand. `blocks` are its own."""

    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    blocks: list[int]
    state_slot: int
    computed: int = 0
    accepted: set[tuple[int, int]] = field(default_factory=set)  # (drafted, accepted) that have been seen

    def row(self, chunk: int, draft: int) -> Row:
        count = min(chunk, len(self.tokens) - self.computed)
        samples = self.computed + count == len(self.tokens)
        draft = draft if samples and count == 1 and self.computed else 0
        tokens, slot = self.tokens, self.state_slot
        return Row("r", tokens, self.computed, count, self.blocks, samples, self.sampling, self.prompt_len, draft, slot)

    def take(self, row: Row, result) -> None:
        assert not result.error
        self.computed += row.count + max(0, len(result.tokens) - 1)
        self.tokens += result.tokens
        if row.draft:
            self.accepted.add((row.draft, len(result.tokens) - 1))

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.prompt_len + TOKENS


def region(index: int) -> range:
    """The blocks that sequence `index` may have; its state slots are `index` and `index + 2`."""
    return range(index * 16, index * 16 + 16)


def start(index: int) -> Run:
    """A sequence in some of its blocks."""
    blocks = random.Random(index).sample(region(index), 10)
    return Run(list(PROMPTS[index]), len(PROMPTS[index]), SAMPLING[index], blocks, index)


def move(kv: KvCache, run: Run, step: int) -> None:
    """As a park and a resume leave it: the bytes elsewhere, the old places full of something else."""
    index = run.state_slot % 2
    image = [kv.block(block).copy() for block in run.blocks]
    for block in region(index):
        kv.block(block)[:] = step % 251
    run.blocks = random.Random(step).sample(region(index), len(run.blocks))
    for block, data in zip(run.blocks, image, strict=True):
        kv.block(block)[:] = data
    if kv.states:
        state = kv.state(run.state_slot).copy()
        kv.state(run.state_slot)[:] = step % 251
        run.state_slot = index if run.state_slot != index else index + 2
        kv.state(run.state_slot)[:] = state


def cache(model) -> KvCache:
    return KvCache(model.spec, 32, BLOCK, model.kv_dtype, state_slots=4, draft_max=MOST)


@dataclass
class Truth:
    """One sequence with no drafts and nobody beside it."""

    tokens: list[int]
    cells: torch.Tensor  # [position, layer, k|v, kv_head, head_dim]
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # newest position -> what its block kept


def cells(kv: KvCache, run: Run) -> torch.Tensor:
    """The computed cells in the order of positions, the head's layer included; not the head's slot 0, which nobody reads."""
    found = kv.tensor[run.blocks].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[: run.computed].clone()
    found[0, -1] = 0
    return found


def kept(kv: KvCache, run: Run) -> torch.Tensor:
    return kv.hidden[run.blocks[(run.computed - 1) // BLOCK]].clone()


def alone(model, index: int) -> Truth:
    kv = cache(model)
    runner, run, truth = Runner(model, kv), start(index), Truth([], torch.empty(0))
    while len(run.tokens) <= run.prompt_len + TOKENS + MOST:
        row = run.row(256, 0)
        run.take(row, runner.step(Plan([], [row], 0)).rows[0])
        truth.hidden[run.computed - 1] = kept(kv, run)
    return Truth(run.tokens, cells(kv, run), truth.hidden)


def model_at(path, arch: str):
    sizes = {"layers": 4} if arch == "qwen35" else {"layers": 2}
    return find_model(str(write_hf(path, arch, mtp=True, tied=False, **sizes)))


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_every_length_of_draft_and_of_its_accepted_part_leaves_everything_as_it_is(tmp_path, arch, native):
    model = Foretold(load_model(model_at(tmp_path / "model", arch), "f32", threads=1, native=native))
    truths = [alone(model, index) for index in range(2)]
    chance = random.Random(3)
    seen: set[tuple[int, int]] = set()
    for round_ in range(6):
        share = chance.choice([0.5, 0.8, 0.9])
        model.right = lambda share=share: chance.random() < share
        kv = cache(model)
        runner = Runner(model, kv)
        runs = [start(index) for index in range(2 if round_ % 2 else 1)]
        step = 0
        while waiting := [index for index, run in enumerate(runs) if not run.done]:
            step += 1
            if step % 5 == 0:
                for index in waiting:
                    move(kv, runs[index], step)
            model.truth = {run.blocks[0]: truths[i].tokens for i, run in enumerate(runs)}
            rows = [runs[index].row(chance.choice([1, 7, 40]), chance.randint(0, MOST)) for index in waiting]
            for index, row, result in zip(waiting, rows, runner.step(Plan([], rows, step)).rows, strict=True):
                run, truth = runs[index], truths[index]
                run.take(row, result)
                assert run.tokens == truth.tokens[: len(run.tokens)]
                if run.computed >= run.prompt_len:
                    assert torch.equal(kept(kv, run), truth.hidden[run.computed - 1])
        for run, truth in zip(runs, truths):
            assert torch.equal(cells(kv, run), truth.cells[: run.computed])
            seen |= run.accepted
    missing = {(drafted, n) for drafted in range(1, MOST + 1) for n in range(drafted + 1)} - seen
    assert len(missing) <= 6, f"(drafted, accepted) that never came up: {sorted(missing)}"
