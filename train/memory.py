"""Memory that an update frees and the next one asks for again.

glibc gives a large block back to the kernel when it is freed, and each page of the next one is then a fault that zeroes
it. An update on long texts has many such blocks: a training keeps what it has freed, up to its highest need, until it
ends (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD).
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the settings' numbers in malloc.h
_NEVER, _NONE = -1, 0
# glibc's own count, and the thresholds to which it raises its own while blocks of some size come and go: once one was
# set it raises them no more
_USUAL = {_MMAP_MAX: 65_536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
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
        for setting, value in _USUAL.items():
            libc.mallopt(setting, value)
        libc.malloc_trim(0)
