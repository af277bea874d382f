"""Python runs this at start-up, since `zerotune launch` put its folder on PYTHONPATH.

It replaces zerotune's `.pth` file for a Python that finds zerotune on PYTHONPATH instead of in site-packages. A
sitecustomize of the user's further along the path still runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(spec: importlib.machinery.ModuleSpec | None) -> None:
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _shadowed() -> importlib.machinery.ModuleSpec | None:
    entries = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    behind = entries[entries.index(_HERE) + 1 :] if _HERE in entries else []  # an earlier one has run this file
    return importlib.machinery.PathFinder.find_spec("sitecustomize", behind)


# Loaded by its path: an error in this Python's zerotune must not show before the script imports torch.
if "ZEROTUNE_LAUNCH" in os.environ and "zerotune.agent.bootstrap" not in sys.modules:
    _bootstrap = os.path.join(os.path.dirname(_HERE), "bootstrap.py")
    _run(importlib.util.spec_from_file_location("zerotune_bootstrap", _bootstrap))
_run(_shadowed())
