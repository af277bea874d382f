"""News of a job after its start."""

from __future__ import annotations

from typing import TypedDict

from ...records import Stage
from ...records.lateness import Lateness
from ...records.passages import Passages


class JobNews(TypedDict, total=False):
    """News of a job; fields that are missing or None change nothing."""

    stage: Stage | None
    """The recognised kind of training."""
    ended_at_s: float | None
    """When its last rank left or was heard, in seconds since the epoch."""
    is_lost: bool | None
    """Whether one of its ranks fell silent."""
    failure: str | None
    """The rank whose script ended by an exception, and that exception's type."""
    training: str | None
    """What all starts of the same training on the same hardware have in common."""
    environment: str | None
    """Variables set at its start, as a trial or permanently, as `NAME=VALUE` separated by spaces."""
    name: str | None
    """The name that the user gave it."""
    passages: Passages | None
    """Its collectives with and without the tuner's decision."""
    lateness: Lateness | None
    """Which of its ranks collectives wait for."""
