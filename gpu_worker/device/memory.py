"""Memory of the CPU device."""

import mmap


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed private memory that becomes resident when touched, on huge pages where the system grants them."""
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: only slower
            pass
    return memory
