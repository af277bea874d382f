"""An environment for each release of torch built for CUDA, kept between runs: some seven gigabytes each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.compiled import cache_folder
from zerotune.store.foreign.ways import make_own_folder

RELEASES: Final = ("2.6.0", "2.9.1", "2.14.1")
"""The oldest that we support (CUDA 12, NCCL 2.21), one with NCCL 2.27, and the newest (CUDA 13, NCCL 2.30)."""
FRAMEWORKS: Final = ("deepspeed", "accelerate", "transformers", "lightning")
"""Beside torch; a script whose framework is missing is skipped."""
TEST_TOOLS: Final = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Imports of tests/conftest.py."""
REPOSITORY: Final = Path(__file__).parents[2]


def environments_folder() -> Path:
    return cache_folder() / "rehearse"


def python_of(release: str) -> Path:
    """Python with this torch, installed if it is not there yet.

    Raises:
        subprocess.CalledProcessError: pip failed, and has printed why.
        UntrustedError: others could put programs of theirs there.
    """
    folder = environments_folder() / f"torch-{release}"
    make_own_folder(folder, "an environment", "set XDG_CACHE_HOME to a folder of your own")
    python, ready = folder / "bin" / "python", folder / ".ready"
    install = [str(python), "-m", "pip", "install", "--quiet"]
    if not ready.exists():
        print(f"installing torch {release} for CUDA into {folder}: gigabytes, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        # numpy: torch wants it; the wheels of PyPI are those for CUDA.
        subprocess.run([*install, f"torch=={release}", "numpy"], check=True)
        subprocess.run([*install, "--editable", str(REPOSITORY)], check=True)
        for framework in FRAMEWORKS:  # some need packages that are missing here
            subprocess.run(
                [*install, framework, f"torch=={release}"], check=False, env={**os.environ, "DS_BUILD_OPS": "0"}
            )
    if not ready.exists() or ready.read_text() != str(REPOSITORY):  # another checkout may have used it since
        subprocess.run([*install, "--no-deps", "--editable", str(REPOSITORY)], check=True)
        subprocess.run([*install, *TEST_TOOLS], check=True)
        ready.write_text(str(REPOSITORY))
    return python


def tells_times(python: Path) -> bool:
    """NCCL's profiler reports kernel times there: from 2.26 on."""
    ask = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if 'nvidia-nccl' in d.name))"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split(".")
    return (int(version[0]), int(version[1])) >= (2, 26)
