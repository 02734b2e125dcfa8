"""Recompute in chunks of any size into other blocks, and company in the batch, change no byte of cells and logits."""

import functools
from dataclasses import replace

import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model import decoder
from gpu_worker.model.batch import Batch
from gpu_worker.model.decoder import TorchModel
from gpu_worker.model.delta import DeltaStep
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import load_model
from tests.device.library import require_native
from tests.make_models import write_hf
from wire.model_files import find_model

CHUNKS = (1, 7, 33, 64, 200)
pytestmark = pytest.mark.timeout(600)  # two threads that wait for one another are slow where others take the processors
F32, BF16 = (pytest.param(dtype, marks=pytest.mark.long) for dtype in ("f32", "bf16"))  # "auto" is what is served


@functools.cache
def smollm2(dtype: str, native: bool, threads: int = 2):
    return load_model(find_model("smollm2"), dtype, threads=threads, native=native)


class Solo:
    """One sequence decoded alone: its tokens, the logits behind each and its cells."""

    def __init__(self, model, prompt: list[int], count: int) -> None:
        self.model, self.prompt_len, self.tokens = model, len(prompt), list(prompt)
        total = -(-(len(prompt) + count) // 16)
        self.kv = KvCache(model.spec, 2 * total + 20, 16, model.kv_dtype, state_slots=22, draft_max=3)
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(2 * total, generator=generator).tolist()
        self.blocks, self.other, self.spare = order[:total], order[total:], list(range(2 * total, 2 * total + 20))
        logits = self.feed([(self.tokens, 0, self.blocks)])
        self.logits = [logits[0]]
        for _ in range(count):
            self.tokens.append(int(self.logits[-1].argmax()))
            self.logits.append(self.feed([(self.tokens[-1:], len(self.tokens) - 1, self.blocks)])[0])

    def feed(self, rows, last_only: bool = True, drafts: list[int] | None = None) -> torch.Tensor:
        slots = [self._slot(blocks) for _, _, blocks in rows]
        return self.model.logits(self.model.forward(Batch.of(rows, last_only, drafts, slots), self.kv))

    def _slot(self, blocks: list[int]) -> int:
        """One for the sequence, one for its recomputation, one for each other sequence."""
        return 2 + self.spare.index(blocks[0]) if blocks[0] in self.spare else int(blocks is self.other)

    def cells(self, blocks: list[int]) -> list[torch.Tensor]:
        """[cells, layers, k|v, heads, dim] of the whole sequence; the hidden rows of its blocks; its recurrent state."""
        picked = self.kv.tensor[blocks].permute(0, 4, 1, 2, 3, 5)
        found = [picked.reshape(-1, *picked.shape[2:])[: len(self.tokens)]]
        if self.kv.hidden is not None:
            found.append(self.kv.hidden[blocks[: -(-len(self.tokens) // 16)]])
        if self.kv.states:
            found.append(self.kv.states.state[self._slot(blocks)])
        return found

    def assert_same_cells(self) -> None:
        for a, b in zip(self.cells(self.other), self.cells(self.blocks)):
            assert torch.equal(a, b)


def assert_recompute_changes_nothing(solo: Solo, chunk: int) -> None:
    found = []
    for at in range(0, len(solo.tokens), chunk):
        fed = solo.tokens[at : at + chunk]
        found.append(solo.feed([(fed, at, solo.other)], last_only=False))
    logits = torch.cat(found)[solo.prompt_len - 1 :]
    solo.assert_same_cells()
    assert torch.equal(logits, torch.stack(solo.logits))


def assert_company_changes_nothing(solo: Solo, others: int) -> None:
    solo.feed([(solo.tokens[: solo.prompt_len], 0, solo.other)])
    for i in range(len(solo.tokens) - solo.prompt_len):
        at = solo.prompt_len + i
        rows = []
        for j in range(others):  # decode rows at other positions, and short chunks
            length = 1 + (i + j) % 3 * (j % 2)
            rows.append(([(7919 * i + 31 * j + n) % 256 for n in range(length)], (i * (j + 1)) % 12, [solo.spare[j]]))
        place = i % (others + 1)
        rows.insert(place, (solo.tokens[at : at + 1], at, solo.other))
        drafts = [len(fed) - 1 for fed, _, _ in rows]
        assert torch.equal(solo.feed(rows, drafts=drafts)[place], solo.logits[i + 1]), f"step {i} beside {others}"
    solo.assert_same_cells()


def prompt(length: int, vocab: int) -> list[int]:
    return torch.randint(100, vocab, (length,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("dtype", [F32, BF16, "auto"])
def test_smollm2_native(dtype):
    require_native()
    solo = Solo(smollm2(dtype, True), prompt(80, 49152), 60)
    assert solo.model.backend == "native"
    for chunk in CHUNKS:
        assert_recompute_changes_nothing(solo, chunk)
    for others in (1, 3, 8):
        assert_company_changes_nothing(solo, others)


@pytest.mark.parametrize("dtype", [BF16, "auto"])
def test_smollm2_torch(dtype):
    solo = Solo(smollm2(dtype, False, threads=1), prompt(60, 49152), 20)
    for chunk in (7, 33):
        assert_recompute_changes_nothing(solo, chunk)
    assert_company_changes_nothing(solo, 3)


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "auto"])
def test_smollm2_long(dtype, native):
    if native:
        require_native()
    solo = Solo(smollm2(dtype, native), prompt(150, 49152), 150)
    for chunk in CHUNKS:
        assert_recompute_changes_nothing(solo, chunk)
    for others in (1, 2, 3, 5, 8):
        assert_company_changes_nothing(solo, others)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen35"])
def test_tiny_models_across_splits_of_the_keys(tmp_path, arch, dtype, native):
    if native:
        require_native()
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 32}
    if arch == "qwen35":
        shape |= {"interval": 2, "value_heads": 6, "mtp": True}
    files = find_model(str(write_hf(tmp_path / "m", arch, context=2048, **shape)))
    solo = Solo(load_model(files, dtype, threads=2 if native else 1, native=native), prompt(490, files.spec.vocab), 40)
    for chunk in CHUNKS if native else (7, 33, 200):
        assert_recompute_changes_nothing(solo, chunk)
    for others in (1, 4, 8) if native else (3,):
        assert_company_changes_nothing(solo, others)


class Unpadded(TorchModel):
    """A planted bug: rows go to the linear layers as they come."""

    def _pad(self, rows, dtype=None):
        return rows


class RowCountMatters:
    """A planted bug: what many rows give differs by one bit from what one row gives."""

    exact = True

    def __init__(self, model) -> None:
        self.model, self.spec, self.kv_dtype = model, model.spec, model.kv_dtype
        self.distinct_layers, self.logits = model.distinct_layers, model.logits

    def forward(self, batch, kv, layers=None):
        hidden = self.model.forward(batch, kv, layers)
        return hidden if len(batch.token_ids) == 1 else torch.nextafter(hidden, torch.tensor(torch.inf))


def test_the_proof_sees_rows_that_are_not_padded():
    model = load_model(find_model("smollm2"), "f32", threads=1, native=False)
    assert prove(model) == (True, "")
    model.__class__ = Unpadded
    holds, note = prove(model)
    assert not holds
    assert "differ" in note and "\n" not in note


def test_the_proof_sees_a_last_bit(tmp_path):
    files = find_model(str(write_hf(tmp_path / "m", "llama")))
    holds, note = prove(RowCountMatters(load_model(files, "f32", native=False)))
    assert not holds and note


class HeadSeesCompany:
    """A planted bug: the head's rows of one sequence differ by one bit from those of several."""

    exact = True

    def __init__(self, model) -> None:
        self.model, self.spec, self.kv_dtype = model, model.spec, model.kv_dtype
        self.distinct_layers, self.logits, self.forward = model.distinct_layers, model.logits, model.forward
        self.draft_logits = model.draft_logits

    def draft(self, token_ids, *rest):
        rows = self.model.draft(token_ids, *rest)
        return rows if len(token_ids) == 1 else torch.nextafter(rows, torch.tensor(torch.inf))


@pytest.fixture
def hybrid(tmp_path):
    return load_model(find_model(str(write_hf(tmp_path / "m", "qwen35", interval=2, mtp=True))), "f32", threads=1, native=False)


def test_the_proof_sees_a_head_that_company_changes(hybrid):
    holds, note = prove(HeadSeesCompany(hybrid))
    assert not holds and "drafting head" in note


def test_the_proof_sees_a_state_that_took_in_drafts(hybrid, monkeypatch):
    of, finish = DeltaStep.of, DeltaStep.finish

    def known(step, by):
        return replace(step, spans=[replace(span, known=span.known + by) for span in step.spans])

    assert prove(hybrid) == (True, "")
    monkeypatch.setattr(decoder.DeltaStep, "of", staticmethod(lambda *given: known(of(*given), 8)))
    monkeypatch.setattr(decoder.DeltaStep, "finish", lambda step: finish(known(step, -8)))
    holds, note = prove(hybrid)
    assert not holds and "rejected drafts" in note


def test_the_proof_of_an_inexact_model_says_that_it_is_turned_off(tmp_path):
    files = find_model(str(write_hf(tmp_path / "m", "llama")))
    assert prove(load_model(files, "f32", exact=False, native=False)) == (False, "exactness is turned off")
