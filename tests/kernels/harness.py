"""Compiles a file of cuda/ for the CPU (kshim.h) and runs its kernels on torch tensors: `run(file, kernel, grid, block, args)`.

A compiled file is kept under build/kernels by a hash of its text. Each kernel says which parameters it takes, and the
arguments are checked against that. KSHIM_SANITIZER=asan or tsan compiles with those, see sanitized.py; KSHIM_SOURCES names
another folder than cuda/. With KERNELS_ON=card they run on a real card instead, see on_card.py.
"""

import ctypes as C
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
CUDA = Path(os.environ.get("KSHIM_SOURCES", HERE.parent.parent / "cuda"))
BUILD = HERE.parent.parent / "build" / "kernels"
ORDERS = {"forward": 0, "reverse": 1, "random": 2}

FLAGS = ["-x", "c++", "-DKSHIM", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"]
WARNINGS = ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-fvisibility=hidden", "-fno-gnu-unique"]
SANITIZER = {
    "": ["-O2"],
    # without the last flag ASan leaves out variables in sections of their own, that is __shared__ ones
    "asan": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fsanitize-sections=kshim_shared"],
    "tsan": ["-O1", "-g", "-fsanitize=thread", "-Wno-tsan"],  # it says that it does not see fences
}
POINTEES = {
    "f": {torch.float32},
    "d": {torch.float64},
    "i": {torch.int32},
    "I": {torch.int32, torch.uint32},
    "q": {torch.int64},
    "Q": {torch.int64, torch.uint64},
    "H": {torch.bfloat16, torch.int16, torch.uint16},
}
VALUES = {"f": C.c_float, "d": C.c_double, "i": C.c_int, "I": C.c_uint, "q": C.c_longlong, "Q": C.c_ulonglong}

schedule = {"order": "forward", "seed": 0}  # what run() uses where the caller names none; the fixture sets it


class KernelError(RuntimeError):
    """The kernel did what CUDA forbids, or it was launched wrongly."""


class _Launch(C.Structure):
    _fields_ = [
        ("grid", C.c_uint * 3),
        ("block", C.c_uint * 3),
        ("shared", C.c_uint),
        ("order", C.c_int),
        ("seed", C.c_uint64),
        ("switches", C.c_uint64),
        ("error", C.c_char * 512),
    ]


def compiler() -> str | None:
    """A C++ compiler that can build kernels for the CPU; only g++ places __shared__ variables where ASan sees them."""
    return os.environ.get("KSHIM_CXX") or shutil.which("g++")


def build(source: Path, sanitizer: str | None = None) -> Path:
    """The shared library of one kernel file, compiled if its text, the headers or the flags have changed."""
    sanitizer = os.environ.get("KSHIM_SANITIZER", "") if sanitizer is None else sanitizer
    flags = [*FLAGS, *WARNINGS, *_fused(), *SANITIZER[sanitizer]]
    command = [compiler() or "g++", *flags, f"-I{CUDA}", f"-I{HERE}"]
    texts = [source, *sorted(CUDA.glob("*.cuh")), *sorted(HERE.glob("*.h"))]
    key = hashlib.sha256("\0".join(command).encode() + b"".join(path.read_bytes() for path in texts)).hexdigest()[:20]
    library = BUILD / f"{source.stem}-{sanitizer or 'plain'}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # no sanitizer for the compiler
        done = subprocess.run([*command, str(source), "-o", str(part)], capture_output=True, text=True, check=False, env=environ)
        if done.returncode:
            raise KernelError(f"{source.name} does not compile:\n{done.stderr}")
        part.replace(library)
    return library


def run(
    file: str | Path,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int] | int,
    args: Sequence,
    shared: int = 0,
    order: str | None = None,
    seed: int | None = None,
) -> int:
    """Run a kernel of `file` ("norm", or a path) to its end; returns the number of fiber switches.

    Arguments in order of declaration: tensors or arrays (contiguous, of the pointer's type; uint8 fits any), an int as an
    address, None as null; numbers are converted to the declared type.
    """
    if os.environ.get("KERNELS_ON") == "card":
        from tests.kernels import on_card  # needs PyCUDA and a driver

        on_card.run(kernel, grid, args)
        return 0
    library = _library(Path(file) if str(file).endswith(".cu") else CUDA / f"{file}.cu")
    try:
        function = getattr(library, f"{kernel}__launch")
    except AttributeError:
        raise KernelError(f"{file} has no kernel {kernel}; is its KERNEL_EXPORT there?") from None
    declared = parameters(file, kernel)
    if len(declared) != len(args):
        raise KernelError(f"{kernel} takes {len(declared)} arguments, {len(args)} given")
    values = [_value(kernel, i, kind, arg) for i, (kind, arg) in enumerate(zip(declared, args))]
    launch = _Launch(
        shared=shared,
        order=ORDERS[order or schedule["order"]],
        seed=schedule["seed"] if seed is None else seed,
    )
    launch.grid[:] = (*grid, 1, 1)[:3]
    launch.block[:] = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
    pointers = (C.c_void_p * len(values))(*[C.addressof(value) for value in values])
    if function(C.byref(launch), pointers):
        raise KernelError(f"{kernel}: {launch.error.decode()}")
    return launch.switches


def reachable(array: np.ndarray) -> np.ndarray:
    """`array` where a kernel can reach it by an address that lies in what it is given."""
    if os.environ.get("KERNELS_ON") == "card":
        from tests.kernels import on_card

        return on_card.reachable(array)
    return array


def parameters(file: str | Path, kernel: str) -> list[str]:
    """What a kernel takes: a letter of Python's struct for a value, P and a letter for a pointer (PH bf16, PB bytes)."""
    library = _library(Path(file) if str(file).endswith(".cu") else CUDA / f"{file}.cu")
    text = C.create_string_buffer(1024)
    getattr(library, f"{kernel}__parameters")(text, C.c_size_t(len(text)))
    return text.value.decode().split()


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of bytes 0xFF: NaN, or -1. What a kernel leaves out shows."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN and infinity give infinity."""
    error = float((result.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error if np.isfinite(error) else float("inf")


@functools.cache
def _fused() -> list[str]:
    """fmaf as one instruction where the processor has it: the same bits, many times faster than the library's."""
    cpu = Path("/proc/cpuinfo")
    has = platform.machine() == "x86_64" and cpu.exists() and " fma " in cpu.read_text()
    return ["-mfma"] if has else []


@functools.cache
def _library(source: Path) -> C.CDLL:
    return C.CDLL(str(build(source)))


def _value(kernel: str, index: int, kind: str, arg) -> C._SimpleCData:
    where = f"{kernel}: argument {index} ({kind})"
    if not kind.startswith("P"):
        if isinstance(arg, torch.Tensor | np.ndarray) or arg is None:
            raise KernelError(f"{where} is a value, {type(arg).__name__} given")
        return VALUES[kind](float(arg) if kind in "fd" else int(arg))
    if isinstance(arg, np.ndarray):
        arg = torch.from_numpy(arg)
    if isinstance(arg, torch.Tensor):
        allowed = POINTEES.get(kind[1])
        if not arg.is_contiguous():
            raise KernelError(f"{where}: the tensor is not contiguous")
        if allowed and arg.dtype not in allowed | {torch.uint8}:
            raise KernelError(f"{where}: the tensor is {arg.dtype}")
        return C.c_void_p(arg.data_ptr())
    if arg is not None and not isinstance(arg, int):
        raise KernelError(f"{where} is a pointer, {type(arg).__name__} given")
    return C.c_void_p(arg)
