"""What `make gpu-check` has proven on this machine: whether a row's result on a card depends on its own sequence only.

Exactness is a property of one card, one build of torch (its matrix products), one driver and these kernels: a proof holds for all
four or not at all.
"""

import hashlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from gpu_worker.device.nvrtc import SOURCES


class Place(Struct, frozen=True):
    """What a proof is about."""

    card: str  # its name
    torch: str  # version
    driver: int  # version of CUDA that it knows, 13000 for 13.0
    kernels: str  # digest of their text


class Proof(Struct, frozen=True):
    place: Place
    exact: bool
    note: str = ""  # what differed


def path() -> Path:
    """Where proofs are kept: PARKADE_PROVEN, or a file of the user's cache."""
    if named := os.environ.get("PARKADE_PROVEN"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parkade" / "gpu-check.json"


def kernels_digest(folder: Path = SOURCES) -> str:
    """Of all kernel files, by name and text."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.cu*")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def look(place: Place, file: Path | None = None) -> tuple[bool, str]:
    """(True, "") where a proof of exactness is kept for `place`, else (False, why not, in one line)."""
    proofs = _read(file or path())
    if (proof := next((proof for proof in proofs if proof.place == place), None)) is not None:
        return (True, "") if proof.exact else (False, proof.note or "gpu-check found a difference on this card")
    if same := [proof.place for proof in proofs if proof.place.card == place.card]:
        changed = [name for name in Place.__struct_fields__ if getattr(same[-1], name) != getattr(place, name)]
        return False, f"proven here with another {' and '.join(changed)}; run make gpu-check again"
    return False, f"not proven on a {place.card}; make gpu-check does that"


def keep(proof: Proof, file: Path | None = None) -> Path:
    """Write it down, in place of an earlier one about the same; the file. OSError if that cannot be written."""
    file = file or path()
    proofs = [other for other in _read(file) if other.place != proof.place]
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode([*proofs, proof]), indent=2) + b"\n")
    fresh.replace(file)
    return file


def _read(file: Path) -> list[Proof]:
    """All proofs; none where the file is missing or damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Proof])
    except (OSError, msgspec.DecodeError):
        return []
