"""Reads a GGUF file's header: its metadata, where its tensors lie, and the shape of the model that they make.

The header is parsed here, not by gguf.GGUFReader: that one needs 1.7 s and 150 MB for a vocabulary of 49,152 tokens, in
each of three processes, and a damaged file leaves it with exceptions of many kinds. The layout is that of
ggml/docs/gguf.md; block sizes and dequantisation come from the gguf package.
"""

import mmap
import re
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
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
from wire.mtp_head import gguf_head

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen35")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile(Struct):
    """A parsed header: `metadata` by key (arrays as lists), `tensors` by name."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The metadata value of `key`; ModelError if its type is not `kind`, or if it is missing and has no default."""
        value = self.metadata.get(key, default)
        if value is ...:
            raise ModelError(f"{self.path}: no metadata {key}")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is not default and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise ModelError(f"{self.path}: metadata {key} is a {type(value).__name__}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Header of a GGUF file, and of its other parts if it is split. Every tensor's bytes are within its file, else ModelError."""
    first = _read_one(path)
    parts = first.get("split.count", int, 1)
    if parts <= 1:
        return first
    match = _SHARD.fullmatch(path.name)
    if not match or int(match[2]) != 1:
        raise ModelError(f"{path}: part of a model in {parts} files; name the one that ends in -00001-of-{parts:05d}.gguf")
    if int(match[3]) != parts:
        raise ModelError(f"{path}: says it is one of {parts} files")
    for i in range(2, parts + 1):
        part = path.with_name(f"{match[1]}-{i:05d}-of-{parts:05d}.gguf")
        tensors = _read_one(part).tensors
        if twice := first.tensors.keys() & tensors.keys():
            raise ModelError(f"{part}: tensor {min(twice)} is already in another part")
        first.tensors |= tensors
    return first


def can_dequantise(dtype: str) -> bool:
    """Whether the gguf package turns this quantisation into floats."""
    kind = GGMLQuantizationType[dtype]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def gguf_spec(file: GgufFile) -> ModelSpec:
    """The model's shape from metadata and from which tensors exist; ModelError for what cannot be served."""
    arch = file.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelError(f"{file.path}: unknown architecture {arch!r} (known: {', '.join(ARCHITECTURES)})")

    def number(key: str, default: Any = ...) -> int:
        value = file.get(f"{arch}.{key}", (int, list), default)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1 or not isinstance(value[0], int):
                raise ModelError(f"{file.path}: {arch}.{key} differs between layers, which is not supported")
            value = value[0]
        return value

    hidden, heads = number("embedding_length"), number("attention.head_count")
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise ModelError(f"{file.path}: missing tensor token_embd.weight")
    head_dim = number("attention.key_length", hidden // max(heads, 1))
    context = number("context_length")
    hybrid = arch == "qwen35"
    rotary = number("rope.dimension_count", head_dim) if hybrid else head_dim
    _refuse_what_changes_the_model(file, arch, head_dim, context)
    rope = _rope(file, arch, rotary, context)
    mtp_layers = number("nextn_predict_layers", 0) if hybrid else 0
    if mtp_layers not in (0, 1):
        raise ModelError(f"{file.path}: {arch}.nextn_predict_layers is {mtp_layers}, only 0 and 1 are supported")
    layers = number("block_count") - mtp_layers
    first = {name.removeprefix("blk.0.") for name in file.tensors if name.startswith("blk.0.")}
    spec = ModelSpec(
        arch=arch,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=number("feed_forward_length"),
        vocab=embed.shape[0],
        rms_eps=float(file.get(f"{arch}.attention.layer_norm_rms_epsilon", (int, float))),
        rope=rope,
        tied="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2" or "attn_q.bias" in first,
        o_bias="attn_output.bias" in first,
        qk_norm=arch in ("qwen3", "qwen35"),
        mlp_bias="ffn_up.bias" in first,
        max_context=scaled_context(context, rope),
        rotary_dim=0 if rotary == head_dim else rotary,
        attn_gate=hybrid,
        delta=_delta(file, layers, number) if hybrid else None,
        mtp=gguf_head(file.tensors, layers, file.path) if mtp_layers else None,
    )
    return check_spec(spec, file.path)


def _delta(file: GgufFile, num_layers: int, number: Callable[..., int]) -> DeltaSpec:
    """The recurrent layers: all but each `full_attention_interval`-th."""
    every, value_heads, inner = number("full_attention_interval", 4), number("ssm.time_step_rank"), number("ssm.inner_size")
    if num_layers > MAX_LAYERS or every < 1 or value_heads < 1 or inner % value_heads:
        sizes = f"full_attention_interval {every}, ssm.time_step_rank {value_heads}, ssm.inner_size {inner}"
        raise ModelError(f"{file.path}: {num_layers} layers with {sizes} make no model")
    return DeltaSpec(
        layers=tuple(i for i in range(num_layers) if (i + 1) % every),
        key_heads=number("ssm.group_count"),
        value_heads=value_heads,
        key_dim=number("ssm.state_size"),
        value_dim=inner // value_heads,
        kernel=number("ssm.conv_kernel"),
    )


def _refuse_what_changes_the_model(file: GgufFile, arch: str, head_dim: int, context: int) -> None:
    """ModelError for metadata that asks for arithmetic which ModelSpec cannot express."""
    where = file.path
    same = {"attention.value_length": head_dim, "expert_count": 0, "attention.causal": True}
    if arch != "qwen35":
        same |= {"rope.dimension_count": head_dim}
    for key, wanted in same.items():
        if (found := file.get(f"{arch}.{key}", (int, bool), wanted)) != wanted:
            raise ModelError(f"{where}: {arch}.{key} is {found}, only {wanted} is supported")
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale", "attention.clamp_kqv"):
        if file.get(f"{arch}.{key}", (int, float), 0.0):
            raise ModelError(f"{where}: {arch}.{key} is not supported")
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    if 0 < window < context:
        raise ModelError(f"{where}: a sliding window of {window} tokens is not supported")


def _rope(file: GgufFile, arch: str, rotary: int, context: int) -> RopeSpec:
    def real(key: str, default: Any) -> Any:
        value = file.get(f"{arch}.rope.{key}", (int, float), default)
        return value if value is None else float(value)

    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    theta = real("freq_base", 10000.0)
    factor = real("scaling.factor", real("scale_linear", 0.0)) or 1.0  # a factor of 0 means none
    factors = _rope_factors(file, rotary)
    match kind:
        case "none":
            return RopeSpec(theta=theta, factors=factors)
        case "linear":
            return RopeSpec(theta=theta, kind="linear", factor=factor, factors=factors)
        case "yarn":
            attention = real("scaling.attn_factor", real("scaling.yarn_attn_factor", None))
            return RopeSpec(
                theta=theta,
                kind="yarn",
                factor=factor,
                original_context=file.get(f"{arch}.rope.scaling.original_context_length", int, context),
                beta_fast=real("scaling.yarn_beta_fast", 32.0),
                beta_slow=real("scaling.yarn_beta_slow", 1.0),
                # the file's factor multiplies the computed one
                attention_factor=None if attention is None else attention * (0.1 * float(np.log(max(factor, 1.0))) + 1.0),
                factors=factors,
            )
        case _:
            raise ModelError(f"{file.path}: unknown rope scaling {kind!r} (known: linear, yarn)")


def _rope_factors(file: GgufFile, rotary: int) -> tuple[float, ...]:
    """The divisors of `rope_freqs.weight` (llama3's scaling, written out by the converter), or nothing."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.dtype != "F32" or tensor.shape != (rotary // 2,):
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ModelError(f"{file.path}: tensor rope_freqs.weight is {found}, expected F32 [{rotary // 2}]")
    values = np.fromfile(tensor.file, np.float32, rotary // 2, offset=tensor.offset)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelError(f"{file.path}: tensor rope_freqs.weight has values that are no divisors")
    return tuple(float(v) for v in values)


# the header -----------------------------------------------------------------------------------------------------------
def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).file()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        if isinstance(error, UnicodeDecodeError):
            raise ModelError(f"{path}: damaged: a name or text is not UTF-8") from None
        raise ModelError(f"{path}: {one_line(error)}") from None  # mmap of an empty file
    except (struct.error, OverflowError):
        raise ModelError(f"{path}: truncated or damaged: the header goes beyond the end of the file") from None


class _Parser:
    """A cursor over the mapped file. Reading beyond the end raises struct.error, which `_read_one` turns into its line."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def file(self) -> GgufFile:
        if bytes(self.data[:4]) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file")
        self.at = 4
        version = self._number("I")
        if version not in (2, 3):
            found = version if version < 65536 else "of a big-endian machine"
            raise ModelError(f"{self.path}: GGUF version {found}, only 2 and 3 are supported")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                raise ModelError(f"{self.path}: damaged: metadata {key[:80]!r} is there twice")
            metadata[key] = self._value(self._number("I"), 0)
        infos = [self._tensor() for _ in range(tensor_count)]
        file = GgufFile(str(self.path), metadata, {})
        alignment = file.get("general.alignment", int, 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment {alignment} is no power of two")
        start = -(-self.at // alignment) * alignment
        for name, shape, code, offset in infos:
            if name in file.tensors:
                raise ModelError(f"{self.path}: damaged: tensor {name[:80]!r} is there twice")
            file.tensors[name] = self._place(name[:80], shape, code, start + offset)
        return file

    def _place(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown type {code}") from None
        if min(shape, default=1) < 1 or (shape and shape[-1] % block):
            raise ModelError(f"{self.path}: tensor {name!r} has the impossible shape {list(shape)} for {kind.name}")
        nbytes = prod(shape) // block * block_bytes
        if offset + nbytes > len(self.data):
            raise ModelError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {offset + nbytes}, the file has {len(self.data)}"
            )
        return TensorInfo(shape, kind.name, str(self.path), offset, nbytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self.path}: damaged: tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, code: int, depth: int) -> Any:
        if code in _SCALARS:
            return self._number(_SCALARS[code])
        if code == _STRING:
            return self._string()
        if code == _ARRAY and depth < _MAX_NESTING:
            item, count = self._number("I"), self._number("Q")
            if item in _SCALARS:
                return self._numbers(_SCALARS[item], count)
            if item == _STRING:
                return self._strings(count)
            return [self._value(item, depth + 1) for _ in range(count)]
        raise ModelError(f"{self.path}: damaged: unknown metadata type {code}")

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def _numbers(self, code: str, count: int) -> list[Any]:
        dtype = np.dtype(code).newbyteorder("<")
        self._need(count * dtype.itemsize)
        values = np.frombuffer(self.data[self.at : self.at + count * dtype.itemsize], dtype).tolist()
        self.at += count * dtype.itemsize
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        self._need(8 * count)
        # a vocabulary has 10^5 of them: the loop is kept bare
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8 + length
            found.append(data[at - length : at].decode())
        self.at = at
        self._need(0)  # a length beyond the end has made the last slice short
        return found

    def _need(self, nbytes: int) -> None:
        if self.at + nbytes > len(self.data):
            raise struct.error("beyond the end")
