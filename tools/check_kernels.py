"""Compiles cuda/*.cu for every architecture, without a GPU, and says what the compiler made of them.

`python tools/check_kernels.py [name ...]` prints a table and fails (exit status 1) on what a card would make slow or refuse:
spilled registers, a stack frame, more registers or shared memory than a block may have, a kernel that is missing for an
architecture, and hot kernels whose machine code lacks the instructions they are written for. Needs nvcc; the look at the
machine code needs cuobjdump too (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm, in the extra `test`).
"""

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
ARCHITECTURES = (80, 86, 89, 90, 100)
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # that one block may have
REGISTERS = 65536  # of a multiprocessor
FLAGS = ("-std=c++17", "-O3", f"-I{CUDA}", "-Xptxas", "-v", "-Werror", "all-warnings", "--threads", "0")
# Kernels whose speed rests on an instruction: what must be in their machine code for sm_90. Loads of 16 bytes, copies past the
# registers, tensor cores.
HOT = {
    "rms_norm": ("LDG.E.128",),
    "silu_mul": ("LDG.E.128",),
    **{f"attend_d{dim}": ("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "LDSM.16") for dim in (64, 96, 128, 256)},
    "checksum": ("LDG.E.128",),
}
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w?'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Made(Struct, frozen=True):
    """What ptxas said of one kernel for one architecture."""

    kernel: str
    architecture: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int  # static


class Launch(Struct, frozen=True):
    """How a kernel is launched."""

    threads: int
    shared_bytes: int = 0  # dynamic


def sources() -> list[Path]:
    """The kernel files."""
    return sorted(CUDA.glob("*.cu"))


def compile_all(source: Path, output: Path) -> list[Made]:
    """One fatbin with the code of every architecture; RuntimeError with nvcc's words if it does not compile."""
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    done = _nvcc("-fatbin", *FLAGS, *targets, "-o", str(output), str(source))
    return list(parsed(done.stderr))


def parsed(log: str) -> list[Made]:
    """The kernels of ptxas's verbose log."""
    found = []
    for name, architecture, text in _ENTRY.findall(log):
        stack, stores, loads = map(int, _FRAME.search(text).groups())
        shared = re.search(r"(\d+) bytes smem", text)
        registers = int(re.search(r"Used (\d+) registers", text)[1])
        found.append(Made(name, int(architecture), registers, stack, stores + loads, int(shared[1]) if shared else 0))
    return found


def faults(made: list[Made], launches: dict[str, Launch]) -> list[str]:
    """What is wrong, one line each."""
    found = []
    for each in made:
        launch = launches.get(each.kernel)
        if launch is None:
            found.append(f"{each.kernel}: nobody launches it (gpu_worker/device/ops.py)")
            continue
        where = f"{each.kernel} for sm_{each.architecture}"
        if each.spill_bytes or each.stack_bytes:
            found.append(f"{where}: {each.spill_bytes} bytes spilled, {each.stack_bytes} bytes of stack")
        if (shared := each.shared_bytes + launch.shared_bytes) > SHARED_KIB[each.architecture] << 10:
            found.append(f"{where}: {shared} bytes of shared memory")
        if -(-each.registers // 8) * 8 * launch.threads > REGISTERS:
            found.append(f"{where}: {each.registers} registers x {launch.threads} threads")
    for kernel in {each.kernel for each in made}:
        missing = set(ARCHITECTURES) - {each.architecture for each in made if each.kernel == kernel}
        found += [f"{kernel}: missing for sm_{architecture}" for architecture in sorted(missing)]
    return found


def slow_code(fatbin: Path, kernels: set[str]) -> list[str]:
    """Hot kernels of a fatbin whose machine code lacks what they are written for, or keeps locals in memory."""
    found = []
    for kernel in sorted(kernels & set(HOT)):
        command = [cuobjdump(), "--dump-sass", "--gpu-architecture", "sm_90", "--function", kernel, str(fatbin)]
        environ = {**os.environ, "PATH": f"{Path(cuobjdump()).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        code = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
        found += [f"{kernel}: no {wanted} in its machine code" for wanted in HOT[kernel] if wanted not in code]
        found += [f"{kernel}: {local} in its machine code" for local in ("LDL", "STL") if re.search(rf"\b{local}\b", code)]
    return found


def cuobjdump() -> str | None:
    """The tool that shows machine code: on PATH, or from its Python package."""
    if found := shutil.which("cuobjdump"):
        return found
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((str(path) for folder in folders for path in folder.glob("*/bin/cuobjdump")), None)


def launches() -> dict[str, Launch]:
    """The launch shapes that the product uses."""
    from gpu_worker.device.ops import KERNELS  # imports torch, which takes seconds

    return {name: Launch(kernel.block, kernel.shared_bytes) for name, kernel in KERNELS.items()}


@functools.cache
def has_compiler() -> bool:
    """Whether there is an nvcc."""
    return shutil.which("nvcc") is not None


def _nvcc(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["nvcc", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc {' '.join(arguments)}\n{done.stderr.strip()}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files without .cu (all if none)")
    names = parser.parse_args().names
    if not has_compiler():
        print("no nvcc on PATH: nothing was checked", file=sys.stderr)
        return 1
    known, wrong, rows = launches(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for source in sources():
            if names and source.stem not in names:
                continue
            fatbin = Path(folder) / f"{source.stem}.fatbin"
            made = compile_all(source, fatbin)
            wrong += faults(made, known)
            if cuobjdump():
                wrong += slow_code(fatbin, {each.kernel for each in made})
            for kernel in sorted({each.kernel for each in made}):
                counts = {each.architecture: each.registers for each in made if each.kernel == kernel}
                rows.append((source.name, kernel, *(str(counts.get(a, "-")) for a in ARCHITECTURES)))
    table = Table("file", "kernel", *(f"sm_{a}" for a in ARCHITECTURES), title="registers")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print("\n".join(wrong) or "nothing spilled, nothing too large")
    return bool(wrong)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
