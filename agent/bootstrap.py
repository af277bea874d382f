"""Runs at the start of each Python process of a launched job, and turns the agent on after the script imports torch.

A `.pth` file in site-packages imports this module (setup.py writes it), or `site/sitecustomize.py` does. A process that
never imports torch runs nothing else.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident


class _AfterTorch:
    """A finder that lets the other finders find torch, and arms the agent after torch was imported.

    A search for torch without an import gets its spec, and this finder stays installed.
    """

    def __init__(self) -> None:
        self._searching: set[int] = set()
        """Threads that are asking the other finders, which may call this finder again."""

    # Untyped: every Python process of the job would have to import the types.
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
    except Exception as error:  # training must start whatever is wrong with zerotune
        print(f"zerotune: the agent is off, training runs untuned: {error}", file=sys.stderr)


# A launcher that passes on only NCCL's variables drops ZEROTUNE_LAUNCH; NCCL_ZEROTUNE restores it later.
if os.environ.get("ZEROTUNE_LAUNCH", "1") == "1":
    if "torch" in sys.modules:
        _arm()
    else:
        sys.meta_path.insert(0, _AfterTorch())
