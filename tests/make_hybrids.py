"""The parts of tests/make_models.py for Qwen3.5 hybrids and for heads that draft, in Hugging Face's names and in GGUF's.

`gguf_weights` does what llama.cpp's converter does to a Qwen3.5 folder: +1 on norms, -exp(A_log), value heads tiled, the head as
one more layer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

GGUF_ATTENTION = {  # of every architecture; the norm before the MLP has a name of its own in each
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_PARTS = GGUF_ATTENTION | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_HEAD = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


@dataclass(frozen=True)
class Size:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers: all but each `interval`-th."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    kernel: int = 4
    interval: int = 4


def make_hybrid(found: dict[str, np.ndarray], layers: int, size: Size, shape: Recurrent, seed: int) -> None:
    """Turns the weights of a plain model into those of a Qwen3.5: gated attention, recurrent layers, norms less 1."""
    rng = np.random.default_rng(seed + 1000)
    for i in range(layers):
        prefix = f"model.layers.{i}."
        for name in [name for name in found if name.startswith(prefix + "self_attn.")]:
            del found[name]
        made = _attention(rng, size) if (i + 1) % shape.interval == 0 else _recurrent(rng, size.hidden, shape)
        found |= {prefix + name: array for name, array in made.items()}
    for name in found:
        if name.endswith("norm.weight") and "_attn." not in name:
            found[name] = found[name] - np.float32(1)


def head_weights(
    trunk: dict[str, np.ndarray], arch: str, size: Size, draft_ids: list[int] | None, seed: int
) -> dict[str, np.ndarray]:
    """The tensors `mtp.*` of a random head for this trunk: nearly all it drafts is wrong."""
    rng = np.random.default_rng(seed + 2000)
    hybrid = arch == "qwen35"
    hidden, inner = size.hidden, size.intermediate
    found = {"mtp.fc.weight": _linear(rng, hidden, 2 * hidden)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = _around(rng, 0 if hybrid else 1, hidden)
    layer = {
        "input_layernorm.weight": _around(rng, 0 if hybrid else 1, hidden),
        "post_attention_layernorm.weight": _around(rng, 0 if hybrid else 1, hidden),
        "mlp.gate_proj.weight": _linear(rng, inner, hidden),
        "mlp.up_proj.weight": _linear(rng, inner, hidden),
        "mlp.down_proj.weight": _linear(rng, hidden, inner),
    }
    if hybrid:
        layer |= _attention(rng, size)
    else:  # as a layer of the trunk has them, biases and norms of q and k included
        first = {name.removeprefix("model.layers.0."): array for name, array in trunk.items()}
        own = {name: array for name, array in first.items() if name.startswith("self_attn.") or name.endswith(".bias")}
        layer |= {n: _linear(rng, *a.shape) if a.ndim == 2 else rng.permutation(a) for n, a in own.items() if "layers" not in n}
    found |= {f"mtp.layers.0.{name}": array for name, array in layer.items()}
    if draft_ids is not None:
        found["mtp.draft_token_ids"] = np.array(draft_ids, np.int32)
    return found


def hf_config(options: dict[str, Any]) -> dict[str, Any]:
    """What config.json of a Qwen3.5 says beside the rest. A head is not mentioned: its tensors say it."""
    shape = Recurrent(**_own(options))
    return {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.key_dim,
        "linear_value_head_dim": shape.value_dim,
        "linear_conv_kernel_dim": shape.kernel,
        "full_attention_interval": shape.interval,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }


def gguf_metadata(options: dict[str, Any]) -> dict[str, Any]:
    """The keys of arch qwen35 beside those of every model."""
    shape = Recurrent(**_own(options))
    half = options.get("head_dim", 16) // 2
    return {
        "qwen35.block_count": options.get("layers", 2) + int(options.get("mtp", False)),
        "qwen35.nextn_predict_layers": 1 if options.get("mtp", False) else None,
        "qwen35.ssm.conv_kernel": shape.kernel,
        "qwen35.ssm.state_size": shape.key_dim,
        "qwen35.ssm.group_count": shape.key_heads,
        "qwen35.ssm.time_step_rank": shape.value_heads,
        "qwen35.ssm.inner_size": shape.value_heads * shape.value_dim,
        "qwen35.full_attention_interval": shape.interval,
        "qwen35.rope.dimension_count": half,
        "qwen35.rope.dimension_sections": [2, 1, 1, 0],
        "tokenizer.ggml.pre": "qwen35",
    }


def gguf_weights(weights: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, np.ndarray]:
    """GGUF name -> array, changed as the converter does."""
    shape, layers = Recurrent(**_own(options)), options.get("layers", 2)
    found = {}
    for name, array in weights.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") or "pre_fc_norm" in name:
            array = array + np.float32(1)
        found[_gguf_name(name, layers)] = _converted(name, array, shape)
    return found


def _converted(name: str, array: np.ndarray, shape: Recurrent) -> np.ndarray:
    keys = 2 * shape.key_heads * shape.key_dim
    match name.rpartition("linear_attn.")[2]:
        case "in_proj_qkv.weight":
            return np.concatenate([array[:keys], _tiled(array[keys:], shape)])
        case "conv1d.weight":
            array = array[:, 0]
            return np.concatenate([array[:keys], _tiled(array[keys:], shape)])
        case "in_proj_z.weight" | "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
            return _tiled(array, shape)
        case "A_log":
            return _tiled(-np.exp(array), shape)
        case "out_proj.weight":
            return np.ascontiguousarray(_tiled(array.T, shape).T)
        case _:
            return array


def _tiled(array: np.ndarray, shape: Recurrent) -> np.ndarray:
    """Rows of value heads from grouped by key head to tiled."""
    per = shape.value_heads // shape.key_heads
    return array.reshape(shape.key_heads, per, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _gguf_name(name: str, layers: int) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    if name == "mtp.draft_token_ids":
        return f"blk.{layers}.nextn.draft_token_ids"
    if (stem := name.removesuffix(".weight")) in _GGUF_HEAD:
        return f"blk.{layers}.{_GGUF_HEAD[stem]}.weight"
    layer, part = name.removeprefix("mtp.").removeprefix("model.").removeprefix("layers.").split(".", 1)
    prefix = f"blk.{layers if name.startswith('mtp.') else layer}."
    match part:
        case "linear_attn.A_log":
            return prefix + "ssm_a"
        case "linear_attn.dt_bias":
            return prefix + "ssm_dt.bias"
        case _:
            part, _, ending = part.rpartition(".")
            return f"{prefix}{_GGUF_PARTS[part]}.{ending}"


def _attention(rng: np.random.Generator, size: Size) -> dict[str, np.ndarray]:
    q_rows, kv_rows = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return {
        "self_attn.q_proj.weight": _linear(rng, 2 * q_rows, size.hidden),
        "self_attn.k_proj.weight": _linear(rng, kv_rows, size.hidden),
        "self_attn.v_proj.weight": _linear(rng, kv_rows, size.hidden),
        "self_attn.o_proj.weight": _linear(rng, size.hidden, q_rows) * 2,
        "self_attn.q_norm.weight": _around(rng, 0, size.head_dim),
        "self_attn.k_norm.weight": _around(rng, 0, size.head_dim),
    }


def _recurrent(rng: np.random.Generator, hidden: int, shape: Recurrent) -> dict[str, np.ndarray]:
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": _linear(rng, 2 * keys + values, hidden),
        "linear_attn.in_proj_z.weight": _linear(rng, values, hidden),
        "linear_attn.in_proj_a.weight": _linear(rng, shape.value_heads, hidden),
        "linear_attn.in_proj_b.weight": _linear(rng, shape.value_heads, hidden),
        "linear_attn.conv1d.weight": _linear(rng, 2 * keys + values, 1, shape.kernel) * 2,
        "linear_attn.dt_bias": _around(rng, -1, shape.value_heads),
        "linear_attn.A_log": np.log(rng.uniform(0.05, 2, shape.value_heads)).astype(np.float32),
        "linear_attn.norm.weight": _around(rng, 1, shape.value_dim),
        "linear_attn.out_proj.weight": _linear(rng, hidden, values),
    }


def _own(options: dict[str, Any]) -> dict[str, int]:
    return {name: options[name] for name in Recurrent.__dataclass_fields__ if name in options}


def _linear(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def _around(rng: np.random.Generator, value: float, size: int) -> np.ndarray:
    return (value + 0.2 * rng.standard_normal(size)).astype(np.float32)
