"""Whose plugins run beside ours, in words."""

from __future__ import annotations

from ...store.records.passages import OtherPlugin, Passages


def beside(passages: Passages) -> str:
    """Other tuners and profilers, with their faults; empty where there are none."""
    return "; ".join(f"{other.role} {_named(other)}" for other in passages.others)


def baseline(passages: Passages) -> str:
    """Whose choice runs where no plan applies; empty: NCCL's alone."""
    return " or ".join(_named(other) for other in passages.others if other.role == "tuner" and other.name)


def _named(other: OtherPlugin) -> str:
    name = other.name or "of another interface, left out"
    return f"{name} ({other.n_faults:,} faults)" if other.n_faults else name
