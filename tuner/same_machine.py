"""The hardware of a fabric by its facts, without a job's environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..agent.machine.tunable_variables import PREFIXES

Facts = Mapping[str, str | int | float | bool]

OF_JOBS: Final = ("fabric_id", "n_nodes", "n_ranks_per_node", "numerics")
"""Facts that depend on a single job."""


def hardware_of(facts: Facts) -> dict[str, str | int | float | bool]:
    """The facts of a machine without variables of NCCL and its network plugins, and without facts of a single job."""
    return {name: value for name, value in facts.items() if not name.startswith(PREFIXES) and name not in OF_JOBS}


def variables_of(facts: Facts) -> dict[str, str | int | float | bool]:
    """Variables of NCCL and its network plugins that jobs on a fabric had set."""
    return {name: value for name, value in facts.items() if name.startswith(PREFIXES)}


def same_machine(fabrics: Mapping[str, Facts], fabric_id: str) -> str | None:
    """The newest other fabric of the same hardware, whose jobs had other variables of NCCL; None: there is none.

    `fabrics` are facts by fabric_id, the oldest first.
    """
    hardware = hardware_of(fabrics.get(fabric_id, {}))
    others = [one for one, facts in fabrics.items() if one != fabric_id and hardware_of(facts) == hardware]
    return others[-1] if hardware and others else None
