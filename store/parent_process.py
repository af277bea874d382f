"""Child processes that end with the process that started them, however it ends."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """The child calls this: it then gets signal `by` when the thread that started it ends, even by `kill -9`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
