"""Compiles plugins that stand for foreign ones: benchmarks/nccl/other_*.c. Their variables control them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.compiled import PLUGIN

_SOURCES: Final = Path(__file__).parents[2] / "nccl"
FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{PLUGIN.root / 'plugin'}")


def other_tuner(made: Path, version: int, *flags: str) -> Path:
    return _compiled("other_tuner.c", made, f"-DVERSION={version}", *flags)


def other_profiler(made: Path, version: int, *flags: str) -> Path:
    return _compiled("other_profiler.c", made, f"-DVERSION={version}", *flags)


def _compiled(source: str, made: Path, *flags: str) -> Path:
    subprocess.run(["cc", *FLAGS, *flags, "-o", str(made), str(_SOURCES / source)], check=True)
    return made
