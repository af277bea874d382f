"""What a rehearsal is told by the environment: `python -m benchmarks.rehearse` writes, each rank reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.rehearse.mock_gpu import MOCK_GPU, QUEUE
from zerotune.agent.nccl.fabric import load
from zerotune.agent.nccl.fabric_model import Fabric
from zerotune.store.atomic_file import atomic_write
from zerotune.store.errors import UserError
from zerotune.store.foreign.ways import make_own_folder

FABRIC: Final = "ZEROTUNE_REHEARSE"
"""A fabric, by name or file: its machine is lent, its truth is what collectives take."""
SLOWER: Final = "ZEROTUNE_REHEARSE_SLOWER"
"""All GPUs and links are so many times slower than the fabric says, so that they count beside a slow host."""
MOVES_MB: Final = "ZEROTUNE_REHEARSE_MOVES_MB"
"""Larger buffers do not travel, for hosts too slow to copy them; unset: all do."""
AHEAD: Final = "ZEROTUNE_REHEARSE_AHEAD"
"""Kernels that a stream takes before its host waits: 0 keeps hosts in step with GPUs; unset: as many as GPUs do."""
SITE_DIR: Final = Path(__file__).parent / "site"


@dataclass(frozen=True)
class Rehearsal:
    """One rank's."""

    fabric: Fabric
    slower: float
    moves_mb: float
    """10^6 bytes of each rank, per collective."""
    ahead: int = QUEUE
    """Kernels, of each stream."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Rehearsal:
        """Read it.

        Raises:
            UserError: there is no such fabric, it names no machine, or a number makes no sense.
        """
        fabric = load(environment[FABRIC])
        if fabric.node is None:
            raise UserError(f"fabric {fabric.name} names no machine to rehearse on", "add `machine` to its file")
        slower, moves_mb = _positive(environment, SLOWER, "1"), _positive(environment, MOVES_MB, "1e12")
        return cls(fabric, slower, moves_mb, _ahead(environment.get(AHEAD, str(QUEUE))))


def _ahead(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > QUEUE:
        raise UserError(
            f"{AHEAD}={text!r} is no number of kernels from 0 to {QUEUE}", "say 100, for example, or unset it"
        )
    return int(text)


def _positive(environment: Mapping[str, str], name: str, otherwise: str) -> float:
    text = environment.get(name, otherwise)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{name}={text!r} is no positive number", "say 10, for example, or unset it")
    return value


def environment_of(rehearsal: Rehearsal, environment: Mapping[str, str], cache: Path) -> dict[str, str]:
    """The environment in which every Python process rehearses.

    Args:
        rehearsal: on what.
        environment: so far.
        cache: folder for the machine's topology and the driver's name.

    Returns:
        All of it.

    Raises:
        PluginError: the mock cannot be built.
        UntrustedError: others could put a driver of theirs into the folder, which every process would load.
        OSError: the folder cannot be written.
    """
    assert rehearsal.fabric.node is not None
    folder = cache / rehearsal.fabric.fabric_id
    make_own_folder(folder.absolute(), "the rehearsal's driver", "set XDG_CACHE_HOME to a folder of your own")
    topology = folder / "topology.xml"
    with atomic_write(topology) as partial:
        partial.write_text(rehearsal.fabric.node.topology, encoding="utf-8")
    mock = MOCK_GPU.build().resolve()
    for name in ("libcuda.so.1", "libcuda.so"):  # torch opens the driver by the first, Triton links to the second
        driver = folder / name
        if not driver.is_symlink() or driver.resolve() != mock:
            driver.unlink(missing_ok=True)
            driver.symlink_to(mock)
    return {
        **environment,
        "NCCL_TOPO_FILE": str(topology),
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "TRITON_LIBCUDA_PATH": str(folder),
        "LD_LIBRARY_PATH": _with_first(str(folder), environment.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _with_first(str(SITE_DIR), environment.get("PYTHONPATH", "")),
    }


def _with_first(folder: str, path: str) -> str:
    others = [entry for entry in path.split(":") if entry and entry != folder]
    return ":".join([folder, *others])
