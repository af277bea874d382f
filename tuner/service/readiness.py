"""Tells whoever started this daemon that it serves, and ends it with them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket as sockets
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tell_ready(ready_fd: int | None = None) -> None:
    """Say that ranks are served: to systemd where it started this process (`Type=notify`), and at a descriptor.

    Args:
        ready_fd: descriptor of the writing end of a pipe, which is closed; None: there is none.
    """
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # whoever waited has left
            os.write(ready_fd, b"\n")
        os.close(ready_fd)
    if address := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as socket:
            socket.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
