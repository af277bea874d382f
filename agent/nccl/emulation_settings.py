"""What the environment says about the emulation, and who is NCCL in it; read by each rank, and by `launch` before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from zerotune.agent.nccl import pinning
from zerotune.agent.nccl.channel_limit import channel_limit
from zerotune.agent.nccl.compiled import MOCK_CUDA
from zerotune.agent.nccl.fabric import Fabric
from zerotune.agent.nccl.fault_settings import read_faults
from zerotune.agent.nccl.libnccl import Libnccl, find_libnccl
from zerotune.agent.nccl.mock_cuda.layouts import layout_of
from zerotune.agent.nccl.mock_cuda.mock import refuse_beside_a_driver
from zerotune.agent.nccl.mock_cuda.symbols import functions
from zerotune.agent.nccl.release import release
from zerotune.store.errors import PluginError, UserError
from zerotune.store.records import Collective

STEPS_AHEAD: Final = ("0", "1", "2", "3", "4")


@dataclass(frozen=True)
class EmulationSettings:
    """ZEROTUNE_SEED, _COMPUTE, _DEVICE_MB, _BACKEND_NAME, _HOST_AHEAD, _EXPOSURE and _SUMS; others are only checked."""

    seed: int
    compute: str
    """`model`, `measured` or `none`."""
    measured_scale: float
    device_mb: float | None
    """Memory of a device, 10^6 bytes; None: as the fabric says."""
    answers_to_nccl: bool
    """Whether scripts hear that the backend is `nccl`."""
    host_ahead: int = 0
    """Steps by which the host runs ahead of the device."""
    is_exposure_known: bool = True
    """False: as on a GPU, nobody is told what computation waited for."""
    adds_by_setting: bool = False
    """Sums are added up in an order that goes with the setting, as NCCL may; else always in the order of ranks."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EmulationSettings:
        """Read them, and check all variables that the ranks will read later.

        Raises:
            UserError: a value makes no sense.
        """
        release(environment)
        read_faults(environment.get("ZEROTUNE_FAULTS", ""))
        channel_limit(environment, 1)
        _check_pinning(environment)
        seed_text = environment.get("ZEROTUNE_SEED", "0")
        try:
            seed = int(seed_text)
        except ValueError:
            raise UserError(f"ZEROTUNE_SEED={seed_text!r} is no integer", "say 0, for example") from None
        mode = environment.get("ZEROTUNE_COMPUTE", "model")
        compute, _, scale_text = mode.partition(":")
        scale = _positive(scale_text or "1")
        if compute not in ("model", "measured", "none") or scale is None:
            raise UserError(f"ZEROTUNE_COMPUTE={mode!r} is unknown", "say model, measured, measured:SCALE or none")
        memory_text = environment.get("ZEROTUNE_DEVICE_MB")
        device_mb = _positive(memory_text) if memory_text else None
        if memory_text and device_mb is None:
            remedy = "say 40000, for example, or unset it"
            raise UserError(f"ZEROTUNE_DEVICE_MB={memory_text!r} is no amount of memory", remedy)
        name = environment.get("ZEROTUNE_BACKEND_NAME", "")
        if name not in ("", "emulated_nccl", "nccl"):
            raise UserError(f"ZEROTUNE_BACKEND_NAME={name!r} is no name of the backend", "say nccl, or unset it")
        ahead = environment.get("ZEROTUNE_HOST_AHEAD", "0")
        if ahead not in STEPS_AHEAD:
            raise UserError(f"ZEROTUNE_HOST_AHEAD={ahead!r} is no number of steps from 0 to 4", "say 0, or unset it")
        exposure = environment.get("ZEROTUNE_EXPOSURE", "known")
        if exposure not in ("known", "hidden"):
            raise UserError(f"ZEROTUNE_EXPOSURE={exposure!r} is unknown", "say known or hidden")
        sums = environment.get("ZEROTUNE_SUMS", "by_rank")
        if sums not in ("by_rank", "by_setting"):
            raise UserError(f"ZEROTUNE_SUMS={sums!r} is no order", "say by_rank or by_setting")
        is_nccl, is_known = name == "nccl", exposure == "known"
        return cls(seed, compute, scale, device_mb, is_nccl, int(ahead), is_known, sums == "by_setting")


def _check_pinning(environment: Mapping[str, str]) -> None:
    for name in pinning.PINNING:
        try:
            pinning.allowed_cells({name: environment.get(name, "")}, Collective.all_reduce)
        except UserError as error:
            raise UserError(f"{name}={environment[name]!r}: {error.problem}", f"{error.remedy}, or unset it") from None


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


HOST_VARIABLE: Final = "ZEROTUNE_NCCL_HOST"
"""`library` or `model`; unset: the library where that is possible."""
_SHOWS_LAUNCHES_SINCE: Final = (2, 22)
_TAKES_NO_PATHS: Final = (2, 27, 3)


class HostChoice(NamedTuple):
    """Who decides: NCCL's own library wherever one is found that can stand for the fabric, else our model of NCCL."""

    library: Path | None
    """None: our model of NCCL."""
    release: str
    """Of the library, or that the model follows."""
    obstacle: str
    """Why not the library; empty where it is one."""

    def __str__(self) -> str:
        if self.library is None:
            return f"settings are chosen by a model of NCCL {self.release}: {self.obstacle}"
        return f"settings are chosen by NCCL {self.release} itself ({self.library})"


def choose_host(environment: Mapping[str, str], fabric: Fabric) -> HostChoice:
    """Choose, by the environment and what is installed.

    Raises:
        UserError: the environment asks for the library, which cannot be; or it asks for nonsense.
    """
    wanted = environment.get(HOST_VARIABLE, "")
    if wanted not in ("", "library", "model"):
        raise UserError(f"{HOST_VARIABLE}={wanted!r} is no host", "say library or model, or unset it")
    modelled = ".".join(map(str, release(environment).version))
    if wanted == "model":
        return HostChoice(None, modelled, f"{HOST_VARIABLE}=model")
    try:
        path, version = _usable(environment, fabric)
    except PluginError as error:
        obstacle, remedy = str(error), "install a C compiler, or unset it"
    except UserError as error:
        obstacle, remedy = error.problem, error.remedy
    else:
        return HostChoice(path, version, "")
    if wanted == "library":
        raise UserError(f"{HOST_VARIABLE}=library is not possible: {obstacle}", remedy)
    return HostChoice(None, modelled, obstacle)


def _usable(environment: Mapping[str, str], fabric: Fabric) -> tuple[Path, str]:
    """Library and its release; UserError says why there is none."""
    if fabric.node is None:
        raise UserError(f"fabric {fabric.name} names no machine", "add `machine` to its file")
    if read_faults(environment.get("ZEROTUNE_FAULTS", "")).forced:
        raise UserError("ZEROTUNE_FAULTS forces settings", "unset it")
    path = find_libnccl()
    if path is None:
        raise UserError("there is no libnccl", "pip install zerotune[nccl]")
    refuse_beside_a_driver()
    MOCK_CUDA.build()
    nccl = Libnccl(path)
    functions(path)  # the mock needs them: a library that is stripped must be refused before ranks start
    layout_of(nccl.version)
    if nccl.version == _TAKES_NO_PATHS:
        raise UserError(f"NCCL {nccl.version_text} takes no plugin by its path, so no network", "take another release")
    if nccl.version < _SHOWS_LAUNCHES_SINCE:
        raise UserError(f"NCCL {nccl.version_text} does not show what it launches", "take 2.22 or newer")
    named = environment.get("ZEROTUNE_NCCL_VERSION")
    if named and named != nccl.version_text:
        raise UserError(f"ZEROTUNE_NCCL_VERSION={named}, and {path} is {nccl.version_text}", "unset it")
    return path, nccl.version_text
