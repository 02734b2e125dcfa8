"""The native library for tests: built once where a compiler is, else its tests are skipped."""

import functools
import shutil

import pytest

from gpu_worker.device import native


@functools.cache
def native_or_skip_reason() -> str:
    """Empty if the library can be used; builds it if it is missing or old."""
    if native.LIBRARY.exists() and newest_source() <= native.LIBRARY.stat().st_mtime and native.load() is not None:
        return ""
    if not shutil.which("g++"):
        return "no native library and no C++ compiler"
    native.build()
    return "" if native.load() is not None else "the native library does not load here"


def newest_source() -> float:
    return max(path.stat().st_mtime for path in [*native.SOURCES.glob("*.h"), *native.SOURCES.glob("*.cpp")])


def require_native() -> None:
    if reason := native_or_skip_reason():
        pytest.skip(reason)
