"""Compiles the kernels of cuda/ for a card when they are first needed, with NVRTC by ctypes, and keeps what it made on disk.

The user needs no nvcc: NVRTC comes with every CUDA build of torch. A file is compiled again when its text, the headers', the
options, NVRTC's version or the architecture change.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from wire.config import ConfigError

_PACKAGE = Path(__file__).parent.parent
SOURCES = installed if (installed := _PACKAGE / "cuda").is_dir() else _PACKAGE.parent / "cuda"  # or that of a checkout
OPTIONS = ("--std=c++17",)
_DIGEST_BYTES = 32  # behind each image that is kept
MAJORS = (13, 12)  # versions of NVRTC that are known to compile the kernels

log = logging.getLogger(__name__)


def compiled(file: str, architecture: int, sources: Path = SOURCES) -> bytes:
    """The cubin of `sources`/`file` for compute capability `architecture` (90 for 9.0), from the cache if it is there.
    ConfigError, in one line, if there is no NVRTC, if it does not know the card, or if the file does not compile."""
    library = _library()
    source = (sources / file).read_text()
    headers = {path.name: path.read_text() for path in sorted(sources.glob("*.cuh"))}
    options = [f"--gpu-architecture=sm_{_known(library, architecture)}", *OPTIONS]
    parts = [file, source, *headers, *headers.values(), *options, _version(library)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    cached = cache_folder() / f"{Path(file).stem}-{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        if (image := _intact(cached.read_bytes())) is not None:
            return image
        log.warning("%s is damaged", cached)
    log.info("compiling %s for sm_%d", file, architecture)
    image = _compile(library, file, source, headers, options)
    try:
        _write(cached, image + _digest(image))
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
    return image


def cache_folder() -> Path:
    """Where cubins are kept, below XDG_CACHE_HOME or ~/.cache. It can be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "parkade" / "kernels"


@functools.cache
def _library() -> ctypes.CDLL:
    """NVRTC: the one that is loaded or on the loader's path, that of a package beside torch, or the toolkit's."""
    tried = []
    for path in _candidates():
        try:
            _load_builtins(path)
            return _declare(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
    log.debug("no NVRTC: %s", "; ".join(tried))
    raise ConfigError(
        "the kernels cannot be compiled: no NVRTC (libnvrtc.so.13 or .12) found; it comes with a CUDA build of torch "
        "(package nvidia-cuda-nvrtc); or choose --device cpu"
    )


def _candidates() -> Iterator[str]:
    """Paths and names in the order in which they are tried: torch's version of CUDA first, as the driver knows that one."""
    ours = (torch.version.cuda or "").partition(".")[0]
    spec = importlib.util.find_spec("nvidia")  # NVIDIA's packages, wherever they are installed
    packages = list(spec.submodule_search_locations or []) if spec else []
    for major in sorted(MAJORS, key=lambda major: str(major) != ours):
        name = f"libnvrtc.so.{major}"
        yield name
        for folder in packages:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}")))
        yield from (f"{folder}/{name}" for folder in ("/usr/local/cuda/lib64", f"/usr/local/cuda-{major}/lib64"))


def _load_builtins(path: str) -> None:
    """NVRTC looks for this library by its bare name when it compiles, not beside itself."""
    if "/" in path:
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """AttributeError if it lacks a function."""
    library.nvrtcGetErrorString.restype = c_char_p
    for name in ("nvrtcVersion", "nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBIN", "nvrtcGetSupportedArchs"):
        getattr(library, name)
    return library


def _version(library: ctypes.CDLL) -> str:
    major, minor = c_int(), c_int()
    _check(library, library.nvrtcVersion(byref(major), byref(minor)))
    return f"{major.value}.{minor.value}"


def _known(library: ctypes.CDLL, architecture: int) -> int:
    """The architecture to compile for: the newest one of the card's own generation that NVRTC knows; cubins run on those."""
    count = c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(byref(count)))
    listed = (c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(listed))
    fitting = [known for known in listed if known <= architecture and known // 10 == architecture // 10]
    if not fitting:
        raise ConfigError(
            f"the kernels cannot be compiled: NVRTC {_version(library)} knows no card of compute capability "
            f"{architecture / 10:.1f}; or choose --device cpu"
        )
    return max(fitting)


def _compile(library: ctypes.CDLL, file: str, source: str, headers: dict[str, str], options: list[str]) -> bytes:
    program = c_void_p()
    texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (c_char_p * len(headers))(*(name.encode() for name in headers))
    created = library.nvrtcCreateProgram(byref(program), source.encode(), file.encode(), len(headers), texts, names)
    _check(library, created)
    try:
        status = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*(o.encode() for o in options)))
        if status:
            words = _read(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            log.error("%s does not compile:\n%s", file, words)
            first = next((line for line in words.splitlines() if "error" in line), words.partition("\n")[0])
            raise ConfigError(f"{file} does not compile for the card: {first or _text(library, status)}; or choose --device cpu")
        return _read(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _read(library: ctypes.CDLL, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise ConfigError(f"the kernels cannot be compiled: NVRTC says {_text(library, status)}; or choose --device cpu")


def _text(library: ctypes.CDLL, status: int) -> str:
    return library.nvrtcGetErrorString(status).decode()


def _intact(kept: bytes) -> bytes | None:
    """The image of what is kept: the driver would refuse one that a full disk or a lost write has cut, at every start."""
    image = kept[:-_DIGEST_BYTES]
    return image if image and kept[-_DIGEST_BYTES:] == _digest(image) else None


def _digest(image: bytes) -> bytes:
    return hashlib.sha256(image).digest()


def _write(path: Path, image: bytes) -> None:
    """Whole or not at all, whoever else does the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(image)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
