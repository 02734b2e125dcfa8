"""Reads a Hugging Face folder's metadata: config.json, safetensors headers, tokenizer files."""

from pathlib import Path

from msgspec import Struct

from wire.model_spec import ModelError, ModelSpec, TensorInfo
from wire.tokenizer_data import TokenizerData


class HfFolder(Struct):
    """What the folder says."""

    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    tokenizer: TokenizerData
    special_ids: dict[str, int]
    eos_ids: set[int]
    chat_template: str | None
    bos_token: str
    eos_token: str
    add_bos: bool


def read_hf_folder(path: Path) -> HfFolder:
    """The folder's metadata; ModelError for what cannot be served."""
    raise ModelError(f"{path}: folders come with the next commit")
