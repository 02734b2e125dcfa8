"""Processes that run kernels under ASan and UBSan, or under TSan: which is here a race detector for the threads of a block."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIBRARIES = {"asan": ("asan", "ubsan"), "tsan": ("tsan",)}


def environment(sanitizer: str, logs: Path) -> dict[str, str] | None:
    """What a Python process needs to run kernels built with `sanitizer` ("": none); reports go to files in `logs`, but for
    UBSan's, which go to the standard error: pytest needs -s to let them through. None: this compiler has no such library."""
    environ = dict(os.environ, KSHIM_SANITIZER=sanitizer, OMP_NUM_THREADS="1")
    if not sanitizer:
        return environ
    compiler = os.environ.get("KSHIM_CXX", "g++")
    paths = []
    for name in LIBRARIES[sanitizer]:
        done = subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
        paths.append(done.stdout.strip())
    if not all(os.path.isabs(path) for path in paths):
        return None
    log = f"log_path={logs / sanitizer}"
    return environ | {
        "LD_PRELOAD": ":".join(paths),
        "ASAN_OPTIONS": f"detect_leaks=0:{log}",  # Python and torch leave much to the end of the process
        "UBSAN_OPTIONS": log,
        "TSAN_OPTIONS": f"{log}:die_after_fork=0",
    }


def python(sanitizer: str, logs: Path, *args: str) -> subprocess.CompletedProcess | None:
    """Run Python to its end in such an environment, or None where there is none."""
    environ = environment(sanitizer, logs)
    if environ is None:
        return None
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def reports(logs: Path) -> str:
    """All that sanitizers wrote."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(logs.iterdir()))
