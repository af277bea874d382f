"""Loads a shared library in another process, so that a crash or hang does no harm here."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import msgspec

PROBE_TIMEOUT_S: Final = 20.0
_PROBE: Final = """
import ctypes, json, sys
found = {}
try:
    library = ctypes.CDLL(sys.argv[1])
    name = sys.argv[1].rpartition("/")[2]
    with open("/proc/self/maps") as maps:
        paths = [line.split(None, 5)[5].strip() for line in maps if name in line]
    found["path"] = paths[0] if paths else sys.argv[1]
    found["symbols"] = [one for one in sys.argv[2:] if hasattr(library, one)]
    if hasattr(library, "ncclGetVersion"):
        version = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(version))
        found["nccl_version"] = version.value
except Exception as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


class Probed(msgspec.Struct, frozen=True):
    """The result of loading a library."""

    path: str = ""
    """Path at which the dynamic loader found it; empty if it was not loaded."""
    symbols: tuple[str, ...] = ()
    nccl_version: int = 0
    """The result of ncclGetVersion; 0 without that function."""
    error: str = ""


def probe(library: str, *symbols: str) -> Probed:
    """Load `library`, a path or a name for the dynamic loader, and look for `symbols`."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE, library, *symbols]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Probed(error=f"loading it takes longer than {PROBE_TIMEOUT_S:g} s")
    except OSError as error:
        return Probed(error=f"no process can be started to load it: {error.strerror}")
    try:
        return msgspec.json.decode(done.stdout, type=Probed)
    except msgspec.MsgspecError:
        return Probed(error=f"loading it ended its process with status {done.returncode}")
