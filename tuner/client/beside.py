"""Plugins that run beside ours, in words."""

from __future__ import annotations

from ...store.records.passages import OtherPlugin, Passages


def beside(passages: Passages) -> str:
    """Other tuners and profilers, with their faults; empty without any."""
    return "; ".join(f"{other.role} {_named(other)}" for other in passages.others)


def baseline(passages: Passages) -> str:
    """The plugin whose choice runs if no plan applies; empty: NCCL's own choice."""
    return " or ".join(_named(other) for other in passages.others if other.role == "tuner" and other.name)


def _named(other: OtherPlugin) -> str:
    name = other.name or "of another interface, left out"
    return f"{name} ({other.n_faults:,} faults)" if other.n_faults else name
