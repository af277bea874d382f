"""What a replay found out."""

from __future__ import annotations

import msgspec

from zerotune.tuner.offline.replay.engine import PolicyTotal, ShapeVerdict
from zerotune.tuner.offline.replay.oracle_facts import OracleFacts
from zerotune.tuner.offline.replay.timeline.steps import StepEstimate, StepFacts, StepRefusal
from zerotune.tuner.offline.replay.whatif.whatif import WhatIf


class ReplayResult(msgspec.Struct, frozen=True):
    """What `zerotune replay` found out."""

    trace: str
    job_id: str
    fabric_id: str
    emulated: str
    """Name of the emulated fabric; empty for a real one."""
    n_files: int
    n_collectives: int
    n_timed: int
    n_steps: int
    n_dropped: int
    """Records of our own trace that were lost before they were logged."""
    dropped_percent: float
    """Their share of all records."""
    n_left_out: int
    """Collectives (of other tools' traces: records of them) that ran and were not judged."""
    left_out_percent: float
    """Their share of all that ran."""
    logged_us: float
    """Sum of the durations in the trace."""
    totals: tuple[PolicyTotal, ...]
    verdicts: tuple[ShapeVerdict, ...]
    steps: StepFacts | None = None
    step_estimates: tuple[StepEstimate, ...] = ()
    step_refusals: tuple[StepRefusal, ...] = ()
    what_if: WhatIf | None = None
    oracle: OracleFacts | None = None
    """Where the oracle is not the least that is possible; None where it was not asked for."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One JSON document."""
        return msgspec.json.encode(self).decode()
