"""What the environment says about the emulation; read by each rank, and by `launch` before it starts any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from store.errors import UserError


@dataclass(frozen=True)
class EmulationSettings:
    """ZEROTUNE_SEED, _COMPUTE and _DEVICE_MB."""

    seed: int
    compute: str
    """`model`, `measured` or `none`."""
    measured_scale: float
    device_mb: float | None
    """None: what the fabric says."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EmulationSettings:
        """Read them.

        Raises:
            UserError: a value makes no sense.
        """
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
        return cls(seed, compute, scale, device_mb)


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
