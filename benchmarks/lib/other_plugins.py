"""Compiles plugins that stand for others': benchmarks/nccl/other_tuner.c. What they answer is in their variables."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.compiled import PLUGIN

_SOURCES: Final = Path(__file__).parent.parent / "nccl"
FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{PLUGIN.root / 'plugin'}")


def other_tuner(made: Path, version: int, *flags: str, compiler: Sequence[str] = ("cc",)) -> Path:
    """Compile a tuner to `made`, with that version of the interface alone unless `flags` say otherwise."""
    source = _SOURCES / "other_tuner.c"
    subprocess.run([*compiler, *FLAGS, *flags, f"-DVERSION={version}", "-o", str(made), str(source)], check=True)
    return made
