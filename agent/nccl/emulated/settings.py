"""Sets the emulation up from the environment, once per process."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ....store.counted import counted
from ....store.errors import FabricError
from .. import fabric as fabrics
from ..emulation_settings import EmulationSettings
from ..fabric_model import Fabric
from ..release import release
from .device import clock
from .device.compute import ComputeModel
from .device.memory import device
from .torch_backend import reduction
from .torch_backend.alias import alias_as_nccl

DEFAULT_FABRIC: Final = "ethernet_boxes"

_log = logging.getLogger("zerotune")


@dataclass(frozen=True)
class Emulation:
    """The fabric and the seed that all of this process's communicators share."""

    fabric: Fabric
    seed: int


@lru_cache(maxsize=1)
def emulation() -> Emulation:
    """Read ZEROTUNE_FABRIC and `EmulationSettings`, and set up the clock.

    Raises `FabricError` or `UserError` if a value is not allowed.
    """
    name = os.environ.get("ZEROTUNE_FABRIC") or DEFAULT_FABRIC
    fabric = fabrics.load(name)
    settings = EmulationSettings.from_environment(os.environ)
    device().limit_mb = settings.device_mb
    if settings.is_alias_nccl:
        alias_as_nccl()
    current = clock.current()
    current.sms_slowdown = fabric.sms_slowdown
    reduction.order.depends_on_setting = settings.order_depends_on_setting
    current.host_ahead, current.is_exposure_known = settings.host_ahead, settings.is_exposure_known
    if settings.compute == "measured":
        current.measured_scale = settings.measured_scale
        current.skip_cpu()
    if settings.compute == "model":
        ComputeModel(fabric.compute).install()
    else:  # by then a script must have waited for its futures
        register_optimizer_step_pre_hook(lambda *_: clock.current().wait_for_futures())
    return Emulation(fabric, settings.seed)


@lru_cache(maxsize=1)
def announce(n_ranks: int) -> None:
    """Log once per run that its times are not real, and how many ranks and nodes it has."""
    settings = emulation()
    try:
        settings.fabric.refuse_more(n_ranks)
    except FabricError as error:
        _log.error("emulated NCCL: %s", error)
        return
    n_nodes = settings.fabric.n_nodes(range(n_ranks))
    _log.warning(
        "emulated NCCL: collectives run on fabric %s (%s), %s on %s; all times are those of a virtual clock, seed %d",
        settings.fabric.name, settings.fabric.title, counted(n_ranks, "rank"), counted(n_nodes, "node"), settings.seed,
    )  # fmt: skip
    _log.warning("emulated NCCL: settings are chosen by a model of %s", release(os.environ))
