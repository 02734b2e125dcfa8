"""Finds the head that drafts (multi-token prediction) among a model's tensors, or in a file beside it."""

from pathlib import Path

import numpy as np

from wire.model_spec import HEAD_PREFIX, ModelError, MtpSpec, TensorInfo, one_line
from wire.safetensors_file import read_safetensors

ID_TYPES = {"I32": "<i4", "I64": "<i8"}


def hf_head(tensors: dict[str, TensorInfo], where: str) -> MtpSpec | None:
    """The head's shape from the tensors `mtp.*`; None if there are none. ModelError, beginning with `where`, for half a head."""
    if not any(name.startswith(HEAD_PREFIX) for name in tensors):
        return None
    return _spec(tensors, "mtp.layers.0.mlp.gate_proj.weight", "mtp.draft_token_ids", where)


def gguf_head(tensors: dict[str, TensorInfo], layer: int, where: str) -> MtpSpec | None:
    """The head's shape if it is layer `layer` of a GGUF file; None if there is no such layer."""
    if not any(name.startswith(f"blk.{layer}.") for name in tensors):
        return None
    return _spec(tensors, f"blk.{layer}.ffn_gate.weight", f"blk.{layer}.nextn.draft_token_ids", where)


def read_head(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a head in a file of its own; ModelError if something else is in it."""
    tensors = read_safetensors(path)
    if not tensors:
        raise ModelError(f"{path}: no tensors")
    for name in tensors:
        if not name.startswith(HEAD_PREFIX):
            raise ModelError(f"{path}: tensor {one_line(name)} is no part of a head")
    return tensors


def check_draft_ids(tensor: TensorInfo, name: str, vocab: int) -> None:
    """ModelError unless the tensor holds different ids of the vocabulary."""
    if tensor.dtype not in ID_TYPES:
        raise ModelError(f"{tensor.file}: tensor {name} has the type {tensor.dtype}, expected I32 or I64")
    ids = np.fromfile(tensor.file, ID_TYPES[tensor.dtype], tensor.shape[0], offset=tensor.offset)
    if ids.min() < 0 or ids.max() >= vocab:
        raise ModelError(f"{tensor.file}: tensor {name} has ids from {ids.min()} to {ids.max()}, the vocabulary {vocab}")
    if len(np.unique(ids)) != len(ids):
        raise ModelError(f"{tensor.file}: tensor {name} has an id twice")


def _spec(tensors: dict[str, TensorInfo], gate: str, ids: str, where: str) -> MtpSpec:
    if gate not in tensors:
        raise ModelError(f"{where}: missing tensor {gate}")
    for name in (gate, ids):
        if name in tensors and (not tensors[name].shape or not tensors[name].shape[0]):
            raise ModelError(f"{where}: tensor {name} has the shape {list(tensors[name].shape)}")
    return MtpSpec(tensors[gate].shape[0], tensors[ids].shape[0] if ids in tensors else 0)
