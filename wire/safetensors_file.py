"""Where the tensors of safetensors files lie: one file, or several with an index. Headers only; no tensor is read."""

import json
from math import prod
from pathlib import Path
from typing import Any

from wire.model_spec import ModelError, TensorInfo, one_line

_BYTES = {"BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "F64": 8}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_safetensors_folder(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a folder by name; ModelError if files are missing, truncated or disagree with their index."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return read_safetensors(single)
    if index.is_file():
        return _read_sharded(index)
    if any(path.glob("pytorch_model*.bin*")):
        raise ModelError(f"{path}: only pytorch_model.bin, a pickle that may run code; convert it to model.safetensors")
    raise ModelError(f"{path}: no model.safetensors")


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file; every one lies within the file, else ModelError."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path}: truncated, or no safetensors file")
            header = json.loads(stream.read(length).decode())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: damaged header: {one_line(error)}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: damaged header: no JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    short = one_line(name[:80])
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if _counts([*shape, begin, end]):
            pass
        case _:
            raise ModelError(f"{path}: damaged header: tensor {short}")
    if dtype in _BYTES and end - begin != prod(shape) * _BYTES[dtype]:
        raise ModelError(f"{path}: damaged header: tensor {short} of shape {shape} and type {dtype} has {end - begin} bytes")
    if begin > end or start + end > size:
        raise ModelError(f"{path}: truncated: tensor {short} ends at byte {start + end}, the file has {size}")
    return TensorInfo(tuple(shape), dtype, str(path), start + begin, end - begin)


def _counts(values: list[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


def _read_sharded(index: Path) -> dict[str, TensorInfo]:
    try:
        places = json.loads(index.read_bytes().decode())["weight_map"].items()
    except OSError as error:
        raise ModelError(f"{index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: no valid index: {one_line(repr(error))}") from None
    shards: dict[str, dict[str, TensorInfo]] = {}
    tensors = {}
    for name, shard in places:
        if not isinstance(shard, str) or not shard or not shard.isprintable() or Path(shard).name != shard:
            raise ModelError(f"{index}: {one_line(repr(shard))} is no file name")
        if shard not in shards:
            shards[shard] = read_safetensors(index.with_name(shard))
        if name not in shards[shard]:
            raise ModelError(f"{index}: missing tensor {one_line(name)} in {shard}")
        tensors[name] = shards[shard][name]
    return tensors
