"""The daemon process's system resources: open files for connections, and freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource


def raise_open_files() -> None:
    """Raise this process's limit of open files to the user's hard limit: each connected rank needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_back_memory() -> None:
    """Free reference cycles, such as a job's parts, and return the memory to the system."""
    gc.collect()
    trim_memory()


def trim_memory() -> None:
    """Return freed memory to the system; otherwise the C library keeps it until the daemon ends."""
    with contextlib.suppress(AttributeError, OSError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
