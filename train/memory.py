"""Memory that an update frees and the next one asks for again.

glibc gives a large block back to the kernel when it is freed, and each page of the next one is then a fault that zeroes
it. An update on long texts has many such blocks: a training keeps what it has freed, up to its highest need, until it
ends (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD).
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h's names of the two settings
_NEVER, _NONE = -1, 0
_USUAL_TRIM_BYTES, _USUAL_MMAPS = 128 << 10, 65_536  # glibc's own
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process inside the block, and give it back after it.

    Where malloc is not glibc's, or the environment has settings of its own for it, nothing changes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or any(name in os.environ for name in _SET_BY_USER):
        yield
        return
    libc.mallopt(_MMAP_MAX, _NONE)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, _USUAL_MMAPS)
        libc.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)
        libc.malloc_trim(0)
