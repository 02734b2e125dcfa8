"""Hybrids of Qwen3.5 against transformers on the same weights, fed in chunks of any size."""

from pathlib import Path

import pytest
import torch

from gpu_worker.model.load import load_model
from tests.device.library import require_native
from tests.make_models import VOCAB, write_gguf, write_hf
from tests.model.runs import drafted_greedy, greedy, logits_of, theirs
from wire.model_files import find_model

pytest.importorskip("transformers", reason="transformers is not installed")

BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
NATIVE_FIRST = pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.long)], ids=["native", "torch"])
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
SHAPES = [
    pytest.param({"layers": 4}, id="tied"),
    pytest.param({"layers": 4, "tied": False, "key_heads": 3, "value_heads": 3, "key_dim": 32}, id="untied-equal-heads"),
    pytest.param({"layers": 5, "interval": 2, "heads": 6, "kv_heads": 2, "head_dim": 32, "hidden": 96}, id="recurrent-last"),
    pytest.param({"layers": 3, "interval": 3, "key_heads": 1, "value_heads": 6, "value_dim": 32, "kernel": 2}, id="one-key-head"),
    pytest.param({"layers": 2, "interval": 2, "heads": 4, "kv_heads": 1, "head_dim": 64}, id="wide-heads"),
    pytest.param({"layers": 4, "head_dim": 32, "factor": 0.25, "heads": 2, "kv_heads": 2}, id="a-quarter-rotated"),
]


def folder(path, shape):
    """`factor`: the share of a head that is rotated."""
    shape = dict(shape)
    config = {"rope_parameters": MROPE | {"partial_rotary_factor": shape.pop("factor", 0.5)}}
    return write_hf(path, "qwen35", config=config, **shape)


def some(count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_text(tmp_path, shape):
    logits_and_greedy_text(tmp_path, shape, native=True)


TORCH_SLOW = [pytest.param(*shape.values, id=shape.id, marks=pytest.mark.long) for shape in (SHAPES[0], *SHAPES[3:])]


@pytest.mark.parametrize("shape", [*SHAPES[1:3], *TORCH_SLOW])
def test_logits_and_greedy_text_in_torch(tmp_path, shape):
    logits_and_greedy_text(tmp_path, shape, native=False)


def logits_and_greedy_text(tmp_path, shape, native):
    """300 tokens at once, and in chunks of 64, 7 and 1: float32 within 1e-3, the same best token; 64 greedy tokens equal."""
    if native:
        require_native()
    path = folder(tmp_path / "m", shape)
    model = load_model(find_model(str(path)), "f32", threads=1, native=native)
    tokens = some(300)
    with torch.inference_mode():
        reference = theirs(path)
        expected = reference(torch.tensor([tokens])).logits[0]
        text = reference.generate(torch.tensor([tokens[:20]]), max_new_tokens=64, do_sample=False, eos_token_id=-1)[0].tolist()
    assert expected.std() > 0.5, "logits that do not spread prove little"
    whole = logits_of(model, tokens, 300)
    assert (whole - expected).abs().max() < 1e-3
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    for chunk in (64, 7, 1):
        assert torch.equal(logits_of(model, tokens, chunk), whole), f"chunks of {chunk}"
    assert greedy(model, tokens[:20], 64) == text


@BACKENDS
def test_half_precision_is_near(tmp_path, native):
    if native:
        require_native()
    path = folder(tmp_path / "m", {"layers": 4})
    model, truth = (load_model(find_model(str(path)), dtype, threads=1, native=native) for dtype in ("bf16", "f32"))
    a, b = (logits_of(each, some(100), 50) for each in (model, truth))
    assert (a - b).norm() / b.norm() < 0.05


@BACKENDS
def test_a_gguf_file_is_the_same_model(tmp_path, native):
    if native:
        require_native()
    shape = {"layers": 4, "value_heads": 4, "key_heads": 2}
    models = [
        load_model(find_model(str(path)), "f32", threads=1, native=native)
        for path in (
            write_hf(tmp_path / "m", "qwen35", **shape),
            write_gguf(tmp_path / "m.gguf", "qwen35", quant="F32", **shape),
        )
    ]
    a, b = (logits_of(model, some(60), 60) for model in models)
    assert (a - b).abs().max() < 1e-4


@NATIVE_FIRST
def test_bard(native):
    """The hybrid that is shipped: trained weights, 200 tokens of its own text, and drafts that are often right."""
    if native:
        require_native()
    files = find_model("bard")
    model = load_model(files, "f32", threads=1, native=native)
    prompt = torch.randint(100, files.spec.vocab, (8,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        reference = theirs(Path(files.path))
        text = reference.generate(torch.tensor([prompt]), max_new_tokens=192, do_sample=False, eos_token_id=-1)
        expected = reference(text).logits[0]
    found = logits_of(model, text[0].tolist(), 64)
    assert (found - expected).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    drafted, right = drafted_greedy(model, prompt, 192, 2)
    assert drafted == text[0].tolist()
    assert right > 50, "of at most 128 drafts"
