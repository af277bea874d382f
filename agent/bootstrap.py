"""Runs at the start of each Python process of a launched job: the agent comes right after the script's `import torch`.

A `.pth` file in site-packages imports this (setup.py writes it), or `site/sitecustomize.py` does. A process that never
imports torch pays for nothing more.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident


class _AfterTorch:
    """Finds torch as everybody else does, and arms the agent once torch has run.

    Whoever only looks for torch gets what it asked for, and this finder stays.
    """

    def __init__(self) -> None:
        self._searching: set[int] = set()
        """Threads that are asking the other finders; those may ask all finders in turn."""

    # Untyped: the types' imports would be paid by every Python process of the job.
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch" or get_ident() in self._searching:
            return None
        self._searching.add(get_ident())
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            found = (finder.find_spec(name, path, target) for finder in others)
            spec = next((one for one in found if one is not None), None)
        finally:
            self._searching.discard(get_ident())
        loader = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None:
            return spec

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _arm()

        loader.exec_module = exec_module
        return spec


def _arm() -> None:
    try:
        from .activate import arm

        arm()
    except Exception as error:  # training must start whatever is wrong with us
        print(f"zerotune: the agent is off, training runs untuned: {error}", file=sys.stderr)


# Where only what begins with NCCL was handed on, that says the rest.
if os.environ.get("ZEROTUNE_LAUNCH", "1") == "1":
    if "torch" in sys.modules:
        _arm()
    else:
        sys.meta_path.insert(0, _AfterTorch())
