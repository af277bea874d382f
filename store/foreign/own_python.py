"""Our own programs in a Python of their own: `python -m` would import what lies in the current folder first."""

from __future__ import annotations

import sys

_RUN = (
    "import sys; sys.path = [one for one in sys.path if one];"
    "import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)
"""With `-c` the current folder, in which anybody may have put a module, is the empty name."""


def python_with(module: str) -> list[str]:
    """The words of a command that runs a module of ours, wherever it is run; its arguments follow."""
    return [sys.executable, "-c", _RUN.format(module)]
