"""What the environment says about the emulation, read once per process."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from torch.optim.optimizer import register_optimizer_step_pre_hook

from agent.nccl import fabric as fabrics
from agent.nccl.emulated import clock
from agent.nccl.emulated.compute import ComputeModel
from agent.nccl.emulated.memory import device
from agent.nccl.fabric import Fabric
from store.errors import UserError

DEFAULT_FABRIC: Final = "ethernet_boxes"

_log = logging.getLogger("zerotune")


@dataclass(frozen=True)
class Emulation:
    """The fabric and the seed that all of this process's communicators share."""

    fabric: Fabric
    seed: int


@lru_cache(maxsize=1)
def emulation() -> Emulation:
    """Read ZEROTUNE_FABRIC, _SEED, _COMPUTE and _DEVICE_MB, and set the clock going.

    Raises:
        FabricError, UserError: a value makes no sense.
    """
    name = os.environ.get("ZEROTUNE_FABRIC") or DEFAULT_FABRIC
    fabric = fabrics.load(name)
    seed_text = os.environ.get("ZEROTUNE_SEED", "0")
    mode = os.environ.get("ZEROTUNE_COMPUTE", "model")
    try:
        seed = int(seed_text)
    except ValueError:
        raise UserError(f"ZEROTUNE_SEED={seed_text!r} is no integer", "say 0, for example") from None
    kind, _, scale_text = mode.partition(":")
    try:
        scale = float(scale_text or 1.0)
    except ValueError:
        scale = -1.0
    if kind not in ("model", "measured", "none") or scale <= 0:
        raise UserError(f"ZEROTUNE_COMPUTE={mode!r} is unknown", "say model, measured, measured:SCALE or none")
    device().limit_mb = _device_mb()
    current = clock.current()
    current.sms_slowdown = fabric.sms_slowdown
    if kind == "measured":
        current.measured_scale = scale
        current.skip_cpu()
    if kind == "model":
        ComputeModel(fabric.compute).install()
    else:  # whoever holds a future of a collective has waited for it by now
        register_optimizer_step_pre_hook(lambda *_: clock.current().settle())
    return Emulation(fabric, seed)


def _device_mb() -> float | None:
    text = os.environ.get("ZEROTUNE_DEVICE_MB")
    if not text:
        return None
    try:
        device_mb = float(text)
    except ValueError:
        device_mb = -1.0
    if not 0 < device_mb < float("inf"):
        raise UserError(f"ZEROTUNE_DEVICE_MB={text!r} is no amount of memory", "say 40000, for example, or unset it")
    return device_mb


@lru_cache(maxsize=1)
def announce() -> None:
    """Say once per run that its times are no real ones."""
    settings = emulation()
    _log.warning(
        "emulated NCCL: collectives run on fabric %s (%s); all times are those of a virtual clock, seed %d",
        settings.fabric.name, settings.fabric.title, settings.seed,
    )  # fmt: skip
