"""Starts our modules as programs: `python -m` would first import modules from the current folder."""

from __future__ import annotations

import sys

_RUN = (
    "import sys; sys.path = [one for one in sys.path if one];"
    "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)
"""With `-c`, the empty name stands for the current folder, in which anybody may have put a module."""


def python_with(module: str) -> list[str]:
    """The beginning of a command that runs a module of ours from any folder; append the module's arguments."""
    return [sys.executable, "-c", _RUN.format(module)]
