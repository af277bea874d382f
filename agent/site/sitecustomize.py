"""Python runs this at start-up because `zerotune launch` put its folder on PYTHONPATH.

It activates the agent right after the script's own `import torch`, and costs nothing in a process
that never imports torch. A sitecustomize of the user's further along the path still runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch like everybody else and runs `zerotune.agent.activate` once it is imported."""

    # Untyped: the types' imports would be paid by every Python process of the job.
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                from zerotune.agent.activate import activate

                activate()
            except Exception as error:  # training must start whatever is wrong with us
                print(f"zerotune: the agent is off, training runs untuned: {error}", file=sys.stderr)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_shadowed_sitecustomize() -> None:
    entries = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    behind = entries[entries.index(_HERE) + 1 :] if _HERE in entries else []  # one before ours has run, and found us
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("ZEROTUNE_LAUNCH") == "1":
    sys.meta_path.insert(0, _AfterTorch())
_run_shadowed_sitecustomize()
