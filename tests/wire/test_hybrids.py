"""Qwen3.5 in both formats: the shape that is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.make_models import write_gguf, write_hf, write_safetensors
from wire.model_files import ModelError, ModelFiles, find_model
from wire.model_spec import DeltaSpec, MtpSpec, file_shape, tensor_shapes


def complaint(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(str(path))
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def check_shapes(files: ModelFiles) -> None:
    """Every tensor is used, and has the shape that its uniform name promises."""
    assert set(files.names.values()) == set(files.tensors)
    for uniform, shape in tensor_shapes(files.spec).items():
        assert files.tensors[files.names[uniform]].shape == file_shape(files.spec, uniform, files.naming(uniform), shape)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("value_heads", [2, 6])
def test_both_formats_describe_the_same_hybrid(tmp_path: Path, tied: bool, mtp: bool, value_heads: int) -> None:
    options: dict[str, Any] = {"layers": 4, "tied": tied, "mtp": mtp, "value_heads": value_heads, "value_dim": 32}
    hf = find_model(str(write_hf(tmp_path / "m", "qwen35", **options)))
    gguf = find_model(str(write_gguf(tmp_path / "m.gguf", "qwen35", **options)))
    spec = hf.spec
    assert spec.delta == DeltaSpec((0, 1, 2), key_heads=2, value_heads=value_heads, key_dim=16, value_dim=32, kernel=4)
    assert (spec.arch, spec.num_layers, spec.attention_layers, spec.kv_layers) == ("qwen35", 4, (3,), 1 + mtp)
    assert (spec.rotary_dim, spec.attn_gate, spec.qk_norm, spec.tied, spec.norm_offset) == (8, True, True, tied, 1.0)
    assert spec.mtp == (MtpSpec(96) if mtp else None)
    assert gguf.spec.norm_offset == 0.0
    same = {"norm_offset": 0.0, "rms_eps": 0.0}
    assert msgspec.structs.replace(gguf.spec, **same) == msgspec.structs.replace(spec, **same)
    check_shapes(hf)
    check_shapes(gguf)
    assert hf.eos_token_ids == gguf.eos_token_ids


def test_layers_by_interval_and_by_list(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "a", "qwen35", layers=6, interval=3)
    assert find_model(str(path)).spec.attention_layers == (2, 5)
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    listed = write_hf(tmp_path / "b", "qwen35", layers=6, interval=3, config={"layer_types": kinds, "full_attention_interval": 2})
    assert find_model(str(listed)).spec.attention_layers == (2, 5)
    default = write_hf(tmp_path / "c", "qwen35", layers=4, config={"full_attention_interval": None})
    assert find_model(str(default)).spec.attention_layers == (3,)
    gguf = write_gguf(tmp_path / "m.gguf", "qwen35", layers=6, interval=3)
    assert find_model(str(gguf)).spec.attention_layers == (2, 5)


@pytest.mark.parametrize("nested", [True, False])
def test_the_text_part_of_a_model_that_sees(tmp_path: Path, nested: bool) -> None:
    plain = write_hf(tmp_path / "plain", "qwen35", layers=4, mtp=True)
    path = write_hf(tmp_path / "seeing", "qwen35", layers=4, mtp=True)
    text = json.loads((path / "config.json").read_text())
    del text["architectures"], text["tie_word_embeddings"], text["eos_token_id"]
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "eos_token_id": 7,
        "vision_config": {"depth": 27},
    }
    (path / "config.json").write_text(json.dumps(whole | ({"text_config": text} if nested else text)))
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    renamed = {name.replace("model.", "model.language_model.", 1): entry for name, entry in header.items()}
    renamed["model.visual.patch_embed.proj.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    new = json.dumps(renamed).encode()
    (path / "model.safetensors").write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
    files = find_model(str(path))
    assert files.spec == find_model(str(plain)).spec
    assert 7 in files.eos_token_ids
    check_shapes(files)


def test_what_a_config_leaves_out(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "linear_key_head_dim", "linear_value_head_dim"))
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}
    sizes: dict[str, Any] = {"kv_heads": 4, "head_dim": 256, "key_dim": 128, "value_dim": 128}
    path = write_hf(tmp_path / "m", "qwen35", layers=4, config=left_out | rope, **sizes)
    spec = find_model(str(path)).spec
    assert (spec.num_kv_heads, spec.head_dim, spec.rotary_dim, spec.rope.theta) == (4, 256, 64, 1e7)
    assert spec.delta is not None
    assert (spec.delta.key_dim, spec.delta.value_dim) == (128, 128)


def test_all_dimensions_rotated(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert find_model(str(write_hf(tmp_path / "m", "qwen35", layers=4, config={"rope_parameters": rope}))).spec.rotary_dim == 0
    whole = {"qwen35.rope.dimension_count": 16}
    assert find_model(str(write_gguf(tmp_path / "m.gguf", "qwen35", layers=4, metadata=whole))).spec.rotary_dim == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "4 of 4 layers are recurrent"),
        ({"layer_types": ["full_attention"] * 4}, "0 of 4 layers are recurrent"),
        ({"layer_types": ["linear_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"full_attention_interval": 2}, "missing tensor model.layers.1.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 10**9}, "more than 4096"),
        ({"linear_num_value_heads": 3}, "3 value heads are no multiple of 2 key heads"),
        ({"linear_num_key_heads": 0}, "key_heads of the recurrent layers is 0"),
        ({"linear_conv_kernel_dim": 1}, "convolution over 1"),
        ({"linear_conv_kernel_dim": 3}, "[128, 1, 4], expected [128, 1, 3]"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "partial_rotary_factor 0.01"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "3 rotated dimensions of a head of 16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "Qwen3_5MoeForCausalLM"),
    ],
)
def test_folders_that_cannot_be_served_are_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in complaint(write_hf(tmp_path / "m", "qwen35", layers=4, config=config))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"qwen35.ssm.conv_kernel": None}, "no metadata qwen35.ssm.conv_kernel"),
        ({"qwen35.ssm.time_step_rank": 0}, "ssm.time_step_rank 0"),
        ({"qwen35.ssm.inner_size": 65}, "ssm.inner_size 65"),
        ({"qwen35.ssm.group_count": 3}, "no multiple of 3 key heads"),
        ({"qwen35.ssm.state_size": 32}, "expected [192, 64]"),
        ({"qwen35.full_attention_interval": 2}, "missing tensor blk.1.attn_q.weight"),
        ({"qwen35.nextn_predict_layers": 2}, "nextn_predict_layers is 2"),
        ({"qwen35.nextn_predict_layers": None}, "missing tensor blk.4.attn_qkv.weight"),
        ({"qwen35.block_count": 4}, "3 of 3 layers are recurrent"),
        ({"qwen35.rope.dimension_count": 7}, "7 rotated dimensions"),
        ({"qwen35.rope.dimension_count": 32}, "32 rotated dimensions"),
        ({"qwen35.expert_count": 8}, "expert_count"),
    ],
)
def test_gguf_files_that_cannot_be_served_are_named(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    assert words in complaint(write_gguf(tmp_path / "m.gguf", "qwen35", layers=4, mtp=True, metadata=metadata))


def test_a_gguf_file_may_lack_its_head_or_hold_copies_for_it(tmp_path: Path) -> None:
    without = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    assert find_model(str(write_gguf(tmp_path / "a.gguf", "qwen35", layers=4, metadata=without))).spec.mtp is None
    copies = {"blk.4.nextn.embed_tokens.weight": "Q8_0", "blk.4.nextn.shared_head_head.weight": "Q8_0"}
    assert find_model(str(write_gguf(tmp_path / "b.gguf", "qwen35", layers=4, mtp=True, extra=copies))).spec.mtp == MtpSpec(96)
    drop = ("blk.4.nextn.hnorm.weight",)
    assert "blk.4.nextn.hnorm" in complaint(write_gguf(tmp_path / "c.gguf", "qwen35", layers=4, mtp=True, drop=drop))


def test_a_tensor_that_nobody_reads_is_no_silent_loss(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", "qwen35", layers=4, shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.linear_attn.conv1d.bias"] = "more.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(path / "more.safetensors", {"model.layers.0.linear_attn.conv1d.bias": np.zeros(3, np.float32)})
    assert "conv1d.bias" in complaint(path)
