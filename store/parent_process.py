"""A child that must not outlive the process that started it, however that ends."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Called in the child: from now on it gets `by` when the thread that started it ends, `kill -9` included."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
