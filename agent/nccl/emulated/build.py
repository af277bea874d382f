"""Compiles the emulated NCCL's C sources on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

from zerotune.agent.nccl.build_folder import may_hold_builds
from zerotune.store.errors import PluginError

SOURCES: Final = ("transport/rendezvous.c", "host/host.c")
INCLUDED: Final = "../plugin/nccl_abi.h"
FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def build() -> Path:
    """Path of the compiled library, which is built when its sources have changed.

    Raises:
        PluginError: no C compiler, it refuses the sources, or there is no folder for the library.
    """
    folder = Path(__file__).parent
    sources = [folder / name for name in SOURCES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, folder / INCLUDED))).hexdigest()[:12]
    name = f"emulated-{digest}.so"
    places = [folder, user_cache_path("zerotune")]
    for place in places:
        if (place / name).exists():
            return place / name
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise PluginError("no C compiler found; the emulated NCCL needs one: install gcc or set CC")
    place = folder if may_hold_builds(folder) else places[1]
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PluginError(f"the emulated NCCL cannot be compiled to {place}: {error}; set XDG_CACHE_HOME") from error
    draft = place / f"{name}.{os.getpid()}"  # ranks may build at once: each its own, then one atomic rename
    run = subprocess.run(
        [compiler, *FLAGS, *map(str, sources), "-o", str(draft)], capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise PluginError(f"{compiler} cannot compile the emulated NCCL: {run.stderr.strip()[:2000]}")
    for stale in place.glob("emulated-*.so"):
        if stale.name != name:
            stale.unlink(missing_ok=True)  # whoever has it loaded keeps it
    draft.replace(place / name)
    return place / name
