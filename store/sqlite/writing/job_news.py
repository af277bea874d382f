"""News of a job after its start."""

from __future__ import annotations

from typing import TypedDict

from ...records import Stage
from ...records.lateness import Lateness
from ...records.passages import Passages


class JobNews(TypedDict, total=False):
    """News of a job, fields of `JobRecord`; those that are missing or None change nothing."""

    stage: Stage | None
    ended_at_s: float | None
    """When its last rank left or was heard, in seconds since the epoch."""
    is_lost: bool | None
    failure: str | None
    training: str | None
    environment: str | None
    name: str | None
    passages: Passages | None
    lateness: Lateness | None
