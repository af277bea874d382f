"""Which host a run gets: NCCL's own library wherever one is found that can stand for the fabric, else our model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from zerotune.agent.nccl.fabric import Fabric
from zerotune.agent.nccl.fault_settings import read_faults
from zerotune.agent.nccl.libnccl import Libnccl, find_libnccl
from zerotune.agent.nccl.mock_cuda.layouts import layout_of
from zerotune.agent.nccl.release import release
from zerotune.store.errors import UserError

VARIABLE: Final = "ZEROTUNE_NCCL_HOST"
"""`library` or `model`; unset: the library where that is possible."""
_SHOWS_LAUNCHES_SINCE: Final = (2, 22)


class HostChoice(NamedTuple):
    """See the module."""

    library: Path | None
    """None: our model of NCCL."""
    release: str
    """Of the library, or that the model follows."""
    obstacle: str
    """Why not the library; empty where it is one."""


def choose_host(environment: Mapping[str, str], fabric: Fabric) -> HostChoice:
    """Choose, by the environment and what is installed.

    Raises:
        UserError: the environment asks for the library, which cannot be; or it asks for nonsense.
    """
    wanted = environment.get(VARIABLE, "")
    if wanted not in ("", "library", "model"):
        raise UserError(f"{VARIABLE}={wanted!r} is no host", "say library or model, or unset it")
    modelled = ".".join(map(str, release(environment).version))
    if wanted == "model":
        return HostChoice(None, modelled, f"{VARIABLE}=model")
    try:
        path, version = _usable(environment, fabric)
    except UserError as error:
        if wanted == "library":
            raise UserError(f"{VARIABLE}=library is not possible: {error.problem}", error.remedy) from None
        return HostChoice(None, modelled, error.problem)
    return HostChoice(path, version, "")


def _usable(environment: Mapping[str, str], fabric: Fabric) -> tuple[Path, str]:
    """Library and its release; UserError says why there is none."""
    if fabric.machine is None:
        raise UserError(f"fabric {fabric.name} names no machine", "add `machine` to its file")
    if read_faults(environment.get("ZEROTUNE_FAULTS", "")).forced:
        raise UserError("ZEROTUNE_FAULTS forces settings", "unset it")
    path = find_libnccl()
    if path is None:
        raise UserError("there is no libnccl", "pip install zerotune[nccl]")
    nccl = Libnccl(path)
    layout_of(nccl.version)
    if nccl.version < _SHOWS_LAUNCHES_SINCE:
        raise UserError(f"NCCL {nccl.version_text} does not show what it launches", "take 2.22 or newer")
    named = environment.get("ZEROTUNE_NCCL_VERSION")
    if named and named != nccl.version_text:
        raise UserError(f"ZEROTUNE_NCCL_VERSION={named}, and {path} is {nccl.version_text}", "unset it")
    return path, nccl.version_text
