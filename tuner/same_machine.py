"""What a fabric is called by its facts, apart from what the environment of a job made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..agent.machine.tunable_variables import PREFIXES

Facts = Mapping[str, str | int | float | bool]

OF_JOBS: Final = ("fabric_id", "n_nodes", "n_ranks_per_node", "numerics")
"""What a single job does on a machine."""


def hardware_of(facts: Facts) -> dict[str, str | int | float | bool]:
    """A machine without variables of NCCL and its network plugins, and without what a single job does."""
    return {name: value for name, value in facts.items() if not name.startswith(PREFIXES) and name not in OF_JOBS}


def variables_of(facts: Facts) -> dict[str, str | int | float | bool]:
    """Variables of NCCL and its network plugins that jobs on a fabric had set."""
    return {name: value for name, value in facts.items() if name.startswith(PREFIXES)}


def same_machine(fabrics: Mapping[str, Facts], fabric_id: str) -> str | None:
    """The newest other fabric of the same hardware, which jobs with other variables of NCCL ran on; None: none did.

    Args:
        fabrics: facts by fabric_id, the oldest first.
    """
    hardware = hardware_of(fabrics.get(fabric_id, {}))
    others = [one for one, facts in fabrics.items() if one != fabric_id and hardware_of(facts) == hardware]
    return others[-1] if hardware and others else None
