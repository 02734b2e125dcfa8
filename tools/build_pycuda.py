"""Builds a wheel of PyCUDA for this Python, where neither driver nor GPU is: `python tools/build_pycuda.py [--find] FOLDER`.

Needs g++, Python's headers and CUDA's: a toolkit's, or those of NVIDIA's packages, which are fetched where there is no
toolkit. The wheel goes to FOLDER; if it is there already, nothing is done; --find only says where it is. Plain `pip
install pycuda` needs the driver's library and cuRAND to link against: a stub stands in for the one, the other is left out.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

VERSION = "2026.1"
# cuda.h and cudaProfiler.h. Not the newest: what is built against them must load on drivers of CUDA 13.0.
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-profiler-api==13.0.*")
STUB = 'extern "C" int cuInit(unsigned) { return 100; }'  # a shared object may leave the other symbols open

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


class NotBuilt(Exception):
    """Why there is no wheel, in one line."""


def main(folder: Path) -> int:
    """0: the wheel is there. 3: it cannot be built here. 1: the attempt failed, its words are on stderr."""
    if found := wheel(folder):
        print(found)
        return 0
    if not shutil.which("g++"):
        return _cannot("no g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return _cannot("no Python.h (Debian: python3-dev)")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            build(folder, Path(scratch))
    except NotBuilt as error:
        print(f"PyCUDA was not built: {error}", file=sys.stderr)
        return 1
    print(wheel(folder))
    return 0


def wheel(folder: Path) -> Path | None:
    """This Python's wheel in `folder`."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return next(iter(sorted(folder.glob(f"pycuda-{VERSION}-{tag}-{tag}-*.whl"))), None)


def build(folder: Path, scratch: Path) -> None:
    """`scratch` is deleted afterwards."""
    root = _cuda_root(scratch)
    stub = scratch / "stub"
    stub.mkdir()
    (stub / "stub.c").write_text(STUB)
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so"), str(stub / "stub.c")]
    _run(["g++", "-x", "c++", *library])
    home = scratch / "home"  # PyCUDA's settings come from here, instead of the user's own
    home.mkdir()
    settings = {
        "CUDA_ROOT": str(root),
        "CUDA_ENABLE_CURAND": False,
        "CUDADRV_LIB_DIR": [str(stub)],
        "CXXFLAGS": ["-g0", "-O1", "-w"],
        "LDFLAGS": ["-Wl,-s", "-Wl,--no-as-needed"],
    }
    (home / ".aksetup-defaults.py").write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    environment = {**os.environ, "HOME": str(home)}
    # without pip's cache: it might hold a wheel with other settings, and another program should not get this one
    _run([*PIP, "wheel", "--no-cache-dir", "--no-deps", "-w", str(scratch / "wheels"), f"pycuda=={VERSION}"], environment)
    for path in (scratch / "wheels").glob("*.whl"):
        if not asks_for_the_driver(path):
            raise NotBuilt("the linker left out libcuda.so.1")
        shutil.copy(path, folder / (path.name + ".partial"))
        os.replace(folder / (path.name + ".partial"), folder / path.name)
    if not wheel(folder):
        raise NotBuilt(f"pip made no wheel for this Python in {folder}")


def _cuda_root(scratch: Path) -> Path:
    """A folder with include/cuda.h and include/cudaProfiler.h."""
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root and all(Path(root, "include", name).exists() for name in ("cuda.h", "cudaProfiler.h")):
            return Path(root)
    headers = scratch / "headers"
    _run([*PIP, "install", "--no-deps", "--target", str(headers), *HEADERS])
    for found in headers.glob("nvidia/*/include/cuda.h"):
        return found.parent.parent
    raise NotBuilt(f"{HEADERS[0]} has no cuda.h")


def asks_for_the_driver(path: Path) -> bool:
    """Whether the library in the wheel names libcuda.so.1, as it must to be loaded with it."""
    with zipfile.ZipFile(path) as archive:
        libraries = [name for name in archive.namelist() if "_driver" in name and name.endswith(".so")]
        return bool(libraries) and all(b"libcuda.so.1\0" in archive.read(name) for name in libraries)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        print(words[-4000:], file=sys.stderr)
        raise NotBuilt(f"{Path(command[0]).name} {' '.join(command[1:4])} ... failed")


def _cannot(reason: str) -> int:
    print(f"PyCUDA cannot be built here: {reason}", file=sys.stderr)
    return 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheel is put")
    parser.add_argument("--find", action="store_true", help="only print the wheel that is there, if any")
    options = parser.parse_args()
    if options.find:
        print(wheel(options.folder) or "")
    else:
        sys.exit(main(options.folder))
