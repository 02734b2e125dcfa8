"""Where processes see fake cards: the environment to start one in, or this very process; and the driver's counters.

environ.missing()                      why that cannot be done here; empty if it can
environ.variables(mode="random:3")     for subprocesses and their children: add them to the environment
environ.load(); environ.configure()    for this process (fixtures.py does it)
"""

import ctypes
import functools
import os
import struct
import subprocess
import sys
from pathlib import Path

from tests.cuda.fake import build
from tests.cuda.fake.overlay import sitecustomize

CARD_BYTES = 4 << 30
CACHE = build.BUILD / "cache"  # of the kernels that gpu_worker/device/nvrtc.py has "compiled"
MODES = ("lazy", "eager", "random:1", "random:2", "random:3", "random:4", "random:5")


@functools.cache
def missing() -> str:
    """Why there can be no fake card here; empty if there can."""
    return build.missing()


def variables(
    mode: str = "lazy", cards: int = 1, card_bytes: int = CARD_BYTES, counters: Path | None = None, run: bool = True
) -> dict[str, str]:
    """What to add to the environment of a process. mode: lazy, eager or random:SEED, how late streams run what they are given.
    card_bytes: memory of each card. counters: a folder in which each process leaves its counters, see `counters_of`.
    run: off, kernels and products are enqueued and never run, to measure what the host does."""
    there = build.folder()
    return {
        "LD_LIBRARY_PATH": _joined(str(there), os.environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH")),
        "XDG_CACHE_HOME": str(CACHE),
        "FAKECUDA_MODE": mode,
        "FAKECUDA_CARDS": str(cards),
        "FAKECUDA_BYTES": str(card_bytes),
        "FAKECUDA_COUNTERS": str(counters or ""),
        "FAKECUDA_RUN": "on" if run else "off",
    }


def counters_of(folder: Path) -> dict[int, dict[str, int]]:
    """Counters by process id, of all that ran with `counters=folder`: of living ones, of ended and of killed ones."""
    found = {}
    for path in folder.iterdir():
        if path.name.isdigit():
            text = path.read_bytes()
            found[int(path.name)] = _named(text[:4096].rstrip(b"\0"), text[4096:])
    return found


@functools.cache
def load() -> ctypes.CDLL:
    """The fake driver in this process. PyCUDA and nvrtc.py find it by its name, as it is loaded before them."""
    assert "pycuda.driver" not in sys.modules, "PyCUDA was imported before the fake driver was loaded"
    there = build.folder()
    ctypes.CDLL(str(there / "libnvrtc.so.13"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(there / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    library.fakecuda_counter_names.restype = ctypes.c_char_p
    library.fakecuda_counters.restype = ctypes.c_void_p
    return library


def configure(mode: str = "lazy", cards: int = 1, card_bytes: int = CARD_BYTES, run: bool = True) -> None:
    """Settings of this process's fake driver from now on; a failure of a kernel is forgotten."""
    load().fakecuda_configure(mode.encode(), cards, ctypes.c_size_t(card_bytes), int(run))


def counters() -> dict[str, int]:
    """This process's counters: what there is now (streams, events, registrations ...) and what has happened so far."""
    library = load()
    names = library.fakecuda_counter_names()
    return _named(names, ctypes.string_at(library.fakecuda_counters(), 8 * names.count(b"\n")))


# Counters of what there is, which must be back where they were when a card is closed; and of what must never happen.
LEFT = (
    *("contexts", "streams", "events", "graphs", "executables", "modules"),
    *("allocations", "allocated_bytes", "registrations", "registered_bytes", "pinned", "pinned_bytes"),
)
WRONG = ("unregistered_copies", "early_releases", "overruns", "kernel_errors", "capture_errors")


def complaints(now: dict[str, int], before: dict[str, int] | None = None) -> list[str]:
    """What was left behind or done wrong, in words."""
    before = before or dict.fromkeys(now, 0)
    return [f"{name}: {now[name] - before[name]}" for name in (*LEFT, *WRONG) if now[name] != before[name]]


def python(code: str, **settings) -> subprocess.CompletedProcess:
    """Run code in a Python of its own that sees fake cards (`variables`)."""
    environment = {**os.environ, **variables(**settings)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=build.ROOT, capture_output=True, text=True, check=False
    )


def _named(names: bytes, numbers: bytes) -> dict[str, int]:
    listed = names.decode().split()
    return dict(zip(listed, struct.unpack_from(f"={len(listed)}q", numbers)))


def _joined(*folders: str | None) -> str:
    return os.pathsep.join(folder for folder in folders if folder)
