"""Logits and greedy text against transformers on the same weights. transformers comes with the extra `test` only."""

from pathlib import Path

import pytest
import torch

from gpu_worker.model.load import load_model
from gpu_worker.model.rope import frequencies
from tests.device.library import require_native
from tests.make_models import VOCAB, write_hf
from tests.model.runs import greedy, logits_of, theirs
from wire.model_files import find_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FOLDERS = [
    pytest.param("llama", {}, id="llama-tied"),
    pytest.param("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}, id="llama-untied-biases"),
    pytest.param(
        "llama", {"heads": 8, "kv_heads": 1, "head_dim": 32, "rope": {"rope_type": "linear", "factor": 2.5}}, id="llama-linear"
    ),
    pytest.param("llama", {"head_dim": 64, "rope": LLAMA3}, id="llama-llama3"),
    pytest.param("qwen2", {"heads": 6, "kv_heads": 2, "head_dim": 16, "hidden": 96}, id="qwen2-biases"),
    pytest.param("qwen2", {"head_dim": 16, "rope": YARN, "tied": False}, id="qwen2-yarn"),
    pytest.param("qwen3", {"heads": 4, "kv_heads": 4, "head_dim": 48}, id="qwen3"),
    pytest.param(
        "qwen3", {"rope": {**YARN, "beta_fast": 16.0, "attention_factor": 1.25}, "new_spelling": True}, id="qwen3-yarn-new"
    ),
    pytest.param("qwen3", {"rope": LLAMA3, "new_spelling": True, "shards": 3, "attention_bias": True}, id="qwen3-sharded"),
]


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(("arch", "options"), FOLDERS)
def test_random_folders(tmp_path, arch, options, native):
    if native:
        require_native()
    path = write_hf(tmp_path / "m", arch, **options)
    model = load_model(find_model(str(path)), "f32", threads=2, native=native)
    tokens = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = theirs(path)(torch.tensor([tokens])).logits[0]
    found = logits_of(model, tokens)
    assert (found - expected).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("arch", "options"), FOLDERS)
def test_rope_frequencies(tmp_path, arch, options):
    path = write_hf(tmp_path / "m", arch, **options)
    rotary = theirs(path).model.rotary_emb
    spec = find_model(str(path)).spec
    ours, scale = frequencies(spec.rope, spec.head_dim)
    assert torch.allclose(ours, rotary.inv_freq, rtol=1e-6)
    assert scale == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.fixture(scope="module")
def smollm2_theirs():
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    path = Path(find_model("smollm2").path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return loaded.eval()


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_smollm2(smollm2_theirs, native):
    """512 tokens of logits within 1e-3 and with the same best token; 200 greedy tokens equal."""
    if native:
        require_native()
    model = load_model(find_model("smollm2"), "f32", threads=2, native=native)
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
    question = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    start = torch.tensor([prompt + question])
    with torch.inference_mode():
        text = smollm2_theirs.generate(
            start, max_new_tokens=512 - start.shape[1], min_new_tokens=512 - start.shape[1], do_sample=False
        )
        expected = smollm2_theirs(text).logits[0]
    found = logits_of(model, text[0].tolist())
    worst = (found - expected).abs().max().item()
    print(f"512 tokens of logits: largest difference {worst:.2e}")
    assert worst < 1e-3
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    with torch.inference_mode():
        theirs_greedy = smollm2_theirs.generate(start, max_new_tokens=200, do_sample=False, eos_token_id=-1)[0].tolist()
    assert greedy(model, start[0].tolist(), 200) == theirs_greedy
