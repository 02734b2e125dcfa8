"""The head that drafts against transformers' MtpModel, and what is left behind of drafts that are rejected: nothing."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model import decoder
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta import DeltaStep
from gpu_worker.model.load import Model, load_model
from tests.device.library import require_native
from tests.make_models import VOCAB, write_hf
from tests.model.runs import DRAFT_MAX, accept, cache, drafted_greedy, greedy, theirs, verify
from wire.model_files import find_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
HYBRID = {"layers": 3, "interval": 3, "mtp": True}
HEADS = [
    pytest.param("qwen35", {"layers": 4, "mtp": True}, id="hybrid"),
    pytest.param("qwen35", {"layers": 2, "interval": 2, "heads": 6, "head_dim": 32, "tied": False, "mtp": True}, id="untied"),
    pytest.param("qwen3", {"heads": 4, "kv_heads": 4, "head_dim": 48, "mtp": True}, id="qwen3"),
    pytest.param("llama", {"heads": 4, "kv_heads": 1, "tied": False, "mtp": True}, id="llama"),
]


def some(count: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def with_head(path):
    """transformers' model of a folder, told that it has a head."""
    reference = theirs(path)
    reference.config.num_mtp_layers = 1
    reference.config.mtp_layer_types = ["full_attention"]
    reference._keys_to_ignore_on_load_unexpected = [r"^mtp.*"]
    return reference


@BACKENDS
@pytest.mark.parametrize(("arch", "options"), HEADS)
def test_the_head_equals_transformers(tmp_path, arch, options, native):
    """At every position of a text, and chained three deep; the text is fed in chunks."""
    if native:
        require_native()
    path = write_hf(tmp_path / "m", arch, **options)
    model = load_model(find_model(str(path)), "f32", threads=1, native=native)
    assert model.spec.mtp
    tokens, drafts = some(51), some(2, seed=2)
    reference = with_head(path)
    head = transformers.modeling_layers.MtpModel.from_pretrained(reference)
    keys = transformers.cache_utils.MtpCache(config=reference.config.get_mtp_config())
    with torch.inference_mode():
        hidden = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][:, :-1]
        at = torch.arange(1, len(tokens))[None]
        expected = [head.forward_layer(0, hidden, at, keys, input_ids=torch.tensor([tokens[1:]]))[0]]
        for i, draft in enumerate(drafts):
            before, at = expected[-1][None, -1:], torch.tensor([[len(tokens) + i]])
            expected.append(head.forward_layer(0, before, at, keys, input_ids=torch.tensor([[draft]]))[0])
        logits = reference.lm_head(torch.cat(expected))

    kv = cache(model, len(tokens) + 2)
    blocks = list(range(kv.num_blocks))[::-1]
    table, rows = torch.tensor([blocks], dtype=torch.int32), []
    for start, end in ((0, 1), (1, 17), (17, 30), (30, 32), (32, 51)):
        if start:  # from the hidden row that the chunk before has left
            before = kv.hidden[blocks[(start - 1) // 16]][None]
            at = torch.tensor([start], dtype=torch.int32)
            rows.append((start - 1, model.draft(torch.tensor(tokens[start : start + 1]), at, before, table, kv)))
        model.forward(Batch.of([(tokens[start:end], start, blocks)]), kv)
    for row, found in rows:
        assert (found - expected[0][row]).abs().max() < 1e-3
    every = torch.arange(1, len(tokens), dtype=torch.int32)  # all positions in one pass, each with the text before it
    first = model.draft(torch.tensor(tokens[1:]), every, hidden[0], table.expand(len(every), -1).contiguous(), kv)
    chained = [first, *(_chained(model, kv, table, first, tokens, drafts))]
    assert (torch.cat(chained) - torch.cat(expected)).abs().max() < 1e-3
    ours = model.draft_logits(torch.cat(chained))
    assert (ours - logits).abs().max() < 1e-3 and torch.equal(ours.argmax(-1), logits.argmax(-1))


def _chained(model: Model, kv: KvCache, table: torch.Tensor, first: torch.Tensor, tokens, drafts):
    before = first[-1:]
    for i, draft in enumerate(drafts):
        at = torch.tensor([len(tokens) + i], dtype=torch.int32)
        before = model.draft(torch.tensor([draft]), at, before, table, kv)
        yield before


@BACKENDS
def test_greedy_text_equals_transformers_with_its_head(tmp_path, native):
    if native:
        require_native()
    path = write_hf(tmp_path / "m", "qwen3", mtp=True)
    model = load_model(find_model(str(path)), "f32", threads=1, native=native)
    reference = with_head(path)
    prompt = some(20)
    text = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, use_mtp=True, eos_token_id=-1)
    assert drafted_greedy(model, prompt, 64, 2)[0] == text[0].tolist() == greedy(model, prompt, 64)


@BACKENDS
def test_only_some_tokens_are_drafted(tmp_path, native):
    if native:
        require_native()
    ids = [5, 3, 90, 200]
    few, all_ = (
        load_model(find_model(str(write_hf(tmp_path / name, "qwen3", mtp=True, **more))), "f32", threads=1, native=native)
        for name, more in (("few", {"draft_ids": ids}), ("all", {}))
    )
    assert few.draft_ids.tolist() == ids and all_.draft_ids is None
    rows = torch.randn(5, few.spec.hidden, generator=torch.Generator().manual_seed(1))
    assert (few.draft_logits(rows) - all_.draft_logits(rows)[:, ids]).abs().max() < 1e-4
    assert drafted_greedy(few, some(20), 30, 3)[0] == greedy(few, some(20), 30)


@BACKENDS
def test_without_the_head(tmp_path, native):
    if native:
        require_native()
    files = find_model(str(write_hf(tmp_path / "m", "qwen35", **HYBRID)))
    models = [load_model(files, "f32", threads=1, native=native, mtp=mtp) for mtp in (True, False)]
    assert models[1].spec.mtp is None and models[1].weight_bytes < models[0].weight_bytes
    caches = [cache(model, 40) for model in models]
    assert caches[1].hidden is None and caches[1].layers == caches[0].layers - 1
    batch = Batch.of([(some(40), 0, [2, 0, 1])], last_only=False)
    assert torch.equal(*(model.logits(model.forward(batch, kv)) for model, kv in zip(models, caches)))


class Rejections:
    """One sequence whose drafts are right for a while and then wrong: every number of them up to `most`, every part of it
    accepted, behind every position modulo 16. Each step's rows are compared with those of the same tokens fed without drafts."""

    def __init__(self, model: Model, most: int = DRAFT_MAX) -> None:
        self.model = model
        wanted = {(start, n, right) for start in range(16) for n in range(most + 1) for right in range(n + 1)}
        self.steps, at = [], 1
        while wanted:  # each step goes on where the one before has ended
            start, n, right = max((step for step in wanted if step[0] == at % 16), default=(at % 16, 0, 0))
            wanted.discard((start, n, right))
            self.steps.append((at, n, right))
            at += 1 + right
        self.tokens = some(at + DRAFT_MAX)
        self.kv, self.plain = cache(model, at + DRAFT_MAX), cache(model, at + DRAFT_MAX)
        self.blocks = list(range(self.kv.num_blocks))[::-1]

    def differs(self) -> str:
        """What first was not as it would have been without drafts; empty if nothing."""
        tokens, model = self.tokens, self.model
        whole = [(tokens[i : i + 100], i, self.blocks) for i in range(0, len(tokens), 100)]
        rows = torch.cat([model.forward(Batch.of([part], last_only=False), self.plain) for part in whole])
        model.forward(Batch.of([(tokens[:1], 0, self.blocks)]), self.kv)
        for at, n, right in self.steps:
            wrong = [(token + 1) % VOCAB for token in tokens[at + 1 + right : at + 1 + n]]
            found = verify(model, self.kv, self.blocks, [*tokens[at : at + 1 + right], *wrong], at)
            if not torch.equal(found[: right + 1], rows[at : at + right + 1]):
                return f"rows at {at} with {n} drafts of which {right} were right"
            accept(self.kv, self.blocks, found, at, right)
        last = self.steps[-1]
        end = last[0] + 1 + last[2]
        rest = model.forward(Batch.of([(tokens[end:], end, self.blocks)], last_only=False), self.kv)
        return self._left() if torch.equal(rest, rows[end:]) else "rows behind the last draft"

    def _left(self) -> str:
        """Of cells, hidden rows and states."""
        a, b, last = self.kv, self.plain, len(self.tokens) - 1
        for index, block in enumerate(self.blocks):
            cells = min(16, last + 1 - 16 * index)
            if not torch.equal(a.tensor[block, ..., :cells, :], b.tensor[block, ..., :cells, :]):
                return f"cells of block {index}"
            if a.hidden is not None and not torch.equal(a.hidden[block], b.hidden[block]):
                return f"the hidden row of block {index}"
        if a.states is None:
            return ""
        x, y = a.states, b.states
        log = torch.arange(last // 16 * 16, last + 1) % x.log_k.shape[2]
        conv = torch.arange(last - self.model.spec.delta.kernel + 2, last + 1) % x.conv.shape[2]
        same = [torch.equal(x.state[0], y.state[0]), torch.equal(x.conv[0][:, conv], y.conv[0][:, conv])]
        same += [torch.equal(getattr(x, part)[0][:, log], getattr(y, part)[0][:, log]) for part in ("log_k", "log_d", "log_g")]
        return "" if all(same) and int(x.folded[0]) == int(y.folded[0]) == last // 16 * 16 else "the state"


def hybrid(tmp_path, native: bool, dtype: str = "f32") -> Model:
    files = find_model(str(write_hf(tmp_path / "m", "qwen35", context=4096, **HYBRID)))
    return load_model(files, dtype, threads=1, native=native)


@pytest.mark.parametrize(
    ("dtype", "native"),
    [
        pytest.param("f32", True, id="native-f32"),
        pytest.param("bf16", False, id="torch-bf16"),
        pytest.param("bf16", True, id="native-bf16", marks=pytest.mark.long),
        pytest.param("f32", False, id="torch-f32", marks=pytest.mark.long),
    ],
)
def test_rejected_drafts_leave_nothing_behind(tmp_path, dtype, native):
    if native:
        require_native()
    assert not Rejections(hybrid(tmp_path, native, dtype)).differs()


def test_a_fold_of_drafts_would_be_seen(tmp_path, monkeypatch):
    """A planted bug: the state takes in tokens that are drafts, and counts them or not."""
    of, finish = DeltaStep.of, DeltaStep.finish

    def shifted(spans, by):
        return [replace(span, known=span.known + by) for span in spans]

    def all_known(*given):
        step = of(*given)
        return replace(step, spans=shifted(step.spans, DRAFT_MAX))

    monkeypatch.setattr(decoder.DeltaStep, "of", staticmethod(all_known))
    with pytest.raises(ValueError, match="state slot 0 holds"):
        Rejections(hybrid(tmp_path, False), 2).differs()
    monkeypatch.setattr(decoder.DeltaStep, "finish", lambda step: finish(replace(step, spans=shifted(step.spans, -DRAFT_MAX))))
    assert Rejections(hybrid(tmp_path, False), 2).differs().startswith("rows at")


def test_a_hidden_row_that_is_not_repaired_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "accept", lambda *_: None)
    assert Rejections(hybrid(tmp_path, False), 2).differs().startswith(("cells", "the hidden row"))


def test_a_state_of_another_position_is_refused(tmp_path):
    model = hybrid(tmp_path, False)
    kv = cache(model, 80)
    model.forward(Batch.of([(some(40), 0, [0, 1, 2])]), kv)
    for start in (20, 64):
        with pytest.raises(ValueError, match="state slot 0 holds 32 tokens"):
            model.forward(Batch.of([([5], start, [0, 1, 2, 3, 4])]), kv)


def test_the_first_token_has_no_draft_before_it(tmp_path):
    model = hybrid(tmp_path, False)
    kv = cache(model, 16)
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="nothing to pair"):
        model.draft(zero.long(), zero, torch.zeros(1, model.spec.hidden), zero[None], kv)
