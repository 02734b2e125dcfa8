"""The native library against torch on the same weights, for shapes of every kind, and its build and load."""

import ctypes
import logging
from dataclasses import replace

import pytest
import torch

from gpu_worker.device import native
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model import rope
from gpu_worker.model.batch import Batch
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import load_model
from gpu_worker.model.native_model import NativeModel
from gpu_worker.model.weights import Weights
from tests.device.library import require_native
from tests.make_models import write_gguf, write_hf
from wire.model_files import ModelFiles, find_model

SHAPES = [
    pytest.param("llama", {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 96, "tied": False}, id="group3"),
    pytest.param("qwen2", {"heads": 14, "kv_heads": 2, "head_dim": 16, "intermediate": 208}, id="group7-bias"),
    pytest.param("qwen3", {"heads": 2, "kv_heads": 2, "head_dim": 128, "vocab": 301}, id="qknorm"),
    pytest.param("llama", {"heads": 3, "kv_heads": 1, "head_dim": 80, "attention_bias": True, "mlp_bias": True}, id="all-biases"),
    pytest.param("qwen3", {"heads": 4, "kv_heads": 4, "head_dim": 48, "hidden": 80, "intermediate": 80}, id="dim48"),
    pytest.param("llama", {"heads": 2, "kv_heads": 1, "head_dim": 256}, id="dim256"),
]  # fmt: skip


def both(files: ModelFiles, dtype: str) -> list:
    return [load_model(files, dtype, threads=2, native=use) for use in (True, False)]


def run(model, kv: KvCache, steps: list[list[tuple[list[int], int, list[int]]]]) -> torch.Tensor:
    """Logits of every row of every step."""
    return torch.cat([model.logits(model.forward(Batch.of(rows, last_only=False), kv)) for rows in steps])


def steps(vocab: int) -> list[list[tuple[list[int], int, list[int]]]]:
    """A long prompt in two chunks with another sequence beside, then single rows, over several segments of 256 cells."""
    tokens = [(31 * i + 7) % vocab for i in range(330)]
    one, two = list(range(40, 10, -1)), list(range(10))
    return [
        [(tokens[:180], 0, one)],
        [(tokens[180:320], 180, one), (tokens[5:25], 0, two)],
        [(tokens[320:321], 320, one), (tokens[25:28], 20, two)],
        [(tokens[321:322], 321, one)],
    ]


@pytest.mark.parametrize(("arch", "shape"), SHAPES)
def test_f32_equals_torch(tmp_path, arch, shape):
    require_native()
    ours, theirs = both(find_model(str(write_hf(tmp_path / "m", arch, **shape))), "f32")
    assert (ours.backend, theirs.backend) == ("native", "torch")
    caches = [KvCache(ours.spec, 41, 16, torch.float32) for _ in range(2)]
    plan = steps(ours.spec.vocab)
    a, b = run(ours, caches[0], plan), run(theirs, caches[1], plan)
    assert (a - b).abs().max() < 2e-4 * b.abs().max()
    assert torch.allclose(caches[0].tensor[11:41], caches[1].tensor[11:41], atol=1e-4)  # the first 480 cells' blocks
    assert prove(ours) == (True, "")


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
def test_small_formats_are_close_to_their_own_weights_in_f32(tmp_path, quant):
    require_native()
    shape = {"hidden": 128, "heads": 6, "kv_heads": 2, "head_dim": 64, "intermediate": 224}
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "llama", quant=quant, **shape)))
    model, truth = load_model(files, "auto", threads=2), load_model(files, "f32", native=False)
    assert model.dtype_name == ("int4" if quant.startswith("Q4") else "bf16")
    plan = steps(files.spec.vocab)
    a = run(model, KvCache(files.spec, 41, 16, model.kv_dtype), plan)
    b = run(truth, KvCache(files.spec, 41, 16, torch.float32), plan)
    assert ((a - b).norm() / b.norm()) < 0.02
    assert prove(model) == (True, "")


def test_an_embedding_is_read_back_from_every_format(tmp_path):
    require_native()
    for quant in ("F32", "Q4_0", "Q4_1", "Q8_0"):
        files = find_model(str(write_gguf(tmp_path / f"{quant}.gguf", "llama", quant=quant, layers=1)))
        dtype = "f32" if quant == "F32" else "auto"
        model, weights = load_model(files, dtype), Weights(files)
        embed, norm = weights.dense("embed", torch.float32), weights.dense("norm", torch.float32)
        ids = [0, 5, 17, files.spec.vocab - 1]
        kv = KvCache(files.spec, 2, 16, model.kv_dtype)
        got = model.forward(Batch.of([(ids, 0, [0])], last_only=False), kv, layers=[])
        # without layers nothing but the embedding and the final norm is left
        x = embed[ids]
        expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + files.spec.rms_eps) * norm
        assert torch.allclose(got, expected, atol=1e-5)


def test_rows_that_no_one_samples_write_cells_only(tmp_path):
    require_native()
    files = find_model(str(write_hf(tmp_path / "m", "qwen2")))
    model = load_model(files, "f32")
    caches = [KvCache(files.spec, 4, 16, torch.float32) for _ in range(2)]
    batch = Batch.of([(list(range(3, 40)), 0, [2, 0, 1])])
    quiet = replace(batch, out_rows=batch.out_rows[:0])
    assert model.forward(batch, caches[0]).shape == (1, 64)
    assert model.forward(quiet, caches[1]).shape == (0, 64)
    assert torch.equal(caches[0].tensor, caches[1].tensor)


def test_cells_of_another_type_are_refused(tmp_path):
    require_native()
    files = find_model(str(write_hf(tmp_path / "m")))
    with pytest.raises(ValueError, match="bfloat16"):
        load_model(files, "f32").forward(Batch.of([([1], 0, [0])]), KvCache(files.spec, 1, 16, torch.bfloat16))


def test_more_threads_than_processors_change_no_bit(tmp_path):
    require_native()
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "llama", quant="Q4_1", heads=6, kv_heads=2, head_dim=32)))
    found = []
    for threads in (1, 2, 5):
        model, kv = load_model(files, "auto", threads=threads), KvCache(files.spec, 41, 16, torch.bfloat16)
        found += [(run(model, kv, steps(files.spec.vocab)), kv.tensor.clone()) for _ in range(3)]
    assert all(torch.equal(logits, found[0][0]) and torch.equal(cells, found[0][1]) for logits, cells in found)


@pytest.mark.parametrize("use", [True, False], ids=["native", "torch"])
def test_a_sequence_outgrows_the_table_of_positions(tmp_path, monkeypatch, use):
    if use:
        require_native()
    files = find_model(str(write_hf(tmp_path / "m", context=64)))
    whole = load_model(files, "f32", native=use)
    monkeypatch.setattr(rope, "PART", 16)
    growing = load_model(files, "f32", native=use)
    row = (list(range(5, 45)), 0, [0, 1, 2])
    a, b = (m.forward(Batch.of([row]), KvCache(files.spec, 3, 16, torch.float32)) for m in (whole, growing))
    assert torch.equal(a, b)


def test_numbers_out_of_range_are_refused_before_anything_is_written(tmp_path):
    require_native()
    files = find_model(str(write_hf(tmp_path / "m", context=64)))
    model, kv = load_model(files, "f32"), KvCache(files.spec, 8, 16, torch.float32)
    wrong = [([files.spec.vocab], 0, [0]), ([-1], 0, [0]), ([1], 64, list(range(5))), ([1], 16, [0])]
    for row in wrong:
        with pytest.raises(IndexError):
            model.forward(Batch.of([row]), kv)
    assert not kv.tensor.any()


def test_a_shape_that_the_library_cannot_run_goes_to_torch(tmp_path):
    files = find_model(str(write_hf(tmp_path / "m", "llama", hidden=72, head_dim=18)))
    model = load_model(files, "f32")
    assert model.backend == "torch"
    assert prove(model) == (True, "")


def test_without_a_library_one_line_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert native.load(tmp_path / "none.so") is None
        (tmp_path / "bad.so").write_bytes(b"not a library")
        assert native.load(tmp_path / "bad.so") is None
    assert [record.message.count("\n") for record in caplog.records] == [0, 0]
    assert "running in torch" in caplog.records[0].message and "does not load" in caplog.records[1].message


def test_a_failing_compiler_is_an_error_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false failed"):
        native.build(tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()


@pytest.mark.long
@pytest.mark.timeout(600)  # a whole build and eight proofs
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_builds_for_lesser_processors_agree(tmp_path, target):
    """Plain loops, AVX2 and AVX-512 without bfloat16 instructions."""
    require_native()
    path = tmp_path / "rows.so"
    native.build(path, [flag if not flag.startswith("-march") else f"-march={target}" for flag in native.FLAGS])
    lib = native.load(path)
    if lib is None:
        pytest.skip(f"this processor cannot run {target}")
    assert isinstance(lib, ctypes.CDLL)
    for quant, name in (("F32", "f32"), ("BF16", "bf16"), ("Q4_1", "int4"), ("Q8_0", "bf16")):
        options = {"heads": 6, "kv_heads": 2, "head_dim": 48, "intermediate": 160}
        files = find_model(str(write_gguf(tmp_path / f"{quant}.gguf", "llama", quant=quant, **options)))
        model = NativeModel(lib, Weights(files), files.spec, name, True, 2)
        assert prove(model) == (True, "")
        best = load_model(files, "f32" if name == "f32" else "auto")
        plan = steps(files.spec.vocab)
        a, b = (run(m, KvCache(files.spec, 41, 16, m.kv_dtype), plan) for m in (model, best))
        assert (a - b).norm() / b.norm() < 0.01
