"""Tensors of hybrids and heads come out of both formats with the numbers that were put in, in one order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.model import weights as module
from gpu_worker.model.weights import Weights
from tests.make_models import random_weights, write_gguf, write_hf, write_safetensors
from tests.model.test_weights import quants, restored
from wire.model_files import check, find_model, with_head
from wire.model_spec import tensor_shapes

HEADS: list[dict[str, Any]] = [
    {"value_heads": 2},
    {"value_heads": 4},
    {"key_heads": 2, "value_heads": 6, "key_dim": 8, "value_dim": 32},
    {"key_heads": 3, "value_heads": 6},
]
HYBRID: dict[str, Any] = {"layers": 4, "mtp": True, "tied": False}


def expected(truth: dict[str, np.ndarray], heads: int = 4, head_dim: int = 16) -> dict[str, np.ndarray]:
    """Uniform name -> numbers, written down from what transformers' Qwen3.5 does with a folder's tensors."""
    found = {"embed": truth["model.embed_tokens.weight"], "head": truth["lm_head.weight"], "norm": 1 + truth["model.norm.weight"]}
    layers = {f"layers.{i}": f"model.layers.{i}." for i in range(4)} | {"mtp.layer": "mtp.layers.0."}
    for uniform, prefix in layers.items():
        layer = {name.removeprefix(prefix): array for name, array in truth.items() if name.startswith(prefix)}
        parts = {
            "attn_norm": 1 + layer["input_layernorm.weight"],
            "mlp_norm": 1 + layer["post_attention_layernorm.weight"],
            "gate": layer["mlp.gate_proj.weight"],
            "up": layer["mlp.up_proj.weight"],
            "down": layer["mlp.down_proj.weight"],
        }
        if "linear_attn.A_log" in layer:
            own = {name.removeprefix("linear_attn."): array for name, array in layer.items()}
            parts |= {
                "in_qkv": own["in_proj_qkv.weight"],
                "in_z": own["in_proj_z.weight"],
                "in_a": own["in_proj_a.weight"],
                "in_b": own["in_proj_b.weight"],
                "conv": own["conv1d.weight"][:, 0],
                "dt_bias": own["dt_bias"],
                "decay": -np.exp(own["A_log"]),
                "state_norm": own["norm.weight"],
                "out": own["out_proj.weight"],
            }
        else:
            own = {name.removeprefix("self_attn."): array for name, array in layer.items()}
            both = own["q_proj.weight"].reshape(heads, 2, head_dim, -1)
            parts |= {
                "q": both[:, 0].reshape(heads * head_dim, -1),
                "q_gate": both[:, 1].reshape(heads * head_dim, -1),
                "k": own["k_proj.weight"],
                "v": own["v_proj.weight"],
                "o": own["o_proj.weight"],
                "q_norm": 1 + own["q_norm.weight"],
                "k_norm": 1 + own["k_norm.weight"],
            }
        found |= {f"{uniform}.{name}": array for name, array in parts.items()}
    return found | {
        "mtp.fc": truth["mtp.fc.weight"],
        "mtp.embed_norm": 1 + truth["mtp.pre_fc_norm_embedding.weight"],
        "mtp.hidden_norm": 1 + truth["mtp.pre_fc_norm_hidden.weight"],
        "mtp.norm": 1 + truth["mtp.norm.weight"],
    }


@pytest.mark.parametrize("heads", HEADS)
def test_both_formats_give_the_numbers_of_the_folder(tmp_path: Path, heads: dict[str, Any]) -> None:
    wanted = expected(random_weights("qwen35", **HYBRID, **heads))
    for path in (
        write_hf(tmp_path / "hf", "qwen35", **HYBRID, **heads),
        write_gguf(tmp_path / "m.gguf", "qwen35", **HYBRID, **heads),
    ):
        files = find_model(str(path))
        weights = Weights(files)
        assert set(tensor_shapes(files.spec)) == set(wanted)
        for name, array in wanted.items():
            got = weights.dense(name, torch.float32)
            assert got.shape == array.shape == weights.shape(name)
            # -exp(A_log) is torch's here and numpy's there; all else is exact
            assert torch.allclose(got, torch.from_numpy(array), rtol=1e-6 if name.endswith("decay") else 0, atol=0), name


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_quantised_value_heads_move_with_their_groups(tmp_path: Path, heads: dict[str, Any], quant: str) -> None:
    sizes = {"layers": 4, "hidden": 96} | heads
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "qwen35", quant=quant, **sizes)))
    weights, truth = Weights(files), random_weights("qwen35", **sizes)
    tolerance = {"Q4_0": 0.13, "Q8_0": 0.01}[quant]
    for name, wanted in {
        "out": truth["model.layers.1.linear_attn.out_proj.weight"],
        "in_qkv": truth["model.layers.1.linear_attn.in_proj_qkv.weight"],
        "in_z": truth["model.layers.1.linear_attn.in_proj_z.weight"],
    }.items():
        dense = weights.dense(f"layers.1.{name}", torch.float32).numpy()
        assert np.abs(dense - wanted).max() < tolerance * np.abs(wanted).max()
        small = weights.is_four_bit(f"layers.1.{name}") or weights.is_eight_bit(f"layers.1.{name}")
        moved = sizes["value_heads"] != sizes.get("key_heads", 2)
        assert small == (name != "out" or not moved or sizes.get("value_dim", 16) % 32 == 0)
        if small:
            parts = quants(weights, f"layers.1.{name}")
            assert np.allclose(restored(parts), dense, atol=1e-3 * np.abs(dense).max())


def test_queries_and_gates_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_model(str(write_hf(tmp_path / "m", "qwen35", dtype="BF16", **HYBRID)))
    whole = {name: Weights(files).dense(f"layers.3.{name}", torch.bfloat16) for name in ("q", "q_gate", "attn_norm")}
    monkeypatch.setattr(module, "PART_VALUES", 64 * 5)
    for name, tensor in whole.items():
        parts = list(Weights(files).parts(f"layers.3.{name}", torch.bfloat16))
        assert torch.equal(torch.cat([rows for _, rows in parts]), tensor)
        assert [first for first, _ in parts][:2] == [0, 5][: len(parts)]


def test_an_offset_is_added_before_rounding(tmp_path: Path) -> None:
    weights = Weights(find_model(str(write_hf(tmp_path / "m", "qwen35", dtype="F32", **HYBRID))))
    exact = weights.dense("norm", torch.float32)
    assert torch.equal(weights.dense("norm", torch.bfloat16), exact.to(torch.bfloat16))


def test_a_head_in_its_own_file_keeps_its_own_row_order(tmp_path: Path) -> None:
    truth = random_weights("llama", mtp=True, draft_ids=[7, 2, 280])
    head = {name: array for name, array in truth.items() if name.startswith("mtp.")}
    write_safetensors(tmp_path / "mtp.safetensors", head)
    files = with_head(find_model(str(write_gguf(tmp_path / "m.gguf", "llama"))), tmp_path / "mtp.safetensors")
    check(files)
    weights = Weights(files)
    for name in ("q", "k", "o"):
        own = torch.from_numpy(truth[f"mtp.layers.0.self_attn.{name}_proj.weight"])
        assert torch.equal(weights.dense(f"mtp.layer.{name}", torch.float32), own)
        trunk = torch.from_numpy(truth[f"model.layers.0.self_attn.{name}_proj.weight"])
        assert torch.equal(weights.dense(f"layers.0.{name}", torch.float32), trunk)
    assert torch.equal(weights.dense("mtp.norm", torch.float32), torch.from_numpy(truth["mtp.norm.weight"]))
    assert weights.dense("mtp.draft_ids", torch.int64).tolist() == [7, 2, 280]
    assert weights.has("mtp.draft_ids") and not weights.has("mtp.layer.q_norm")
