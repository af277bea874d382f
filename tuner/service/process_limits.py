"""What the daemon's process asks of the system: room for connections, and memory handed back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource


def raise_open_files() -> None:
    """Let this process have as many files open as its user may: each connected rank is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_back_memory() -> None:
    """Free what refers to itself, as a job's parts do, and hand it back to the system."""
    gc.collect()
    trim_memory()


def trim_memory() -> None:
    """Hand freed memory back to the system; the C library keeps it otherwise, for as long as the daemon lives."""
    with contextlib.suppress(AttributeError, OSError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
