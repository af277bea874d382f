"""Decisions: why a plan's row is what it is."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from .keys import DecisionKey
from .nccl import Candidate


class DecisionKind(str, Enum):
    """The subject of a decision; those from `pace` on concern the whole job."""

    explore = "explore"
    promote = "promote"
    keep = "keep"
    rollback = "rollback"
    prior = "prior"
    """Known from earlier jobs."""
    provisional = "provisional"
    """The candidate runs in most steps, though it is not proven to be faster."""
    pace = "pace"
    """Training itself became faster or slower."""
    regime = "regime"
    """The network's state has changed."""
    variant = "variant"
    """Another plan was compared with the one in force."""
    takeover = "takeover"
    """Another daemon began to decide."""
    shadow = "shadow"
    """The gain that a daemon with --shadow would have reached."""
    control = "control"
    """NCCL's own choice runs for a control window, under this epoch."""
    freeze = "freeze"
    """Nothing new is tried from this step on."""


class Decision(msgspec.Struct, frozen=True):
    """The reason for one row of a plan; `zerotune explain` reads it."""

    job_id: str
    fabric_id: str
    key: DecisionKey
    candidate: Candidate
    epoch: int
    kind: str
    """Value of a `DecisionKind`, or a kind of an older version."""
    reason: str
    predicted_us: float | None = None
    predicted_low_us: float | None = None
    predicted_high_us: float | None = None
    baseline_us: float | None = None
    n_measurements: int = 0
    model_id: str = ""
    decided_at_s: float = 0.0
    alternatives: str = "[]"
    """JSON list of the other candidates: setting, predicted interval, measured median and count."""
    step: int | None = None
    """The newest step known when this was decided; for kind `pace`, the step that showed the change.

    None in decisions of older versions.
    """

    @property
    def is_control(self) -> bool:
        """Whether this only records a control window; a job has many such decisions, all alike."""
        return self.kind == DecisionKind.control

    @property
    def is_of_job(self) -> bool:
        """Whether this concerns the whole job; its key is then only one of those concerned."""
        return self.kind in OF_JOB


OF_JOB: Final = tuple(DecisionKind)[tuple(DecisionKind).index(DecisionKind.pace) :]
