"""Tensors come out of the files with the numbers that were put in."""

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.model import weights as module
from gpu_worker.model.weights import Quantised, Weights, four_bits
from tests.make_models import random_weights, write_gguf, write_hf
from wire.model_files import find_model


def quants(weights: Weights, name: str) -> Quantised:
    """The whole tensor: tiny ones come in one part."""
    ((first, parts),) = weights.quants(name)
    assert first == 0
    return parts


def restored(parts: Quantised) -> np.ndarray:
    value = parts.quants * np.repeat(parts.scale.astype(np.float32), 32, 1)
    return value if parts.minimum is None else value + np.repeat(parts.minimum.astype(np.float32), 32, 1)


def test_rows_of_q_and_k_are_put_back_into_halves(tmp_path):
    gguf_weights = Weights(find_model(str(write_gguf(tmp_path / "m.gguf", "llama"))))
    hf_weights = Weights(find_model(str(write_hf(tmp_path / "hf", "llama"))))
    truth = random_weights("llama")
    for part in ("q", "k", "v"):
        expected = torch.from_numpy(truth[f"model.layers.1.self_attn.{part}_proj.weight"])
        for weights in (gguf_weights, hf_weights):
            assert torch.equal(weights.dense(f"layers.1.{part}", torch.float32), expected)


def test_quants_keep_the_order_of_unpermuted_rows(tmp_path):
    weights = Weights(find_model(str(write_gguf(tmp_path / "m.gguf", "llama", quant="Q4_1"))))
    for part in ("q", "gate"):
        dense = weights.dense(f"layers.0.{part}", torch.float32).numpy()
        assert np.allclose(restored(quants(weights, f"layers.0.{part}")), dense, atol=1e-6)


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0"])
def test_quants_and_scales_give_what_gguf_dequantises(tmp_path, quant):
    weights = Weights(find_model(str(write_gguf(tmp_path / "m.gguf", "qwen2", quant=quant))))
    dense = weights.dense("layers.0.up", torch.float32).numpy()
    assert np.allclose(restored(quants(weights, "layers.0.up")), dense, atol=1e-3 * np.abs(dense).max())
    assert (weights.is_four_bit("layers.0.up"), weights.is_eight_bit("layers.0.up")) == (quant != "Q8_0", quant == "Q8_0")


def test_q4_k_gives_what_gguf_dequantises(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (8, 2, 144), dtype=np.uint8)
    blocks[:, :, :4] = rng.uniform(1e-4, 1e-2, (8, 2, 2)).astype(np.float16).view(np.uint8).reshape(8, 2, 4)
    raw = blocks.reshape(8, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    got = restored(module._q4_k(raw))
    assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_dense_types_of_a_sharded_folder(tmp_path, dtype):
    weights = Weights(find_model(str(write_hf(tmp_path / "hf", "qwen3", dtype=dtype, shards=3, tied=False))))
    truth = random_weights("qwen3", tied=False)
    exact = torch.from_numpy(truth["lm_head.weight"])
    assert (weights.dense("head", torch.float32) - exact).abs().max() <= {"F32": 0, "F16": 0.01, "BF16": 0.05}[dtype]
    assert torch.equal(weights.dense("layers.0.q_norm", torch.float32), weights.dense("layers.0.q_norm", torch.float32))


def test_a_large_tensor_is_converted_in_parts(tmp_path, monkeypatch):
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "llama", quant="Q8_0")))
    whole, whole_quants = Weights(files).dense("layers.0.q", torch.bfloat16), quants(Weights(files), "layers.0.q").quants
    monkeypatch.setattr(module, "PART_VALUES", 64 * 5)
    parts = list(Weights(files).parts("layers.0.q", torch.bfloat16))
    assert [first for first, _ in parts] == list(range(0, 64, 5))
    assert torch.equal(torch.cat([rows for _, rows in parts]), whole)
    assert np.array_equal(np.concatenate([p.quants for _, p in Weights(files).quants("layers.0.q")]), whole_quants)


def test_four_bits_are_the_nearest_of_16_even_steps() -> None:
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    values[1, :32] = 0.25  # a group without a spread
    form = four_bits(values)
    back = form.quants.reshape(3, 2, 32) * form.scale[..., None].astype(np.float32) + form.minimum[..., None].astype(np.float32)
    step = (values.reshape(3, 2, 32).max(-1) - values.reshape(3, 2, 32).min(-1)) / 15
    error = np.abs(back - values.reshape(3, 2, 32)).max(-1)
    assert (error <= 0.5 * step + 0.005).all() and form.quants.max() == 15 and error[1, 0] == 0
