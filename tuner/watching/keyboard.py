"""Keys as they are pressed, without a line feed."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """While it is open, the terminal gives each key at once; it is as before afterwards, however that ends.

    Yields:
        Waits for some seconds; returns the keys that were pressed, or an empty text. Where stdin is no terminal, it
        waits only.
    """
    if not sys.stdin.isatty():
        yield _slept
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def wait(for_s: float) -> str:
        ready, _, _ = select.select([number], [], [], for_s)
        return os.read(number, 64).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(number)  # Ctrl-C still interrupts
        yield wait
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _slept(for_s: float) -> str:
    time.sleep(for_s)
    return ""
