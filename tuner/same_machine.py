"""What a fabric is called by its facts, apart from what the environment of a job made of it."""

from __future__ import annotations

from collections.abc import Mapping

Facts = Mapping[str, str | int | float | bool]

OF_JOBS = ("fabric_id", "n_nodes", "n_ranks_per_node", "numerics")
"""What a single job does on a machine."""


def hardware_of(facts: Facts) -> Facts:
    """A machine without NCCL's variables, and without what a single job does."""
    return {name: value for name, value in facts.items() if not name.startswith("NCCL_") and name not in OF_JOBS}


def same_machine(fabrics: Mapping[str, Facts], fabric_id: str) -> str | None:
    """The newest other fabric of the same hardware, which jobs with other variables of NCCL ran on; None: none did.

    Args:
        fabrics: facts by fabric_id, the oldest first.
    """
    hardware = hardware_of(fabrics.get(fabric_id, {}))
    others = [one for one, facts in fabrics.items() if one != fabric_id and hardware_of(facts) == hardware]
    return others[-1] if hardware and others else None
