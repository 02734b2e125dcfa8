"""Builds the fake driver and the fake NVRTC into build/fakecuda/HASH, where that has not been done yet."""

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
BUILD = ROOT / "build" / "fakecuda"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
QUIET = ["-Wno-missing-field-initializers", "-Wno-psabi"]
DRIVER = ("fakecuda.cpp", "launches.cpp", "products.cpp")
HEADERS = ("state.h", "streams.h", "memory.h")
NVRTC = "fakenvrtc.cpp"


def missing() -> str:
    """Why nothing can be built or used here; empty if it can."""
    if not shutil.which("g++") or not shutil.which("nm"):
        return "no C++ compiler (g++ with binutils)"
    if importlib.util.find_spec("pycuda") is None:
        return "PyCUDA is not installed; `make test` builds it where a C++ compiler and cuda.h are"
    return ""


def folder() -> Path:
    """The folder with libcuda.so.1 and libnvrtc.so.13. RuntimeError with the compiler's words if they do not compile."""
    pycuda = _pycuda_library()
    shim = _digest(*sorted((ROOT / "tests" / "kernels").glob("kshim*.h")), ROOT / "tests" / "kernels" / "harness.py")
    digest = _digest(pycuda, *(HERE / name for name in (*DRIVER, *HEADERS, NVRTC)), Path(__file__)) + sys.executable + shim
    there = BUILD / hashlib.sha256(digest.encode()).hexdigest()[:16]
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (there / "libcuda.so.1").exists():
            _build(there, pycuda, int(shim[:7], 16))
    return there


def _build(there: Path, pycuda: Path, minor: int) -> None:
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    objects = [there / f"{Path(name).stem}.o" for name in DRIVER]
    compile_only = [flag for flag in FLAGS if flag != "-shared"] + ["-c"]
    for source, output in zip(DRIVER, objects):
        _run(["g++", *compile_only, *QUIET, str(HERE / source), "-o", str(output)])
    # every other function that PyCUDA is linked against answers "not supported"
    wanted = _symbols("-D", "--undefined-only", pycuda)
    names = sorted(name for name in wanted - _symbols("--defined-only", *objects) if name.startswith("cu"))
    others = there / "others.cpp"
    objects.append(others.with_suffix(".o"))
    others.write_text(
        "".join(f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return 801; }}\n' for name in names)
    )
    _run(["g++", *compile_only, str(others), "-o", str(objects[-1])])
    name = ["-DROOT=" + _quoted(ROOT), "-DPYTHON=" + _quoted(sys.executable), f"-DMINOR={minor}"]
    _run(["g++", *FLAGS, *name, "-Wl,-soname,libnvrtc.so.13", str(HERE / NVRTC), "-o", str(there / "libnvrtc.so.13")])
    partial = there / "partial.so"
    _run(["g++", *FLAGS, "-Wl,-soname,libcuda.so.1", *map(str, objects), "-ldl", "-o", str(partial)])
    partial.replace(there / "libcuda.so.1")


def _pycuda_library() -> Path:
    spec = importlib.util.find_spec("pycuda")
    assert spec and spec.origin, "PyCUDA is not installed"
    packages = Path(spec.origin).parent
    return next(packages.glob("_driver*.so"), None) or next(packages.parent.glob("_driver*.so"))


def _symbols(*arguments: str | Path) -> set[str]:
    listing = subprocess.run(["nm", "-g", *map(str, arguments)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listing.splitlines() if line.strip()}


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _quoted(value: object) -> str:
    return f'"{value}"'


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
