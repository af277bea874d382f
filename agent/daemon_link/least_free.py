"""Checks that enough descriptors and threads are free for ZeroMQ, which aborts the process if they are not."""

from __future__ import annotations

import os
import threading
from typing import Final

from ...store.errors import UserError

LEAST_FILES: Final = 24
"""Descriptors that ZeroMQ may open."""
LEAST_THREADS: Final = 8
"""Threads of ZeroMQ, and of the daemon."""


def refuse_few_files() -> None:
    """Check that LEAST_FILES more descriptors can be opened; raises `UserError` if not."""
    held: list[int] = []
    try:
        while len(held) < LEAST_FILES:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        problem = f"fewer than {LEAST_FILES} more files can be opened: {error.strerror}"
        raise UserError(problem, "raise `ulimit -n`") from error
    finally:
        for one in held:
            os.close(one)


def refuse_few_threads() -> None:
    """Check that LEAST_THREADS more threads can be started; raises `UserError` if not."""
    over = threading.Event()
    held: list[threading.Thread] = []
    try:
        while len(held) < LEAST_THREADS:
            (one := threading.Thread(target=over.wait, daemon=True)).start()
            held.append(one)
    except RuntimeError as error:
        problem = f"fewer than {LEAST_THREADS} more threads can be begun"
        remedy = "raise `ulimit -u` or the batch system's limit, or end other processes"
        raise UserError(problem, remedy) from error
    finally:
        over.set()
        for one in held:
            one.join()
