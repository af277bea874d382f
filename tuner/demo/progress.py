"""Progress of a training run of `zerotune demo`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.status import Status

LOOK_EVERY_S: Final = 0.5
LINES_IN_FILE: Final = 10
"""Lines of progress if the output is a file: one per tenth of the steps."""


class Progress:
    """Prints a run's progress: one changing line on a terminal, or a line now and then into a file."""

    def __init__(self, console: Console, words: str, losses: Path, n_steps: int) -> None:
        self._console, self._words = console, words
        self._losses, self._n_steps = losses, n_steps
        self._status: Status | None = None
        self._n_printed = 0

    def __enter__(self) -> Progress:
        self._losses.unlink(missing_ok=True)
        if self._console.is_terminal:
            self._status = self._console.status(self._words)
            self._status.start()
        else:
            self._console.print(f"{self._words} ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def wait(self, process: subprocess.Popen[bytes], stalls_after_s: float, check: Callable[[], None]) -> int:
        """Show progress until the process ends, and call `check` now and then; return the exit code.

        Raises TimeoutError if no step has ended for `stalls_after_s`.
        """
        n_before, until_s = 0, time.monotonic() + stalls_after_s
        while True:
            try:
                return process.wait(timeout=LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                if (n_done := self._n_done()) > n_before:
                    n_before, until_s = n_done, time.monotonic() + stalls_after_s
                if time.monotonic() > until_s:
                    raise TimeoutError from None
                self._show(n_done)
                check()

    def _n_done(self) -> int:
        try:
            return self._losses.read_bytes().count(b"\n")  # one line per step
        except FileNotFoundError:
            return 0

    def _show(self, n_done: int) -> None:
        words = f"{self._words}: step {n_done:,} of {self._n_steps:,}"
        if self._status is not None:
            self._status.update(words)
        elif (n_parts := n_done * LINES_IN_FILE // self._n_steps) > self._n_printed:
            self._n_printed = n_parts
            self._console.print(words)
