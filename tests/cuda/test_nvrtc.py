"""device/nvrtc.py: the cache, and one clear line for all that can be wrong; with the fake NVRTC, and the real one where it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.device import nvrtc
from tests.cuda.fake import build
from wire.config import ConfigError

ELF = b"\x7fELF"
CACHE_FOLDER = nvrtc.cache_folder  # the fixture of the fake driver replaces it


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small kernel and the header that it includes."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "scale.cu").write_text(Path(__file__).with_name("scale.cu").read_text())
    (folder / "common.cuh").write_text((nvrtc.SOURCES / "common.cuh").read_text())
    return folder


@pytest.fixture
def cache(fake_driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path / "cache" / "kernels")
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that NVRTC was asked to compile; it makes a stand-in of each, with its number."""
    asked: list[str] = []

    def compile_(_library, file: str, *_) -> bytes:
        asked.append(file)
        return ELF + str(len(asked)).encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    return asked


def test_an_image_is_compiled_once(cache: Path, sources: Path, compilations: list[str]) -> None:
    image = nvrtc.compiled("scale.cu", 90, sources)
    (kept,) = cache.iterdir()
    assert image.startswith(ELF) and kept.read_bytes().startswith(image)
    assert nvrtc.compiled("scale.cu", 90, sources) == image and len(compilations) == 1


@pytest.mark.parametrize(
    "damage", [lambda kept: b"", lambda kept: kept[:-1], lambda kept: b"?" + kept[1:], lambda kept: kept[:20]]
)
def test_an_image_that_is_damaged_is_compiled_again(cache: Path, sources: Path, compilations: list[str], damage) -> None:
    nvrtc.compiled("scale.cu", 90, sources)
    (kept,) = cache.iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    again = nvrtc.compiled("scale.cu", 90, sources)
    assert again.startswith(ELF) and len(compilations) == 2
    assert nvrtc.compiled("scale.cu", 90, sources) == again and len(compilations) == 2


@pytest.mark.parametrize("change", ["scale.cu", "common.cuh", "another.cuh", "architecture", "version", "options"])
def test_it_is_compiled_again_after_a_change(
    cache: Path, sources: Path, compilations: list[str], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nvrtc.compiled("scale.cu", 90, sources)
    architecture = 90
    match change:
        case "architecture":
            architecture = 80
        case "version":
            monkeypatch.setattr(nvrtc, "_version", lambda _: "13.99")
        case "options":
            monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--ptxas-options=-v"))
        case name:
            with open(sources / name, "a") as file:
                file.write("\n// a change\n")
    assert nvrtc.compiled("scale.cu", architecture, sources) != first
    assert nvrtc.compiled("scale.cu", architecture, sources) != first and len(compilations) == 2
    assert len(list(cache.iterdir())) == 2


def test_a_card_gets_code_of_its_generation(cache: Path, sources: Path, compilations: list[str]) -> None:
    assert nvrtc.compiled("scale.cu", 80, sources) == nvrtc.compiled("scale.cu", 86, sources)  # the fake NVRTC knows no 86
    assert nvrtc.compiled("scale.cu", 90, sources) != nvrtc.compiled("scale.cu", 80, sources) and len(compilations) == 2


@pytest.mark.parametrize("architecture", [75, 120])
def test_a_card_that_nvrtc_does_not_know_is_one_line(cache: Path, sources: Path, architecture: int) -> None:
    with pytest.raises(ConfigError) as failed:
        nvrtc.compiled("scale.cu", architecture, sources)
    text = str(failed.value)
    assert f"capability {architecture / 10}" in text and "--device cpu" in text and "\n" not in text


def test_a_file_that_does_not_compile_is_one_line(cache: Path, sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(sources / "scale.cu", "a") as file:
        file.write("\nthis is no C++\n")
    with pytest.raises(ConfigError) as failed:
        nvrtc.compiled("scale.cu", 90, sources)
    text = str(failed.value)
    assert "scale.cu does not compile" in text and "error" in text and "\n" not in text
    assert "this is no C++" in caplog.text  # all that the compiler says is in the log
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_failure(
    fake_driver: None, sources: Path, tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path / "file" / "kernels")
    assert nvrtc.compiled("scale.cu", 90, sources) and nvrtc.compiled("scale.cu", 90, sources)
    assert len(compilations) == 2


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CACHE_FOLDER() == tmp_path / "parkade" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CACHE_FOLDER() == tmp_path / ".cache" / "parkade" / "kernels"


def test_no_nvrtc_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnvrtc.so.0", "/nowhere/libnvrtc.so.13"]))
    with pytest.raises(ConfigError) as failed:
        nvrtc._library.__wrapped__()
    assert "nvidia-cuda-nvrtc" in str(failed.value) and "\n" not in str(failed.value)


def test_the_version_of_cuda_that_torch_has_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert next(nvrtc._candidates()) == "libnvrtc.so.12"
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert next(nvrtc._candidates()) == "libnvrtc.so.13"


REAL = """
import sys
from pathlib import Path
from gpu_worker.device import nvrtc
from wire.config import ConfigError
nvrtc.cache_folder = lambda: Path(sys.argv[1])
for path in sys.argv[3:]:
    try:
        image = nvrtc.compiled(Path(path).name, int(sys.argv[2]), Path(path).parent)
        print(Path(path).name, image[:4] == b"\\x7fELF")
    except ConfigError as error:
        print(error)
"""


def with_the_real_one(tmp_path: Path, architecture: int, files: list[Path]) -> list[str]:
    """The lines of REAL; skips where there is no NVRTC."""
    command = [sys.executable, "-c", REAL, str(tmp_path / "cache"), str(architecture), *map(str, files)]
    done = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True, check=False)
    if "no NVRTC" in done.stdout:
        pytest.skip("no NVRTC here (package nvidia-cuda-nvrtc)")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_real_one(sources: Path, tmp_path: Path) -> None:
    (sources / "broken.cu").write_text('#include "common.cuh"\nthis is no C++\n')
    compiled, broken = with_the_real_one(tmp_path, 90, [sources / "scale.cu", sources / "broken.cu"])
    assert compiled == "scale.cu True"
    assert "broken.cu does not compile" in broken and "error" in broken


@pytest.mark.long
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100])
def test_the_real_one_compiles_every_kernel(tmp_path: Path, architecture: int) -> None:
    files = sorted(nvrtc.SOURCES.glob("*.cu"))
    assert with_the_real_one(tmp_path, architecture, files) == [f"{file.name} True" for file in files]
