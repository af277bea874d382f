"""Python runs this at start-up if a rehearsal put its folder on PYTHONPATH: the mock is there before torch is."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


class _BeforeTorch(importlib.abc.MetaPathFinder):
    # Untyped: every Python process would pay for the types' imports.
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torch":  # stays on the path: a removal during the search would hide the next entry
            sys.path.append(_REPOSITORY)
            try:
                from benchmarks.rehearse.start import start
            finally:
                sys.path.remove(_REPOSITORY)

            start()
        return None


def _run_shadowed_sitecustomize() -> None:
    entries = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    behind = entries[entries.index(_HERE) + 1 :] if _HERE in entries else []  # an earlier one imported this one
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "ZEROTUNE_REHEARSE" in os.environ:
    sys.meta_path.insert(0, _BeforeTorch())
_run_shadowed_sitecustomize()
