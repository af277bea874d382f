"""The emulation's environment variables; `launch` checks them, and each rank reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ...store.errors import UserError
from ...store.records import Collective
from . import pinning
from .channel_limit import channel_limit
from .fault_settings import read_faults
from .release import release

STEPS_AHEAD: Final = ("0", "1", "2", "3", "4")


@dataclass(frozen=True)
class EmulationSettings:
    """ZEROTUNE_SEED, _COMPUTE, _DEVICE_MB, _BACKEND_NAME, _HOST_AHEAD, _EXPOSURE and _SUMS."""

    seed: int
    compute: str
    """`model`, `measured` or `none`."""
    measured_scale: float
    device_mb: float | None
    """Memory of a device, 10^6 bytes; None: the fabric's."""
    is_alias_nccl: bool
    """Whether groups report their backend to scripts as `nccl`."""
    host_ahead: int = 0
    """Steps by which the host runs ahead of the device."""
    is_exposure_known: bool = True
    """False: exposed communication is unknown, as on a GPU."""
    order_depends_on_setting: bool = False
    """True: the order of additions depends on the setting, as it may in NCCL. False: it is the order of ranks."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EmulationSettings:
        """Read them, and check all further variables that the emulation reads later; UserError for a wrong value."""
        release(environment)
        read_faults(environment.get("ZEROTUNE_FAULTS", ""))
        channel_limit(environment, 1)
        _check_pinning(environment)
        seed_text = environment.get("ZEROTUNE_SEED", "0")
        try:
            seed = int(seed_text)
        except ValueError:
            raise UserError(f"ZEROTUNE_SEED={seed_text!r} is not an integer", "say 0, for example") from None
        mode = environment.get("ZEROTUNE_COMPUTE", "model")
        compute, _, scale_text = mode.partition(":")
        scale = _positive(scale_text or "1")
        if compute not in ("model", "measured", "none") or scale is None:
            raise UserError(f"ZEROTUNE_COMPUTE={mode!r} is unknown", "say model, measured, measured:SCALE or none")
        memory_text = environment.get("ZEROTUNE_DEVICE_MB")
        device_mb = _positive(memory_text) if memory_text else None
        if memory_text and device_mb is None:
            remedy = "say 40000, for example, or unset it"
            raise UserError(f"ZEROTUNE_DEVICE_MB={memory_text!r} is not an amount of memory", remedy)
        name = environment.get("ZEROTUNE_BACKEND_NAME", "")
        if name not in ("", "emulated_nccl", "nccl"):
            raise UserError(f"ZEROTUNE_BACKEND_NAME={name!r} is not a name of the backend", "say nccl, or unset it")
        ahead = environment.get("ZEROTUNE_HOST_AHEAD", "0")
        if ahead not in STEPS_AHEAD:
            raise UserError(f"ZEROTUNE_HOST_AHEAD={ahead!r} is not a number of steps from 0 to 4", "say 0, or unset it")
        exposure = environment.get("ZEROTUNE_EXPOSURE", "known")
        if exposure not in ("known", "hidden"):
            raise UserError(f"ZEROTUNE_EXPOSURE={exposure!r} is unknown", "say known or hidden")
        sums = environment.get("ZEROTUNE_SUMS", "by_rank")
        if sums not in ("by_rank", "by_setting"):
            raise UserError(f"ZEROTUNE_SUMS={sums!r} is unknown", "say by_rank or by_setting")
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
