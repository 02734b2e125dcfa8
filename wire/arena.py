"""The arena: one sealed memfd that the host cache owns and workers map, and its descriptor's way between processes.

Memory in it is taken and given back slab by slab. Nothing here decides when.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
from array import array

import numpy as np

PAGE_BYTES = 4096
MAX_DATAGRAM_BYTES = 128 << 10  # of the host cache's socket; the kernel's default send buffer takes 208 KiB
POPULATE_BYTES = 1 << 20  # mapped at a time: about 0.1 ms, where a whole slab would stall a step

_MFD_NOEXEC_SEAL = 8  # Linux 6.3; older kernels answer EINVAL
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


# the owner's side -----------------------------------------------------------------------------------------------------
def create(nbytes: int) -> int:
    """Descriptor of a new arena of `nbytes` that can neither grow nor shrink; it takes no memory yet."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("parkade-arena", flags | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create("parkade-arena", flags)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def is_arena(fd: int, nbytes: int) -> bool:
    """Whether `fd` is a sealed file of exactly `nbytes`: reading inside it can then never raise SIGBUS."""
    try:
        return os.fstat(fd).st_size == nbytes and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no file that knows seals
        return False


def take(fd: int, offset: int, nbytes: int) -> None:
    """Make the range resident, charged to the caller; OSError (ENOSPC, ENOMEM) if the memory is not there."""
    os.posix_fallocate(fd, offset, nbytes)


def give_back(fd: int, offset: int, nbytes: int) -> None:
    """Return the range's memory to the system; its bytes read as zeros from now on."""
    if _libc.fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, nbytes):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def written(fd: int, nbytes: int, slab_bytes: int) -> list[int]:
    """Numbers of the slabs of which any page has been written to, by whichever process, since its memory was taken."""
    if nbytes == 0:
        return []
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap of the arena")
    try:
        pages = (ctypes.c_ubyte * -(-nbytes // PAGE_BYTES))()
        if _libc.mincore(address, nbytes, pages):
            raise OSError(ctypes.get_errno(), "mincore of the arena")
    finally:
        _libc.munmap(address, nbytes)
    there = np.frombuffer(pages, np.uint8) & 1
    return np.flatnonzero(np.add.reduceat(there, np.arange(0, len(there), slab_bytes // PAGE_BYTES), dtype=np.int64)).tolist()


# the worker's side ----------------------------------------------------------------------------------------------------
class Mapping:
    """A worker's view of the whole arena, mapped once; pages are entered into it as they are first used."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `fd`, which the caller may then close. `bytes` is uint8 [nbytes]."""
        self.nbytes = nbytes
        self.bytes = np.empty(0, np.uint8)
        self._map: mmap.mmap | None = None
        if nbytes:
            self._map = mmap.mmap(fd, nbytes)
            self.bytes = np.frombuffer(self._map, np.uint8)
        self._populated = bytearray(-(-nbytes // POPULATE_BYTES))

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of the arena from `offset` on."""
        return self.bytes[offset : offset + nbytes]

    def populate(self, offset: int, nbytes: int) -> None:
        """Enter the range's pages into the mapping in one call instead of a fault each. They must be resident."""
        for chunk in range(offset // POPULATE_BYTES, -(-(offset + nbytes) // POPULATE_BYTES)):
            if not self._populated[chunk]:
                self._populated[chunk] = 1
                start = chunk * POPULATE_BYTES
                with contextlib.suppress(OSError):  # a kernel before 5.14: the copy then faults the pages in one by one
                    self._map.madvise(_MADV_POPULATE_WRITE, start, min(POPULATE_BYTES, self.nbytes - start))

    def drop(self, offset: int, nbytes: int) -> None:
        """Take the slab's pages out of this mapping, so that the owner can give their memory back."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)
        for chunk in range(offset // POPULATE_BYTES, -(-(offset + nbytes) // POPULATE_BYTES)):
            self._populated[chunk] = 0

    def close(self) -> None:
        """Unmap. Views handed out before keep the memory until they are gone."""
        self.bytes = np.empty(0, np.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is alive; the last one unmaps
                self._map.close()
            self._map = None


# the socket -----------------------------------------------------------------------------------------------------------
def send(sock: socket.socket, payload: bytes, fd: int | None = None) -> None:
    """One datagram, with `fd`'s descriptor. BlockingIOError if the peer's buffer is full, another OSError if it is gone."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))] if fd is not None else []
    sock.sendmsg([payload], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, descriptors: bool = False) -> tuple[bytes, int | None]:
    """(datagram, descriptor or None); an empty datagram is the peer's end.

    BlockingIOError if nothing is there, ValueError if the datagram is too long. A descriptor is taken only where
    `descriptors`; the kernel closes others.
    """
    room = socket.CMSG_SPACE(4) if descriptors else 0
    payload, rights, flags, _ = sock.recvmsg(MAX_DATAGRAM_BYTES, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & socket.MSG_TRUNC:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"a datagram of more than {MAX_DATAGRAM_BYTES} bytes")
    return payload, fds[0] if fds else None
