"""Writes tiny random models for tests: Hugging Face folders and GGUF files, with a byte-level tokenizer and a chat template.

The same options and seed give the same model in both formats (GGUF's rows of q and k are permuted as its converter does).
Arch "qwen35" is a hybrid, `mtp=True` adds a head: both are in tests/make_hybrids.py.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests import make_hybrids

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_MERGES = "Ġ t|h e|Ġ a|i n|r e|Ġt he|o n|e r|Ġ s|a t|Ġ w|o u|n d|Ġ b|i s|e n|Ġ o|Ġ c|l l|Ġ f|in g|Ġa nd|Ġ of|o f|Ġ Ġ|Ċ Ċ|Ã ©"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ARCHITECTURES |= {"qwen35": "Qwen3_5ForCausalLM"}
_SIZE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "tied": True}


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable Latin-1 characters stand for themselves, the rest moves beyond 255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens by id, merges) of a byte-level vocabulary: three special tokens, 256 bytes, a few merges."""
    tokens = [*SPECIALS, *byte_letters()]
    merges = []
    for merge in _MERGES.split("|"):
        left, right = merge.split(" ")
        if left in tokens and right in tokens and left + right not in tokens:
            merges.append(merge)
            tokens.append(left + right)
    return tokens, merges


VOCAB = len(tiny_vocabulary()[0])


def tokenizer_json(bos: bool = False) -> dict[str, Any]:
    """A tokenizer.json in the manner of SmolLM2; `bos` adds a post-processor that begins each text with <|im_start|>."""
    tokens, merges = tiny_vocabulary()
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": SPECIALS[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {SPECIALS[1]: {"id": SPECIALS[1], "ids": [1], "tokens": [SPECIALS[1]]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **special} for i, text in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": template if bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def random_weights(
    arch: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    vocab: int = VOCAB,
    tied: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    seed: int = 0,
    mtp: bool = False,
    draft_ids: list[int] | None = None,
    **hybrid: int,
) -> dict[str, np.ndarray]:
    """Hugging Face name -> f32 array, scaled so that logits spread. attention_bias means all four for llama and qwen3.

    `mtp` adds a head (which drafts only `draft_ids`, if given); `hybrid` are fields of make_hybrids.Recurrent, for qwen35.
    """
    rng = np.random.default_rng(seed)

    def linear(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def around(value: float, size: int) -> np.ndarray:
        return (value + 0.2 * rng.standard_normal(size)).astype(np.float32)

    found = {"model.embed_tokens.weight": linear(vocab, hidden) * 4, "model.norm.weight": around(1, hidden)}
    if not tied:
        found["lm_head.weight"] = linear(vocab, hidden) * 2
    shapes = {"q": (heads * head_dim, hidden), "k": (kv_heads * head_dim, hidden), "v": (kv_heads * head_dim, hidden)}
    shapes |= {"o": (hidden, heads * head_dim)}
    for i in range(layers):
        layer: dict[str, np.ndarray] = {
            "input_layernorm.weight": around(1, hidden),
            "post_attention_layernorm.weight": around(1, hidden),
        }
        for name, shape in shapes.items():
            layer[f"self_attn.{name}_proj.weight"] = linear(*shape)
            if attention_bias or (arch == "qwen2" and name != "o"):
                layer[f"self_attn.{name}_proj.bias"] = around(0, shape[0])
        if arch == "qwen3":
            layer |= {"self_attn.q_norm.weight": around(1, head_dim), "self_attn.k_norm.weight": around(1, head_dim)}
        for name, shape in {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}.items():
            layer[f"mlp.{name}_proj.weight"] = linear(*shape)
            if mlp_bias:
                layer[f"mlp.{name}_proj.bias"] = around(0, shape[0])
        found |= {f"model.layers.{i}.{name}": array for name, array in layer.items()}
    size = make_hybrids.Size(hidden, heads, kv_heads, head_dim, intermediate)
    if arch == "qwen35":
        make_hybrids.make_hybrid(found, layers, size, make_hybrids.Recurrent(**hybrid), seed)
    if mtp:
        found |= make_hybrids.head_weights(found, arch, size, draft_ids, seed)
    return found


def write_hf(
    path: Path,
    arch: str = "llama",
    *,
    dtype: str = "F32",
    shards: int = 1,
    context: int = 512,
    rope: dict[str, Any] | None = None,
    new_spelling: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    bos: bool = False,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A folder at `path` (made here). `rope` is the rope_scaling object; `config` overrides keys of config.json (None drops one);
    `options` go to `random_weights`."""
    path.mkdir(parents=True, exist_ok=True)
    weights = random_weights(arch, **options)
    size = _SIZE | {"vocab": VOCAB} | options
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": size["hidden"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "head_dim": size["head_dim"],
        "intermediate_size": size["intermediate"],
        "vocab_size": size["vocab"],
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": size["tied"],
        "attention_bias": options.get("attention_bias", False),
        "mlp_bias": options.get("mlp_bias", False),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype" if new_spelling else "torch_dtype": {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[dtype],
    }
    if new_spelling:
        values["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"} | (rope or {})
    else:
        values |= {"rope_theta": 10000.0, "rope_scaling": rope}
    if arch == "qwen35":
        values |= make_hybrids.hf_config(options)
    values |= config or {}
    _write_json(path / "config.json", {key: value for key, value in values.items() if value is not None})
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    _write_json(path / "tokenizer.json", tokenizer_json(bos))
    settings: dict[str, Any] = {
        "bos_token": SPECIALS[1],
        "eos_token": {"content": SPECIALS[2]},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(path / "tokenizer_config.json", settings | (tokenizer_config or {}))
    names = list(weights)
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights, dtype)
        return path
    places = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(path / shard, {name: weights[name] for name in names[i::shards]}, dtype)
        places |= dict.fromkeys(names[i::shards], shard)
    _write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return path


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> None:
    """f32 arrays as one safetensors file of type F32, F16 or BF16; int32 arrays stay so."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, at = [], 0
    for name, array in tensors.items():
        integers = array.dtype == np.int32
        data = array.tobytes() if integers else _as_bytes(array, dtype)
        header[name] = {"dtype": "I32" if integers else dtype, "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    quant: str = "F32",
    context: int = 512,
    rope_freqs: list[float] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, str] | None = None,
    **options: Any,
) -> Path:
    """A GGUF file. Matrices are stored as `quant` (what the gguf package can quantise), everything else as F32.

    `metadata` adds or overrides keys (None drops one), `drop` leaves tensors out by their GGUF names, `extra` adds zeros of
    96 x 256 of a type; `options` go to `random_weights`.
    """
    weights = random_weights(arch, **options)
    size = _SIZE | options
    tokens, merges = tiny_vocabulary()
    values: dict[str, Any] = {
        f"{arch}.block_count": size["layers"],
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": size["hidden"],
        f"{arch}.feed_forward_length": size["intermediate"],
        f"{arch}.attention.head_count": size["heads"],
        f"{arch}.attention.head_count_kv": size["kv_heads"],
        f"{arch}.attention.key_length": size["head_dim"],
        f"{arch}.attention.value_length": size["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": chat_template,
    }
    if arch == "qwen35":
        values |= make_hybrids.gguf_metadata(options)
        weights = make_hybrids.gguf_weights(weights, options)
    values |= metadata or {}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        _add(writer, key, value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    for name, array in weights.items():
        short = name if arch == "qwen35" else _gguf_name(name)
        if short in drop:
            continue
        if arch == "llama" and "self_attn.q_proj" in name:
            array = _permuted(array, size["heads"])
        elif arch == "llama" and "self_attn.k_proj" in name:
            array = _permuted(array, size["kv_heads"])
        kind = gguf.GGMLQuantizationType[quant]
        matrix = array.ndim == 2 and "conv1d" not in short
        if matrix and quant not in ("F32", "F16"):
            writer.add_tensor(short, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, array.astype(np.float16) if quant == "F16" and matrix else array)
    for name, raw in (extra or {}).items():
        kind = gguf.GGMLQuantizationType[raw]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(name, np.zeros((96, 256 // block * block_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, part = name.split(".", 3)
    part, _, ending = part.rpartition(".")
    parts = make_hybrids.GGUF_ATTENTION | {"post_attention_layernorm": "ffn_norm"}
    return f"blk.{layer}.{parts[part]}.{ending}"


def _permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from [first half, second half] to interleaved pairs."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _as_bytes(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))
