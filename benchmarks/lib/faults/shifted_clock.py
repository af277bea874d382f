"""Clocks of chosen processes that jump, while the machine's own clock stays as it is.

A C library, compiled at run time and loaded with LD_PRELOAD, adds the numbers in a file to the clocks.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.compiled import PLUGIN

SOURCE: Final = Path(__file__).with_suffix(".c")
_OFFSETS: Final = struct.Struct("2q")


class ShiftedClock:
    """The clocks of all processes that are started in `environment`.

    Raises:
        PluginError: there is no C compiler.
        subprocess.CalledProcessError: it failed.
        RuntimeError: processes on this machine do not take their time from it.
    """

    def __init__(self, folder: Path) -> None:
        library, offsets = folder / "shifted_clock.so", folder / "offsets"
        command = [*PLUGIN.compiler(), "-O2", "-Wall", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        offsets.write_bytes(bytes(_OFFSETS.size))
        with offsets.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _OFFSETS.size)
        preloaded = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
        self.environment = {"LD_PRELOAD": preloaded, "SHIFTED_CLOCK_OFFSETS": str(offsets)}
        self.shift(wall_s=-1e9)
        told = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        self.shift()
        if float(told.stdout) > 1e9:
            raise RuntimeError(f"{library} does not shift the clock of {sys.executable}")

    def shift(self, *, wall_s: float = 0.0, monotonic_s: float = 0.0) -> None:
        """Set the lead of the clocks over the machine's; the calendar's may be negative."""
        self._map[:] = _OFFSETS.pack(round(1e9 * wall_s), round(1e9 * monotonic_s))
