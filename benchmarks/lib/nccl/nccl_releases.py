"""Releases of the official libnccl, from their wheels; `python -m benchmarks nccl_releases [--all|VERSION ...]`.

They lie below ZEROTUNE_NCCL_CACHE, else the user's cache folder; they are never part of this project.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.compiled import cache_folder

TESTED: Final = ("2.27.7", "2.32.3")
"""Releases of `make test`: the oldest that reports when kernels run, one in common use, and the newest."""
ALL: Final = (
    *("2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.5", "2.27.3", "2.27.5", "2.27.7", "2.28.3", "2.28.9"),
    *("2.29.3", "2.29.7", "2.30.3", "2.30.7", "2.31.2", "2.32.3"),
)
"""Releases of `make test-releases`: at least one of each minor version from the oldest with a usable tuner."""
_MEMBER: Final = "nvidia/nccl/lib/libnccl.so.2"


def cache() -> Path:
    return Path(os.environ.get("ZEROTUNE_NCCL_CACHE", cache_folder() / "nccl-releases"))


def library_of(version: str) -> Path:
    """The path of a release's library, fetched or not."""
    return cache() / version / "libnccl.so.2"


def fetch(version: str) -> Path:
    """Downloads the release's library unless it is there. Raises RuntimeError if the wheel cannot be had."""
    library = library_of(version)
    if not library.exists():
        download("cu12", version, library)
    return library


def download(cuda: str, version: str, library: Path) -> None:
    """Take a library out of its wheel. Raises RuntimeError if the wheel cannot be had."""
    name = f"nvidia-nccl-{cuda}=={version}"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder, name]
        # pip's progress goes to stderr, as these are hundreds of megabytes.
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise RuntimeError(f"{name} cannot be downloaded: {done.stderr.strip()[-300:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extract(_MEMBER, folder)
        (Path(folder) / _MEMBER).replace(library)


def main() -> None:
    versions = ALL if sys.argv[1:] == ["--all"] else sys.argv[1:] or TESTED
    failed = False
    if missing := [version for version in versions if not library_of(version).exists()]:
        print(f"NCCL {', '.join(missing)}: downloading into {cache()}, about 400 MB each", flush=True)
    for version in versions:
        try:
            print(f"NCCL {version}: {fetch(version)}", flush=True)
        except (RuntimeError, OSError, zipfile.BadZipFile) as error:
            failed = True
            print(f"NCCL {version}: {error}; its tests are skipped", file=sys.stderr, flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
