"""Heads that draft: found by their tensors in the folder of any model, or in a file beside it, and refused if they do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.make_models import random_weights, write_gguf, write_hf, write_safetensors
from wire import model_files
from wire.model_files import ModelError, find_model, with_head
from wire.model_spec import MtpSpec, file_shape, tensor_shapes


def head_file(path: Path, change: dict[str, np.ndarray | None] | None = None, **options: Any) -> Path:
    """A head for the plain model that these options make; `change` replaces tensors (None drops one)."""
    weights = {name: array for name, array in random_weights(mtp=True, **options).items() if name.startswith("mtp.")}
    kept = {name: array for name, array in (weights | (change or {})).items() if array is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, kept, "BF16")
    return path


def complaint(path: Path, about: Path | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(str(path))
    assert "\n" not in str(caught.value)
    assert str(about or path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arch", "biases"),
    [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False), ("qwen3", True), ("qwen35", False)],
)
def test_a_head_in_any_folder_is_found_by_its_tensors(tmp_path: Path, arch: str, biases: bool) -> None:
    options: dict[str, Any] = {"layers": 4, "attention_bias": biases, "mlp_bias": biases and arch == "llama"}
    files = find_model(str(write_hf(tmp_path / "m", arch, mtp=True, **options)))
    assert files.spec.mtp == MtpSpec(96)
    assert files.spec.kv_layers == len(files.spec.attention_layers) + 1
    assert set(files.names.values()) == set(files.tensors)
    shapes = tensor_shapes(files.spec)
    for uniform, shape in shapes.items():
        assert files.tensors[files.names[uniform]].shape == file_shape(files.spec, uniform, "hf", shape)
    assert shapes["mtp.fc"] == (64, 128)
    assert ("mtp.layer.q_norm" in shapes, "mtp.layer.o_bias" in shapes) == (arch.startswith("qwen3"), biases)
    assert ("mtp.layer.q_gate" in shapes) == (arch == "qwen35")
    assert files.names["mtp.layer.q"] == "mtp.layers.0.self_attn.q_proj.weight"


def test_without_tensors_there_is_no_head_whatever_the_config_says(tmp_path: Path) -> None:
    config = {"mtp_num_hidden_layers": 1}
    assert find_model(str(write_hf(tmp_path / "m", "qwen35", layers=4, config=config))).spec.mtp is None


def test_a_head_that_drafts_some_tokens_only(tmp_path: Path) -> None:
    files = find_model(str(write_hf(tmp_path / "m", mtp=True, draft_ids=[9, 4, 280])))
    assert files.spec.mtp == MtpSpec(96, draft_vocab=3)
    assert files.tensors[files.names["mtp.draft_ids"]].dtype == "I32"
    assert "285" in complaint(write_hf(tmp_path / "a", mtp=True, draft_ids=[9, 285]), tmp_path / "a")
    assert "-1" in complaint(write_hf(tmp_path / "b", mtp=True, draft_ids=[9, -1]), tmp_path / "b")
    assert "twice" in complaint(write_hf(tmp_path / "c", mtp=True, draft_ids=[9, 9]), tmp_path / "c")
    assert "draft_token_ids" in complaint(write_hf(tmp_path / "d", mtp=True, draft_ids=[]), tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mtp.fc.weight": None}, "missing tensor mtp.fc.weight"),
        ({"mtp.layers.0.mlp.gate_proj.weight": None}, "missing tensor mtp.layers.0.mlp.gate_proj.weight"),
        ({"mtp.layers.0.self_attn.q_norm.weight": np.ones(16, "f4")}, "mtp.layers.0.self_attn.q_norm.weight is no part"),
        ({"mtp.layers.1.input_layernorm.weight": np.ones(64, "f4")}, "mtp.layers.1.input_layernorm.weight is no part"),
        ({"mtp.embed_tokens.weight": np.ones((285, 64), "f4")}, "mtp.embed_tokens.weight is no part"),
        ({"mtp.fc.weight": np.ones((64, 64), "f4")}, "[64, 64], expected [64, 128]"),
        ({"mtp.layers.0.mlp.gate_proj.weight": np.ones((), "f4")}, "has the shape []"),
        ({"mtp.draft_token_ids": np.ones(3, "f4")}, "has the type BF16, expected I32 or I64"),
        ({"mtp.draft_token_ids": np.ones((3, 1), "i4")}, "[3, 1], expected [3]"),
        ({"mtp.draft_token_ids": np.arange(300, dtype="i4")}, "drafts 300 tokens"),
        ({"model.norm.weight": np.ones(64, "f4")}, "model.norm.weight is no part of a head"),
    ],
)
def test_half_a_head_is_named(tmp_path: Path, change: dict[str, np.ndarray | None], words: str) -> None:
    trunk = find_model(str(write_gguf(tmp_path / "m.gguf", quant="Q8_0")))
    path = head_file(tmp_path / "mtp.safetensors", change)
    with pytest.raises(ModelError) as caught:
        model_files.check(with_head(trunk, path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with a tiny smollm2 and no head yet; returns where the head would be."""
    (tmp_path / "package").mkdir()
    write_gguf(tmp_path / "package" / "m.gguf")
    monkeypatch.setattr(model_files, "SHIPPED", tmp_path / "models")
    monkeypatch.setattr(model_files, "_embedded", lambda: tmp_path / "package" / "m.gguf")
    return tmp_path / "models" / "smollm2-mtp" / "mtp.safetensors"


def test_the_embedded_model_gets_the_head_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = shipped(tmp_path, monkeypatch)
    assert find_model("smollm2").spec.mtp is None
    head_file(place, intermediate=32, draft_ids=list(range(100)))
    files = find_model("smollm2")
    assert (files.name, files.kind, files.head_kind, files.spec.mtp) == ("smollm2", "gguf", "hf", MtpSpec(32, 100))
    assert (files.naming("mtp.layer.q"), files.naming("layers.0.q")) == ("hf", "gguf")
    assert files.tensors[files.names["mtp.layer.q"]].file == str(place)
    assert files.tensors[files.names["layers.0.q"]].file.endswith("m.gguf")
    assert find_model(str(tmp_path / "package" / "m.gguf")).spec.mtp is None


def test_a_head_for_another_trunk_is_one_line_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = head_file(shipped(tmp_path, monkeypatch), hidden=96)
    text = complaint(Path("smollm2"), place)
    assert "expected [64, 128]" in text
    place.write_bytes(b"")
    assert "truncated" in complaint(Path("smollm2"), place)


def test_bard_is_a_folder_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "SHIPPED", tmp_path)
    assert "not in this installation" in complaint(Path("bard"))
    write_hf(tmp_path / "bard", "qwen35", layers=4, mtp=True)
    files = find_model("bard")
    assert (files.name, files.spec.arch, files.spec.mtp) == ("bard", "qwen35", MtpSpec(96))
