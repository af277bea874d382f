"""What the environment says about the emulation, read once per process."""

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
from ..fabric import Fabric
from ..release import release
from .device import clock
from .device.compute import ComputeModel
from .device.memory import device
from .torch_backend import reduction
from .torch_backend.alias import answer_to_nccl

DEFAULT_FABRIC: Final = "ethernet_boxes"

_log = logging.getLogger("zerotune")


@dataclass(frozen=True)
class Emulation:
    """The fabric and the seed that all of this process's communicators share."""

    fabric: Fabric
    seed: int


@lru_cache(maxsize=1)
def emulation() -> Emulation:
    """Read ZEROTUNE_FABRIC and what `EmulationSettings` says, and set the clock going.

    Raises:
        FabricError, UserError: a value makes no sense.
    """
    name = os.environ.get("ZEROTUNE_FABRIC") or DEFAULT_FABRIC
    fabric = fabrics.load(name)
    said = EmulationSettings.from_environment(os.environ)
    device().limit_mb = said.device_mb
    if said.answers_to_nccl:
        answer_to_nccl()
    current = clock.current()
    current.sms_slowdown = fabric.sms_slowdown
    reduction.order.goes_with_setting = said.adds_by_setting
    current.host_ahead, current.is_exposure_known = said.host_ahead, said.is_exposure_known
    if said.compute == "measured":
        current.measured_scale = said.measured_scale
        current.skip_cpu()
    if said.compute == "model":
        ComputeModel(fabric.compute).install()
    else:  # whoever holds a future of a collective has waited for it by now
        register_optimizer_step_pre_hook(lambda *_: clock.current().settle())
    return Emulation(fabric, said.seed)


@lru_cache(maxsize=1)
def announce(n_ranks: int) -> None:
    """Say once per run that its times are not real, and on how much of the fabric it runs.

    Args:
        n_ranks: of the run.
    """
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
