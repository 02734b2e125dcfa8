"""The native library of the CPU device: built with `python -m gpu_worker.device.native` where a compiler is, loaded with ctypes.

Without it, or if it does not fit this processor, everything runs in plain torch.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from ctypes import POINTER, Structure, c_float, c_int, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.memory import anonymous

SOURCES = Path(__file__).parent.parent / "native"
LIBRARY = SOURCES / "rows.so"
FLAGS = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off"]
ABI = 6
F32, BF16, Q8, Q4 = range(4)  # enum Format of matmul.h
MAX_HEAD_DIM = 256

log = logging.getLogger(__name__)


class MatrixStruct(Structure):
    """struct Matrix of matmul.h."""

    _fields_ = [("format", c_int), ("n", c_int), ("k", c_int), ("data", c_void_p), ("bias", c_void_p)]


class ShapeStruct(Structure):
    """struct Shape of shape.h."""

    _fields_ = [
        *((name, c_int) for name in ["layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "is_f32"]),
        *((name, c_int) for name in ["rotary_dim", "key_heads", "value_heads", "key_dim", "value_dim", "kernel"]),
        ("mtp_intermediate", c_int),
        ("eps", c_float),
    ]


class LayerStruct(Structure):
    """struct Layer of shape.h."""

    _fields_ = [
        *((name, MatrixStruct) for name in ("q", "k", "v", "q_gate", "o")),
        *((name, MatrixStruct) for name in ("in_qkv", "in_z", "in_a", "in_b", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("conv", "dt_bias", "decay", "state_norm")),
        ("cells", c_int),
        ("state", c_int),
    ]


class HeadStruct(Structure):
    """struct HeadWeights of shape.h."""

    _fields_ = [
        ("fc", MatrixStruct),
        ("draft", MatrixStruct),
        *((name, c_void_p) for name in ("embed_norm", "hidden_norm", "norm")),
        ("layer", LayerStruct),
    ]


class StatesStruct(Structure):
    """struct States of shape.h."""

    _fields_ = [
        ("base", c_void_p),
        *((name, c_size_t) for name in ("stride", "state", "log_k", "log_d", "log_g", "conv", "folded")),
        *((name, c_int) for name in ("slots", "log_entries", "conv_entries")),
    ]


class BlocksStruct(Structure):
    """struct Blocks of shape.h."""

    _fields_ = [
        ("base", c_void_p),
        *((name, c_size_t) for name in ("block_bytes", "hidden_at")),
        *((name, c_int) for name in ("count", "block_size", "layers")),
    ]


class StepStruct(Structure):
    """struct Step of shape.h."""

    _fields_ = [
        *((name, c_int) for name in ("rows", "sequences", "out_count", "table_width", "only_count")),
        *((name, c_void_p) for name in ("tokens", "positions", "seq_of", "tables", "known", "slots")),
        *((name, c_void_p) for name in ("out_rows", "only", "given", "hidden")),
        ("blocks", BlocksStruct),
        ("states", StatesStruct),
    ]


def build(output: Path = LIBRARY, flags: list[str] = FLAGS) -> None:
    """Compile the library; RuntimeError with the compiler's words if that fails."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError("no C++ compiler (g++ or clang++) found")
    partial = output.with_suffix(f".{os.getpid()}.tmp")
    done = subprocess.run([compiler, *flags, "-o", str(partial), str(SOURCES / "rows.cpp")], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
    os.replace(partial, output)  # whoever has the old one mapped keeps it


def load(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """The library, or None with one log line that says why not."""
    if os.environ.get("PARKADE_NATIVE") == "off":
        log.info("native library turned off; running in torch")
        return None
    if not path.exists():
        log.info("no native library (built by `make setup` where a C++ compiler is); running in torch")
        return None
    try:
        lib = ctypes.CDLL(str(path))
        if lib.pk_abi() != ABI:
            raise OSError("it is of another version; run `make setup` again")
        if missing := _missing_features(lib):
            raise OSError(f"it was built for a processor with {missing}; run `make setup` again")
    except (OSError, AttributeError) as error:
        log.warning("native library does not load (%s); running in torch", error)
        return None
    _declare(lib)
    return lib


def supports(widths: Iterable[int], head_dim: int) -> bool:
    """Whether the library can run a model with these widths of rows and heads: all multiples of 16."""
    return not any(width % 16 for width in (*widths, head_dim)) and head_dim <= MAX_HEAD_DIM


class Packed:
    """A weight matrix in the library's own order, with its bias. Owns the memory that `struct` points to."""

    def __init__(self, lib: ctypes.CDLL, form: int, n: int, k: int, bias: Tensor | None = None) -> None:
        self._lib, self.form, self.n, self.k = lib, form, n, k
        self.nbytes = lib.pk_packed_bytes(form, n, k)
        self._memory = anonymous(self.nbytes)
        self._address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._bias = None if bias is None else bias.float().contiguous()
        self.struct = MatrixStruct(form, n, k, self._address, None if self._bias is None else self._bias.data_ptr())

    def put_dense(self, values: Tensor, first: int) -> None:
        """Rows from `first` on: float32 or bfloat16 [rows, k], as the format wants."""
        values = values.contiguous()
        assert values.dtype == (torch.float32 if self.form == F32 else torch.bfloat16) and values.shape[1] == self.k
        self._lib.pk_pack_dense(self.form, self.k, values.data_ptr(), first, len(values), self._address)

    def put_quants(self, quants: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None, first: int) -> None:
        """Rows from `first` on: quants [rows, k] of one byte each, float16 scale and (4 bits) minimum [rows, k / 32]."""
        quants, scale = np.ascontiguousarray(quants), np.ascontiguousarray(scale)
        minimum = None if minimum is None else np.ascontiguousarray(minimum)
        assert quants.shape[1] == self.k and scale.shape == (len(quants), self.k // 32) and quants.itemsize == 1
        low = None if minimum is None else minimum.ctypes.data
        self._lib.pk_pack_quants(self.form, self.k, quants.ctypes.data, scale.ctypes.data, low, first, len(quants), self._address)


def _missing_features(lib: ctypes.CDLL) -> str:
    """Instruction sets that the library was built with and this processor lacks (a copied folder, another machine)."""
    lib.pk_features.restype = ctypes.c_char_p
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split()
    return " ".join(sorted(set(lib.pk_features().decode().split()) - set(flags))) if flags else ""


def _declare(lib: ctypes.CDLL) -> None:
    """Argument and result types of every function."""
    p = c_void_p
    for name, result, arguments in (
        ("pk_model", p, [POINTER(ShapeStruct), c_int]),
        ("pk_set_rope", None, [p, p, p, c_int]),
        ("pk_free", None, [p]),
        ("pk_set_layer", None, [p, c_int, POINTER(LayerStruct)]),
        ("pk_set_ends", None, [p, POINTER(MatrixStruct), POINTER(MatrixStruct), p]),
        ("pk_set_head", None, [p, POINTER(HeadStruct)]),
        ("pk_forward", c_int, [p, POINTER(StepStruct)]),
        ("pk_draft", c_int, [p, POINTER(StepStruct)]),
        ("pk_draft_greedy", c_int, [p, POINTER(StepStruct), p, p, c_int, p]),
        ("pk_logits", None, [p, p, c_int, p]),
        ("pk_draft_logits", None, [p, p, c_int, p]),
        ("pk_packed_bytes", c_size_t, [c_int, c_int, c_int]),
        ("pk_pack_dense", None, [c_int, c_int, p, c_int, c_int, p]),
        ("pk_pack_quants", None, [c_int, c_int, p, p, p, c_int, c_int, p]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


def main() -> int:
    try:
        build()
    except RuntimeError as error:
        print(f"native library not built, everything will run in torch: {error}", file=sys.stderr)
        return 0 if "no C++ compiler" in str(error) else 1
    print(f"built {LIBRARY.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
