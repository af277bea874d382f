"""Reports that the daemon serves to the process that started it, and ends it with that process or a batch job."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket as sockets
import threading
import time
from typing import Final

LOOK_EVERY_S: Final = 1.0
"""Polling interval on kernels without pidfd (before 5.3)."""


def report_ready(ready_fd: int | None = None) -> None:
    """Report that ranks are served: to systemd if it started this process (`Type=notify`), and at a descriptor.

    The descriptor `ready_fd`, the writing end of a pipe, is closed afterwards.
    """
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # the process that waited has ended
            os.write(ready_fd, b"\n")
        os.close(ready_fd)
    if address := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as socket:
            socket.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


def end_with(pid: int) -> None:
    """Get SIGTERM when another process ends; it need not be this one's parent."""
    try:
        descriptor: int | None = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    except (AttributeError, OSError):
        descriptor = None

    def wait() -> None:
        if descriptor is not None:
            select.select([descriptor], [], [])
        else:
            while _lives(pid):
                time.sleep(LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="zerotune-batch-job", daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of root
        pass
    return True
