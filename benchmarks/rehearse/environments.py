"""An environment for each release of torch built for CUDA, kept between runs: some seven gigabytes each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

RELEASES: Final = ("2.6.0", "2.9.1", "2.13.0")
"""The oldest that we support, one with NCCL 2.27, and the one that is tested most."""
FRAMEWORKS: Final = ("deepspeed", "accelerate", "transformers", "lightning")
"""Beside torch; a script whose framework is missing is skipped."""
REPOSITORY: Final = Path(__file__).parents[2]


def environments_folder() -> Path:
    """Where they are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotune" / "rehearse"


def python_of(release: str) -> Path:
    """Python with this torch, installed if it is not there yet.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    folder = environments_folder() / f"torch-{release}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"installing torch {release} for CUDA into {folder}: gigabytes, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        # numpy: torch wants it; the wheels of PyPI are those for CUDA.
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={release}", "numpy"], check=True)
        subprocess.run([*install, "--editable", REPOSITORY, "pytest", "pytest-timeout", "pytest-xdist"], check=True)
        for framework in FRAMEWORKS:  # some build on what is not here
            subprocess.run(
                [*install, framework, f"torch=={release}"], check=False, env={**os.environ, "DS_BUILD_OPS": "0"}
            )
        ready.touch()
    return python
