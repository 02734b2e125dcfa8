"""The native library's recurrent layers and drafting head: against torch on the same weights, and byte for byte among steps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model, load_model
from tests.device.library import require_native
from tests.device.test_native import both, run, steps
from tests.make_models import write_gguf, write_hf
from wire.model_files import ModelFiles, find_model

HYBRID = {"layers": 4, "hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 160, "mtp": True}
SHAPES = [
    pytest.param("qwen35", HYBRID, id="hybrid"),
    pytest.param("qwen35", HYBRID | {"key_heads": 3, "value_heads": 3, "key_dim": 32, "value_dim": 16}, id="as-many-heads"),
    pytest.param("qwen35", HYBRID | {"key_heads": 1, "value_heads": 4, "value_dim": 80, "kernel": 3, "tied": False}, id="one"),
    pytest.param("qwen35", HYBRID | {"layers": 6, "interval": 3, "mtp": False}, id="no-head"),
    pytest.param("qwen35", HYBRID | {"layers": 5, "mtp": False}, id="recurrent-last"),
    pytest.param("qwen3", {"heads": 6, "kv_heads": 2, "head_dim": 32, "mtp": True, "draft_ids": [5, 3, 90, 200]}, id="qwen3"),
    pytest.param("qwen2", {"heads": 4, "kv_heads": 1, "head_dim": 32, "mtp": True}, id="qwen2"),
]  # fmt: skip
DRAFTS = 3


def cache(model: Model, blocks: int = 41) -> KvCache:
    """Blocks and states full of numbers that nobody wrote: whatever reads them spoils a comparison."""
    kv = KvCache(model.spec, blocks, 16, model.kv_dtype, state_slots=4, draft_max=DRAFTS)
    kv.rows.fill_(1e6)
    if kv.states:
        kv.states.flat.fill_(1e6)
    return kv


def hybrid(tmp_path, **options) -> ModelFiles:
    return find_model(str(write_hf(tmp_path / "m", "qwen35", **HYBRID | options)))


def draft(model: Model, kv: KvCache, count: int, tokens: list[int], start: int, blocks: list[int]) -> Tensor:
    """Rows of `count` passes of the head for one sequence: `tokens` from position `start` on."""
    assert kv.hidden is not None
    hidden, rows = kv.hidden[blocks[(start - 1) // 16]][None].clone(), []
    for i in range(count):
        token, at = torch.tensor(tokens[i : i + 1]), torch.tensor([start + i], dtype=torch.int32)
        hidden = model.draft(token, at, hidden, torch.tensor([blocks], dtype=torch.int32), kv)
        rows.append(hidden)
    return torch.cat(rows)


@pytest.mark.parametrize(("arch", "shape"), SHAPES)
def test_f32_equals_torch(tmp_path, arch, shape):
    require_native()
    models = both(find_model(str(write_hf(tmp_path / "m", arch, **shape))), "f32")
    assert [model.backend for model in models] == ["native", "torch"]
    caches = [cache(model) for model in models]
    plan = steps(models[0].spec.vocab)
    a, b = (run(model, kv, plan) for model, kv in zip(models, caches))
    assert (a - b).abs().max() < 5e-4 * b.abs().max()
    cells = [kv.tensor[11:41].clone() for kv in caches]  # of the first sequence; its head's first cell stands for nothing
    if models[0].spec.mtp:
        for each in cells:
            each[-1, -1, :, :, 0] = 0
    assert torch.allclose(*cells, rtol=1e-3, atol=1e-3)
    if models[0].spec.delta:
        states = [torch.cat([kv.states.state[:2].flatten(), kv.states.folded[:2].flatten().float()]) for kv in caches]
        assert torch.allclose(*states, rtol=1e-3, atol=1e-3)
    if models[0].spec.mtp:
        assert torch.allclose(*(kv.hidden[list(range(20, 41))] for kv in caches), rtol=1e-3, atol=1e-3)
        rows = [draft(model, kv, 3, [7, 8, 9], 322, list(range(40, 10, -1))) for model, kv in zip(models, caches)]
        assert (rows[0] - rows[1]).abs().max() < 5e-4 * rows[1].abs().max()
        logits = [model.draft_logits(each) for model, each in zip(models, rows)]
        assert (logits[0] - logits[1]).abs().max() < 5e-4 * logits[1].abs().max()


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
def test_small_formats_are_close_to_their_own_weights_in_f32(tmp_path, quant):
    require_native()
    shape = HYBRID | {"hidden": 128, "intermediate": 224, "key_dim": 32, "value_dim": 32}
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "qwen35", quant=quant, **shape)))
    model, truth = load_model(files, "auto", threads=2), load_model(files, "f32", threads=2)
    assert model.dtype_name == ("int4" if quant.startswith("Q4") else "bf16")
    caches, plan = [cache(each) for each in (model, truth)], steps(files.spec.vocab)
    a, b = (run(each, kv, plan) for each, kv in zip((model, truth), caches))
    assert (a - b).norm() / b.norm() < 0.05
    blocks = list(range(40, 10, -1))
    a, b = (each.draft_logits(draft(each, kv, 2, [7, 8], 322, blocks)) for each, kv in zip((model, truth), caches))
    assert (a - b).norm() / b.norm() < 0.05


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_split_into_steps_changes_no_byte(tmp_path, dtype):
    """Rows, cells, the head's cells, hidden rows, states and what of the log is still read."""
    require_native()
    model = load_model(hybrid(tmp_path), dtype, threads=2)
    tokens, one, two = [(31 * i + 7) % model.spec.vocab for i in range(150)], list(range(10)), list(range(20, 30))
    found = []
    for sizes in ([150], [1] * 150, [7] * 22, [16] * 10, [33, 64, 2, 1, 15, 35]):
        kv, at, rows = cache(model), 0, []
        for size in sizes:
            if fed := tokens[at : at + size]:
                batch = Batch.of([(tokens[:3], 0, two), (fed, at, one)], last_only=False)
                rows.append(model.forward(batch, kv)[3:])
            at += size
        last = [p % kv.states.log_k.shape[2] for p in range(144, 150)]
        inputs = [p % kv.states.conv.shape[2] for p in range(147, 150)]
        found.append([torch.cat(rows), kv.tensor[:10], kv.hidden[:10], kv.states.state[1], kv.states.folded[1],
                      *(log[1][:, last] for log in (kv.states.log_k, kv.states.log_d, kv.states.log_g)),
                      kv.states.conv[1][:, inputs]])  # fmt: skip
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_rejected_drafts_leave_no_trace(tmp_path):
    """At every position around folds, drafts of every length, of which none or some are right."""
    require_native()
    model = load_model(hybrid(tmp_path), "f32", threads=2)
    tokens, blocks = [(31 * i + 7) % model.spec.vocab for i in range(60)], [0, 1, 2, 3]
    whole = model.forward(Batch.of([(tokens, 0, blocks)], last_only=False), cache(model))
    for drafts in range(1, DRAFTS + 1):
        for right in range(drafts + 1):
            kv, at = cache(model), 12
            model.forward(Batch.of([(tokens[:at], 0, blocks)]), kv)
            while at < 52:
                drafted = tokens[at + 1 : at + 1 + right] + [5] * (drafts - right)
                batch = Batch.of([([tokens[at], *drafted], at, blocks)], last_only=False)
                rows = model.forward(replace(batch, known=torch.tensor([at + 1], dtype=torch.int32)), kv)
                assert torch.equal(rows[: right + 1], whole[at : at + right + 1])
                at += right + 1
                kv.hidden[blocks[(at - 1) // 16]] = rows[right]  # as the runner repairs it
                assert torch.equal(kv.hidden[blocks[0]], whole[min(at - 1, 15)])


def test_a_draft_depends_on_its_sequence_only_and_never_reads_the_first_cell(tmp_path):
    require_native()
    model = load_model(hybrid(tmp_path), "bf16", threads=2)
    tokens = [(31 * i + 7) % model.spec.vocab for i in range(300)]
    kv, rows = cache(model), [(tokens, 0, list(range(20))), (tokens[9:30], 0, [20, 21]), (tokens[3:4], 0, [22])]
    model.forward(Batch.of(rows), kv)
    alone = [draft(model, kv, 1, [t], len(fed), blocks) for t, (fed, _, blocks) in zip((4, 5, 6), rows)]
    kv.tensor[[0, 20, 22], -1, :, :, 0] = 3.0
    tables = torch.tensor([blocks + [0] * (20 - len(blocks)) for _, _, blocks in rows], dtype=torch.int32)
    hidden = kv.hidden[[18, 21, 22]]
    at = torch.tensor([300, 21, 1], dtype=torch.int32)
    assert torch.equal(model.draft(torch.tensor([4, 5, 6]), at, hidden, tables, kv), torch.cat(alone))
    with pytest.raises(IndexError):
        model.draft(torch.tensor([4]), torch.tensor([0], dtype=torch.int32), hidden[:1], tables[:1], kv)


@pytest.mark.parametrize("ids", [None, [200, 3, 4, 5, 17, 100, 101, 0]])
def test_greedy_drafts_in_one_call_are_those_made_one_by_one(tmp_path, ids):
    require_native()
    model = load_model(hybrid(tmp_path, **({} if ids is None else {"draft_ids": ids})), "bf16", threads=2)
    tokens = [(31 * i + 7) % model.spec.vocab for i in range(60)]
    kv, rows, counts = (
        cache(model),
        [(tokens, 0, [0, 1, 2, 3, 4]), (tokens[9:30], 0, [20, 21, 22]), (tokens[3:4], 0, [8])],
        [5, 1, 3],
    )
    model.forward(Batch.of(rows), kv)
    expected, cells = [], []
    for token, count, (fed, _, blocks) in zip((4, 5, 6), counts, rows):
        chain, hidden = [token], kv.hidden[[blocks[(len(fed) - 1) // 16]]]
        for i in range(count):
            at = torch.tensor([len(fed) + i], dtype=torch.int32)
            hidden = model.draft(torch.tensor(chain[-1:]), at, hidden, torch.tensor([blocks], dtype=torch.int32), kv)
            best = int(model.draft_logits(hidden)[0].argmax())
            chain.append(best if ids is None else ids[best])
        expected.append(chain[1:])
        cells.append(kv.tensor[blocks, -1].clone())
    tables = torch.tensor([blocks + [0] * (5 - len(blocks)) for _, _, blocks in rows], dtype=torch.int32)
    at = torch.tensor([60, 21, 1], dtype=torch.int32)
    hidden = kv.hidden[[3, 21, 8]]
    before = kv.tensor[:, :-1].clone()
    assert model.draft_greedy(torch.tensor([4, 5, 6]), at, hidden, tables, counts, kv) == expected
    assert all(torch.equal(kv.tensor[blocks, -1], kept) for (_, _, blocks), kept in zip(rows, cells))
    assert torch.equal(kv.tensor[:, :-1], before), "only the head's cells are written"


def test_a_draft_and_the_fill_write_the_same_cell(tmp_path):
    require_native()
    model = load_model(hybrid(tmp_path), "bf16", threads=2)
    kv, blocks = cache(model), [3, 1]
    model.forward(Batch.of([(list(range(5, 21)), 0, blocks)]), kv)
    draft(model, kv, 1, [9], 16, blocks)
    drafted = kv.tensor[1, -1, :, :, 0].clone()
    model.forward(Batch.of([([9], 16, blocks)]), kv)
    assert torch.equal(kv.tensor[1, -1, :, :, 0], drafted) and drafted.abs().max() < 1e5


@pytest.mark.parametrize("quant", ["F32", "Q4_1", "Q8_0"])
def test_a_smaller_draft_vocabulary_is_columns_of_the_whole(tmp_path, quant):
    require_native()
    ids = [200, 3, 4, 5, 17, 100, 101, 0]
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "qwen35", quant=quant, draft_ids=ids, **HYBRID)))
    model = load_model(files, "f32" if quant == "F32" else "auto", threads=2)
    assert model.draft_ids is not None and model.draft_ids.tolist() == ids
    rows = torch.randn(3, model.spec.hidden, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.draft_logits(rows), model.logits(rows)[:, ids])


def test_without_its_head_a_model_has_neither_its_layer_nor_its_hidden_rows(tmp_path):
    require_native()
    files = hybrid(tmp_path)
    model, plain = load_model(files, "f32"), load_model(files, "f32", mtp=False)
    assert plain.spec.mtp is None and plain.weight_bytes < model.weight_bytes
    kv, other = cache(model), cache(plain)
    assert other.hidden is None and other.layers == kv.layers - 1
    plan = steps(files.spec.vocab)
    assert torch.equal(run(model, kv, plan), run(plain, other, plan))
    with pytest.raises(ValueError, match="do not fit"):
        plain.forward(Batch.of([([1], 0, [0])]), kv)


def test_states_that_do_not_fit_the_rows_are_refused(tmp_path):
    require_native()
    model = load_model(hybrid(tmp_path), "f32")
    kv = cache(model)
    batch = Batch.of([(list(range(40)), 0, [0, 1, 2])])
    with pytest.raises(IndexError):
        model.forward(replace(batch, state_slots=torch.tensor([5], dtype=torch.int32)), kv)
    model.forward(batch, kv)
    for start in (20, 64):  # the state has taken in 32 tokens
        with pytest.raises(ValueError, match="state"):
            model.forward(Batch.of([([1], start, [0, 1, 2, 3, 4])]), kv)


def test_more_threads_than_processors_change_no_bit(tmp_path):
    require_native()
    files, found = hybrid(tmp_path), []
    for threads in (1, 2, 5):
        model = load_model(files, "bf16", threads=threads)
        for _ in range(2):
            kv = cache(model)
            rows = run(model, kv, steps(files.spec.vocab))
            found.append([rows, draft(model, kv, 3, [7, 8, 9], 322, list(range(40, 10, -1))), kv.tensor, kv.states.flat])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
