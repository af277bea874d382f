"""What becomes known of a job after its start."""

from __future__ import annotations

from typing import TypedDict

from ...records import Stage
from ...records.lateness import Lateness
from ...records.passages import Passages


class JobNews(TypedDict, total=False):
    """News of a job; what is missing or None leaves what is known as it is."""

    stage: Stage | None
    """The kind of training that it was recognised as."""
    ended_at_s: float | None
    """When its last rank left or was heard, in seconds since the epoch."""
    is_lost: bool | None
    """Whether one of its ranks fell silent."""
    failure: str | None
    """The rank whose script an exception ended, and which."""
    training: str | None
    """What all starts of the same training on the same hardware have in common."""
    environment: str | None
    """Variables that it was started with, for trial or for good, as `NAME=VALUE` with spaces between."""
    name: str | None
    """What people call it."""
    passages: Passages | None
    """What passed the tuner by in it."""
    lateness: Lateness | None
    """Which of its ranks collectives wait for."""
