"""Runs all checks within a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from . import left_over, nccl, network, peer_to_peer, service, software
from .findings import Check, Finding, Machine, Status, warning

TIME_LIMIT_S: Final = 30.0
"""Time for all checks together; they run in parallel."""
CHECKS: Final[dict[str, Check]] = {
    "python": software.python,
    "torch": software.torch,
    "gpu": software.gpu,
    "compiler": software.compiler,
    "plugin": nccl.plugin,
    "nccl": nccl.nccl,
    "other_plugins": nccl.other_plugins,
    "pins": nccl.pins,
    "interfaces": left_over.interfaces,
    "nccl_files": left_over.nccl_files,
    "logging": left_over.logging,
    "network": network.network,
    "gpudirect": peer_to_peer.gpudirect,
    "acs": peer_to_peer.acs,
    "iommu": peer_to_peer.iommu,
    "nearest_adapter": peer_to_peer.nearest_adapter,
    "runtime_folder": service.runtime_folder,
    "daemon": service.daemon,
    "store": service.store,
    "keys": service.keys,
}
"""The checks by code, in the order of the output."""


def examine(machine: Machine, *, limit_s: float = TIME_LIMIT_S) -> list[Finding]:
    """The findings of all checks; a check that fails or takes too long is a finding, too."""
    found: dict[str, Finding | None] = {}

    def run(code: str, check: Check) -> None:
        try:
            found[code] = check(machine)
        except Exception as error:  # a failing check must not hide the others' findings
            found[code] = warning(code, f"cannot be checked: {error!r}", "please report this")

    # Daemon threads, since a driver or a disk that hangs cannot be interrupted and must not delay the exit.
    threads = [threading.Thread(target=run, args=one, daemon=True) for one in CHECKS.items()]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    silent = "look at what it needs: a driver, a disk or a network that hangs"
    late = {code: Finding(code, Status.problem, f"no answer within {limit_s:g} s", silent) for code in CHECKS}
    return [one for code in CHECKS if (one := found.get(code, late[code])) is not None]


def worst(findings: Sequence[Finding]) -> Status:
    """The worst status among them."""
    order = list(Status)
    return max((one.status for one in findings), key=order.index, default=Status.ok)
