"""Reads a Hugging Face folder: config.json into a ModelSpec, end tokens, chat template, tokenizer.json. No pickle, no torch.

Defaults of keys that a config.json leaves out are those of transformers' configuration classes, because its writer leaves
out what equals them.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from wire.model_spec import (
    MAX_LAYERS,
    DeltaSpec,
    ModelError,
    ModelSpec,
    RopeSpec,
    TensorInfo,
    check_spec,
    one_line,
    scaled_context,
)
from wire.mtp_head import hf_head
from wire.safetensors_file import read_safetensors_folder
from wire.tokenizer_data import TokenizerData, json_tokenizer

# architecture in config.json -> family, and the defaults in which the classes differ
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
}
_MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_MODEL_TYPES |= {"qwen3_5": "qwen35", "qwen3_5_text": "qwen35"}
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen35": 32768}
_DEFAULT_HEAD_DIM = {"qwen3": 128, "qwen35": 256}


class HfFolder(Struct):
    """What the folder says. `special_ids`: text -> id of the tokenizer's special tokens."""

    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    tokenizer: TokenizerData
    special_ids: dict[str, int]
    eos_ids: set[int]
    chat_template: str | None
    bos_token: str
    eos_token: str


class JsonFile:
    """A JSON object on disk whose values are asked for with their types; `default=...` means that the key is required."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self.values.get(key)
        if value is None:  # null means absent everywhere in these files
            if default is ...:
                raise ModelError(f"{self.path}: no {key}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.path}: {key} is {one_line(repr(value))}")
        if isinstance(value, int) and abs(value) >= 2**53:
            raise ModelError(f"{self.path}: {key} is out of range")
        return value

    def real(self, key: str, default: Any = ...) -> float:
        return float(self.get(key, (int, float), default))

    def part(self, key: str) -> "JsonFile":
        """The object under `key` (empty if there is none)."""
        return JsonFile(self.path, self.get(key, dict, {}))


def read_hf_folder(path: Path) -> HfFolder:
    """The folder's metadata; ModelError for what cannot be served."""
    config = _text_part(_read_json(path / "config.json", required=True))
    spec = hf_spec(config)
    tensors = _text_tensors(read_safetensors_folder(path))
    spec = check_spec(msgspec.structs.replace(spec, mtp=hf_head(tensors, str(path))), str(path))
    settings = _read_json(path / "tokenizer_config.json")
    generation = _read_json(path / "generation_config.json")
    tokenizer, special = _tokenizer(path, settings)
    bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    eos_ids = {*_ids(config, "eos_token_id", spec.vocab), *_ids(generation, "eos_token_id", spec.vocab)}
    if special.get(eos, spec.vocab) < spec.vocab:
        eos_ids.add(special[eos])
    return HfFolder(
        spec=spec,
        tensors=tensors,
        tokenizer=tokenizer,
        special_ids=special,
        eos_ids=eos_ids,
        chat_template=_chat_template(path, settings),
        bos_token=bos,
        eos_token=eos,
    )


def hf_spec(config: JsonFile) -> ModelSpec:
    """The model's shape from config.json, in its old and new spellings; whether it has a head is not said there."""
    family = _family(config)
    if config.get("quantization_config", dict, None):
        raise ModelError(f"{config.path}: quantised weights are not supported; take the original folder or a GGUF file")
    if (act := config.get("hidden_act", str, "silu")) != "silu":
        raise ModelError(f"{config.path}: hidden_act {act!r} is not supported, only 'silu'")
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    layers = config.get("num_hidden_layers", int)
    context = config.get("max_position_embeddings", int, _DEFAULT_CONTEXT[family])
    hybrid = family == "qwen35"
    if hybrid:
        _refuse_other_gates(config)
    else:
        _refuse_sliding_window(config, family, layers, context)
    rope = _rope(config, context)
    bias = family in ("llama", "qwen3") and config.get("attention_bias", bool, False)
    head_dim = config.get("head_dim", int, _DEFAULT_HEAD_DIM.get(family, hidden // max(heads, 1)))
    spec = ModelSpec(
        arch="llama" if family == "mistral" else family,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", int, 4 if hybrid else heads),
        head_dim=head_dim,
        intermediate=config.get("intermediate_size", int),
        vocab=config.get("vocab_size", int),
        rms_eps=config.real("rms_norm_eps", 1e-6),
        rope=rope,
        tied=config.get("tie_word_embeddings", bool, False),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        qk_norm=family in ("qwen3", "qwen35"),
        mlp_bias=family == "llama" and config.get("mlp_bias", bool, False),
        max_context=scaled_context(context, rope),
        rotary_dim=_rotary_dim(config, head_dim, hybrid),
        attn_gate=hybrid,
        norm_offset=1.0 if hybrid else 0.0,
        delta=_delta(config, layers) if hybrid else None,
    )
    return check_spec(spec, str(config.path))


def _family(config: JsonFile) -> str:
    names = config.get("architectures", list, [])
    for name in names:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    model_type = config.get("model_type", str, "")
    if not names and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    found = ", ".join(map(str, names)) or model_type or "none"
    raise ModelError(f"{config.path}: unknown architecture {one_line(found)} (known: {', '.join(_ARCHITECTURES)})")


def _text_part(config: JsonFile) -> JsonFile:
    """The settings of the language model: of one that also sees, those in `text_config`, with what only the whole can say."""
    text = config.part("text_config").values
    whole = ("architectures", "tie_word_embeddings", "quantization_config", "eos_token_id")
    if not text or _family(config) != "qwen35":
        return config
    return JsonFile(config.path, text | {key: config.values[key] for key in whole if config.values.get(key) is not None})


def _text_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The language model's tensors by the names that they have when it stands alone."""
    return {
        name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.visual.")
    }


def _refuse_other_gates(config: JsonFile) -> None:
    """Qwen3.5's switches that have one value in all its models."""
    for key, kind, wanted in (
        ("attention_bias", bool, False),
        ("attn_output_gate", bool, True),
        ("output_gate_type", str, "swish"),
    ):
        if (found := config.get(key, kind, wanted)) != wanted:
            raise ModelError(f"{config.path}: {key} {one_line(repr(found))} is not supported, only {wanted!r}")


def _delta(config: JsonFile, num_layers: int) -> DeltaSpec:
    """The recurrent layers: by `layer_types`, or all but each `full_attention_interval`-th."""
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{config.path}: {num_layers} layers are more than {MAX_LAYERS}")
    kinds = config.get("layer_types", list, None)
    if kinds is None:
        every = config.get("full_attention_interval", int, 4)
        if every < 1:
            raise ModelError(f"{config.path}: full_attention_interval is {every}")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise ModelError(f"{config.path}: layer type {one_line(repr(kind))} is not supported")
    if len(kinds) != num_layers:
        raise ModelError(f"{config.path}: {len(kinds)} layer_types for {num_layers} layers")
    return DeltaSpec(
        layers=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        key_heads=config.get("linear_num_key_heads", int, 16),
        value_heads=config.get("linear_num_value_heads", int, 32),
        key_dim=config.get("linear_key_head_dim", int, 128),
        value_dim=config.get("linear_value_head_dim", int, 128),
        kernel=config.get("linear_conv_kernel_dim", int, 4),
    )


def _refuse_sliding_window(config: JsonFile, family: str, layers: int, context: int) -> None:
    """A window that some layer really has, and that is shorter than the context, would change the text."""
    absent = 0 if "sliding_window" in config.values else 4096  # null says that there is none, no key means the default
    window = config.get("sliding_window", int, absent)
    if family == "llama" or (family != "mistral" and not config.get("use_sliding_window", bool, False)):
        window = 0
    kinds = config.get("layer_types", list, None)
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"{config.path}: layer type {one_line(repr(kind))} is not supported")
        applies = "sliding_attention" in kinds
    else:
        applies = family == "mistral" or config.get("max_window_layers", int, 28) < layers
    if applies and 0 < window < context:
        raise ModelError(f"{config.path}: a sliding window of {window} tokens is not supported")


def _rope(config: JsonFile, context: int) -> RopeSpec:
    """`rope_parameters` (new) or `rope_theta` with `rope_scaling` (old); the kinds of transformers' modeling_rope_utils."""
    rope = _rope_part(config)
    theta = rope.real("rope_theta", config.real("rope_theta", 10000.0))
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    original = rope.get("original_max_position_embeddings", int, config.get("original_max_position_embeddings", int, context))
    match kind:
        case "default":
            return RopeSpec(theta=theta)
        case "linear":
            return RopeSpec(theta=theta, kind="linear", factor=rope.real("factor"))
        case "llama3":
            return RopeSpec(
                theta=theta,
                kind="llama3",
                factor=rope.real("factor"),
                low_freq_factor=rope.real("low_freq_factor"),
                high_freq_factor=rope.real("high_freq_factor"),
                original_context=original,
            )
        case "yarn":
            factor = rope.real("factor", context / max(original, 1))
            return RopeSpec(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_context=original,
                beta_fast=rope.real("beta_fast", 32.0) or 32.0,
                beta_slow=rope.real("beta_slow", 1.0) or 1.0,
                attention_factor=_attention_factor(rope, factor),
                truncate=rope.get("truncate", bool, True),
            )
        case _:
            raise ModelError(f"{config.path}: unknown rope scaling {one_line(repr(kind))} (known: default, linear, llama3, yarn)")


def _rope_part(config: JsonFile) -> JsonFile:
    new = config.part("rope_parameters")
    return new if new.values else config.part("rope_scaling")


def _rotary_dim(config: JsonFile, head_dim: int, hybrid: bool) -> int:
    """How many dimensions of a head are rotated; 0: all. Only Qwen3.5 leaves some out (a quarter is rotated)."""
    default = config.real("partial_rotary_factor", 0.25 if hybrid else 1.0)
    partial = _rope_part(config).real("partial_rotary_factor", default)
    if partial == 1.0:
        return 0
    if not hybrid or not 0 < partial < 1 or int(head_dim * partial) < 2:
        raise ModelError(f"{config.path}: partial_rotary_factor {partial} is not supported")
    return int(head_dim * partial)


def _attention_factor(rope: JsonFile, factor: float) -> float | None:
    """Yarn's scale of cos and sin if the file states it, directly or as a ratio of two mscales; None: from the factor."""
    if rope.values.get("attention_factor") is not None:
        return rope.real("attention_factor")
    over, under = rope.real("mscale", 0.0), rope.real("mscale_all_dim", 0.0)
    if not (over and under) or factor <= 1:
        return None
    return (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)


def _tokenizer(path: Path, settings: JsonFile) -> tuple[TokenizerData, dict[str, int]]:
    file = path / "tokenizer.json"
    if not file.is_file():
        other = "; tokenizer.model is not supported" if (path / "tokenizer.model").is_file() else ""
        raise ModelError(f"{path}: no tokenizer.json{other}")
    add_bos, add_eos = settings.get("add_bos_token", bool, None), settings.get("add_eos_token", bool, None)
    bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    return json_tokenizer(str(file), _read(file), bos=bos, eos=eos, add_bos=add_bos, add_eos=add_eos)


def _chat_template(path: Path, settings: JsonFile) -> str | None:
    """The template in a file of its own, else the one in tokenizer_config.json (of a list, the one named default)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    template = settings.get("chat_template", (str, list), None)
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is None:
        template = _read_json(path / "chat_template.json").get("chat_template", str, None)
    return template if isinstance(template, str) else None


def _token_text(settings: JsonFile, key: str) -> str:
    """A token in tokenizer_config.json: a string, or an object with its `content`."""
    value = settings.get(key, (str, dict), "")
    if isinstance(value, dict):
        value = value.get("content", "")
    return value if isinstance(value, str) else ""


def _ids(file: JsonFile, key: str, vocab: int) -> list[int]:
    value = file.get(key, (int, list), [])
    ids = value if isinstance(value, list) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab:
            raise ModelError(f"{file.path}: {key} {one_line(repr(i))} is no id of the {vocab} tokens")
    return ids


def _read_json(path: Path, required: bool = False) -> JsonFile:
    if not path.is_file():
        if not required:
            return JsonFile(path, {})
        inside = sorted(path.parent.glob("*.gguf"))
        hint = f" (for {inside[0].name}, name that file)" if inside else ""
        raise ModelError(f"{path.parent}: no {path.name}{hint}")
    try:
        values = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: no valid JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: no JSON object")
    return JsonFile(path, values)


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
