"""Hugging Face folders: both spellings of config.json, safetensors in one file or several, and every refusal by name."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.make_models import CHAT_TEMPLATE, VOCAB, random_weights, tokenizer_json, write_hf, write_safetensors
from wire.model_files import ModelError, RopeSpec, find_model


def complaint(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(str(path))
    text = str(caught.value)
    assert text
    assert "\n" not in text
    assert str(path) in text
    return text


def change_json(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value != "drop"}))


@pytest.mark.parametrize(("arch", "bias", "norm"), [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)])
@pytest.mark.parametrize("new_spelling", [False, True])
def test_architectures(tmp_path: Path, arch: str, bias: bool, norm: bool, new_spelling: bool) -> None:
    files = find_model(str(write_hf(tmp_path / "tiny", arch, new_spelling=new_spelling, heads=8, head_dim=32)))
    spec = files.spec
    assert (spec.arch, spec.qkv_bias, spec.o_bias, spec.qk_norm, spec.tied) == (arch, bias, False, norm, True)
    assert (spec.hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab) == (64, 8, 2, 32, VOCAB)
    assert spec.rope == RopeSpec(theta=10000.0)
    assert (files.name, files.kind, files.bos_token, files.eos_token) == ("tiny", "hf", "<|im_start|>", "<|im_end|>")
    assert files.eos_token_ids == (0, 2)
    assert files.chat_template == CHAT_TEMPLATE


def test_mistral_is_a_llama_without_window(tmp_path: Path) -> None:
    config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    path = write_hf(tmp_path / "m", config=config, context=32768)
    assert "sliding window of 4096" in complaint(path)
    change_json(path / "config.json", sliding_window=None)
    assert find_model(str(path)).spec.arch == "llama"
    change_json(path / "config.json", sliding_window=256)
    assert "sliding window of 256" in complaint(path)


@pytest.mark.parametrize(
    ("window", "refused"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, False),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, False),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, True),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, False),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2}, False),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_sliding_windows_that_apply_are_refused(tmp_path: Path, window: dict[str, Any], refused: bool) -> None:
    path = write_hf(tmp_path / "m", "qwen2", config=window)
    if refused:
        assert "sliding window of 64" in complaint(path)
    else:
        find_model(str(path))


@pytest.mark.parametrize("new_spelling", [False, True])
def test_rope_kinds(tmp_path: Path, new_spelling: bool) -> None:
    def rope(values: dict[str, Any]) -> tuple[RopeSpec, int]:
        spec = find_model(str(write_hf(tmp_path / "m", rope=values, new_spelling=new_spelling))).spec
        return spec.rope, spec.max_context

    assert rope({"type": "linear", "factor": 2.0} if not new_spelling else {"rope_type": "linear", "factor": 2}) == (
        RopeSpec(kind="linear", factor=2.0),
        1024,
    )
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    assert rope({"rope_type": "llama3"} | llama3) == (RopeSpec(kind="llama3", factor=8.0, original_context=128), 512)
    found, context = rope({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16.0})
    assert (found.kind, found.original_context, found.beta_fast, found.attention_factor, context) == (
        "yarn",
        256,
        16.0,
        None,
        1024,
    )
    found, _ = rope({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert (found.original_context, found.attention_factor) == (512, 1.0)
    found, _ = rope({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "truncate": False})
    assert (found.attention_factor, found.truncate) == (1.25, False)
    assert "'longrope'" in complaint(write_hf(tmp_path / "m", rope={"rope_type": "longrope"}, new_spelling=new_spelling))
    assert "'dynamic'" in complaint(write_hf(tmp_path / "m", rope={"rope_type": "dynamic"}, new_spelling=new_spelling))
    assert "low_freq_factor" in complaint(write_hf(tmp_path / "m", rope={"rope_type": "llama3", "factor": 8.0}))


def test_rope_theta_in_either_place(tmp_path: Path) -> None:
    new = write_hf(tmp_path / "new", rope={"rope_theta": 5e5}, new_spelling=True)
    old = write_hf(tmp_path / "old", config={"rope_theta": 5e5})
    assert find_model(str(new)).spec == find_model(str(old)).spec
    assert find_model(str(new)).spec.rope.theta == 5e5


def test_biases_sizes_and_types(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", dtype="BF16", attention_bias=True, mlp_bias=True, tied=False, layers=3)
    files = find_model(str(path))
    assert (files.spec.qkv_bias, files.spec.o_bias, files.spec.mlp_bias, files.spec.tied) == (True, True, True, False)
    assert files.tensors["lm_head.weight"].dtype == "BF16"
    assert find_model(str(write_hf(tmp_path / "q", "qwen3", attention_bias=True))).spec.o_bias


def test_head_dim_default(tmp_path: Path) -> None:
    assert find_model(str(write_hf(tmp_path / "m", config={"head_dim": None}))).spec.head_dim == 16
    assert find_model(str(write_hf(tmp_path / "q", "qwen3", head_dim=128, config={"head_dim": None}))).spec.head_dim == 128


def test_shards(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", shards=3)
    files = find_model(str(path))
    assert {Path(tensor.file).name for tensor in files.tensors.values()} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    for name, weights in random_weights().items():
        tensor = files.tensors[name]
        found = np.fromfile(tensor.file, np.float32, weights.size, offset=tensor.offset).reshape(tensor.shape)
        assert np.array_equal(found, weights)
    index = path / "model.safetensors.index.json"
    good = index.read_text()
    for bad in (
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "\\ud800"}}',
        '{"weight_map": 3}',
        "[]",
        "{",
        "",
    ):
        index.write_text(bad)
        assert "index.json" in complaint(path)
    index.write_text(good)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in complaint(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "opt"}, "opt"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": -64}, "hidden is -64"),
        ({"hidden_size": 128}, "expected"),
        ({"num_hidden_layers": 3}, "missing tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"tie_word_embeddings": False}, "missing tensor lm_head.weight"),
        ({"attention_bias": True}, "missing tensor model.layers.0.self_attn.q_proj.bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"vocab_size": 300}, "expected [300, 64]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": 5000}, "5000"),
        ({"eos_token_id": ["a"]}, "'a'"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": 0}, "rope theta"),
        ({"rope_theta": 1}, "rope theta"),
        ({"head_dim": 15}, "odd"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in complaint(write_hf(tmp_path / "m", config=config))


def test_a_bias_that_the_config_does_not_know_is_no_silent_loss(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", attention_bias=True, config={"attention_bias": False})
    assert "self_attn.k_proj.bias" in complaint(path)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    good = {file.name: file.read_bytes() for file in path.iterdir()}

    def restore() -> None:
        for name, data in good.items():
            (path / name).write_bytes(data)

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).unlink()
        assert f"no {name}" in complaint(path)
        restore()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for bad in (b"", b"{", b"[]", b"\xff\xfe", b'{"a": ' + b"[" * 100_000, b"null"):
            (path / name).write_bytes(bad)
            assert name in complaint(path)
        restore()
    (path / "generation_config.json").unlink()
    (path / "tokenizer_config.json").unlink()
    assert find_model(str(path)).eos_token_ids == (2,)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "convert it to model.safetensors" in complaint(path)
    shutil.rmtree(path)
    path.mkdir()
    (path / "some.gguf").write_bytes(b"GGUF")
    assert "some.gguf" in complaint(path)


def test_chat_template_places(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", chat_template=None)
    assert find_model(str(path)).chat_template is None
    (path / "chat_template.json").write_text('{"chat_template": "one"}')
    assert find_model(str(path)).chat_template == "one"
    change_json(
        path / "tokenizer_config.json",
        chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}],
    )
    assert find_model(str(path)).chat_template == "two"
    (path / "chat_template.jinja").write_text("three é")
    assert find_model(str(path)).chat_template == "three é"


def test_end_tokens_that_the_template_writes(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", config={"eos_token_id": 0}, tokenizer_config={"eos_token": None})
    (path / "generation_config.json").unlink()
    assert find_model(str(path)).eos_token_ids == (0, 2)
    change_json(path / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert find_model(str(path)).eos_token_ids == (0,)


def test_beginning_token(tmp_path: Path) -> None:
    assert find_model(str(write_hf(tmp_path / "a", bos=True))).add_bos
    assert not find_model(str(write_hf(tmp_path / "b", bos=True, tokenizer_config={"add_bos_token": False}))).add_bos
    assert find_model(str(write_hf(tmp_path / "c", tokenizer_config={"add_bos_token": True}))).add_bos


def test_decoders_of_other_families_are_refused(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json() | {"decoder": {"type": "WordPiece"}}))
    assert "'WordPiece'" in complaint(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json() | {"decoder": None}))
    assert "decoder None" in complaint(path)


def test_damaged_safetensors(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    file = path / "model.safetensors"
    data = file.read_bytes()
    for bad in (b"", b"\x01", bytes(8), b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"{}"):
        file.write_bytes(bad)
        complaint(path)
    rng = random.Random(3)
    for cut in sorted({*range(40), *(rng.randrange(len(data)) for _ in range(200)), len(data) - 1}):
        file.write_bytes(data[:cut])
        complaint(path)


def test_wrong_type_and_shape_are_named(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    weights = random_weights()
    weights["model.norm.weight"] = np.ones(63, np.float32)
    write_safetensors(path / "model.safetensors", weights)
    text = complaint(path)
    assert "model.norm.weight has the shape [63], expected [64]" in text
    data = (write_hf(path) / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data.replace(b'{"dtype": "F32"', b'{"dtype": "I32"', 1))
    assert "model.embed_tokens.weight has the type I32" in complaint(path)


def outcome(path: Path) -> str:
    """What find_model says against a model; empty if it takes it. Another exception than ModelError fails the test."""
    try:
        find_model(str(path))
    except ModelError as error:
        return str(error) or "nothing"
    return ""


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]),
    changes=st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=6)), min_size=1, max_size=3),
)
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str, changes: list[tuple[int, bytes]]) -> None:
    path = tmp_path / "m"
    if not path.exists():
        write_hf(path)
    file = path / name
    good = file.read_bytes()
    data = bytearray(good)
    for at, new in changes:
        data[at % len(data) : at % len(data) + len(new)] = new
    file.write_bytes(data)
    said = outcome(path)
    file.write_bytes(good)
    assert "\n" not in said
    assert not said or str(path) in said
