"""Reads keys as they are pressed, without a line feed."""

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
    """While it is open, the terminal delivers each key at once; afterwards its mode is restored in every case.

    It yields a function that waits for some seconds and returns the pressed keys, or an empty text. If stdin is no
    terminal, it only waits.
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
