"""tools/build_pycuda.py as far as it goes without compiling: what it finds, what it refuses, and what a good wheel is."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tools import build_pycuda

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
SCRIPT = Path(build_pycuda.__file__)


def make_wheel(path: Path, library: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pycuda/_driver.cpython-99-x86_64-linux-gnu.so", library)
    return path


def test_a_wheel_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / f"pycuda-{build_pycuda.VERSION}-cp39-cp39-linux_x86_64.whl").touch()
    (tmp_path / f"pycuda-2020.1-{TAG}-{TAG}-linux_x86_64.whl").touch()
    assert build_pycuda.wheel(tmp_path) is None  # of another Python, of another version
    own = tmp_path / f"pycuda-{build_pycuda.VERSION}-{TAG}-{TAG}-linux_x86_64.whl"
    own.touch()
    for arguments in ([str(tmp_path)], ["--find", str(tmp_path)]):
        done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(own)


def test_without_a_compiler_it_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "wheels")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr == "PyCUDA cannot be built here: no g++\n" and not done.stdout
    assert not (tmp_path / "wheels").exists()


def test_a_wheel_must_ask_for_the_driver(tmp_path: Path) -> None:
    assert build_pycuda.asks_for_the_driver(make_wheel(tmp_path / "good.whl", b"\x7fELF\0libcuda.so.1\0"))
    assert not build_pycuda.asks_for_the_driver(make_wheel(tmp_path / "bad.whl", b"\x7fELF\0libm.so.6\0"))
