"""Descriptors and threads that must be free before ZeroMQ begins: it ends its process if they are not."""

from __future__ import annotations

import os
import threading
from typing import Final

from ...store.errors import UserError

LEAST_FILES: Final = 24
"""Descriptors that ZeroMQ may want."""
LEAST_THREADS: Final = 8
"""Threads of ZeroMQ, and of the daemon."""


def refuse_few_files() -> None:
    """See that LEAST_FILES more can be opened.

    Raises:
        UserError: they cannot.
    """
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
    """See that LEAST_THREADS more can be begun.

    Raises:
        UserError: they cannot.
    """
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
