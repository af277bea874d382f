"""Decisions and failures in one line each."""

from __future__ import annotations

from ...store.records import Decision, size_class_floor


def failure_of(rank: int, failure: str) -> str | None:
    """Text about an exception of type `failure` that ended a rank's script; None without one."""
    return f"rank {rank}: {failure if failure.isidentifier() else 'an exception'}" if failure else None


def headline(decision: Decision) -> str:
    """A decision in one line."""
    if decision.is_of_job:
        return f"epoch {decision.epoch}: {decision.reason}"
    key = decision.key
    what = f"{key.collective.name} {key.phase.name} from {size_class_floor(key.size_class)} bytes"
    return f"epoch {decision.epoch}: {decision.kind} {decision.candidate} for {what}: {decision.reason}"
