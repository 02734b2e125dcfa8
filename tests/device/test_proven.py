"""What gpu-check has proven is believed for the same card, torch, driver and kernels, and for nothing else."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_worker.device import proven
from gpu_worker.device.proven import Place, Proof

HERE = Place("NVIDIA Something", "2.9.1+cu130", 13000, "abc")


def test_nothing_is_proven_at_first(tmp_path: Path) -> None:
    assert proven.look(HERE, tmp_path / "none.json") == (False, "not proven on a NVIDIA Something; make gpu-check does that")


def test_a_proof_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "proofs.json"
    other = replace(HERE, card="Another")
    assert proven.keep(Proof(HERE, True), file) == file
    proven.keep(Proof(other, False, "a row differs"), file)
    assert proven.look(HERE, file) == (True, "")
    assert proven.look(other, file) == (False, "a row differs")
    proven.keep(Proof(HERE, False), file)
    assert proven.look(HERE, file) == (False, "gpu-check found a difference on this card")
    assert [entry.name for entry in file.parent.iterdir()] == ["proofs.json"]


@pytest.mark.parametrize("change", [{"torch": "2.10"}, {"driver": 13010}, {"kernels": "x"}, {"torch": "2.10", "driver": 13010}])
def test_a_proof_of_something_else_is_none(tmp_path: Path, change: dict) -> None:
    file = proven.keep(Proof(HERE, True), tmp_path / "p.json")
    exact, note = proven.look(replace(HERE, **change), file)
    assert not exact and note == f"proven here with another {' and '.join(change)}; run make gpu-check again"


@pytest.mark.parametrize("text", [b"", b"{", b'[{"place": 1}]'])
def test_a_damaged_file_proves_nothing_and_is_replaced(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(text)
    assert not proven.look(HERE, file)[0]
    proven.keep(Proof(HERE, True), file)
    assert proven.look(HERE, file)[0]


def test_the_file_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert proven.path() == tmp_path / "parkade" / "gpu-check.json"
    monkeypatch.setenv("PARKADE_PROVEN", str(tmp_path / "x.json"))
    assert proven.path() == tmp_path / "x.json"


def test_the_digest_of_kernels_changes_with_their_text(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("one")
    (tmp_path / "common.cuh").write_text("two")
    first = proven.kernels_digest(tmp_path)
    assert first == proven.kernels_digest(tmp_path)
    (tmp_path / "common.cuh").write_text("three")
    assert first != proven.kernels_digest(tmp_path)
    assert proven.kernels_digest()
