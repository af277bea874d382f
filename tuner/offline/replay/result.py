"""The result of a replay: the document of `zerotune replay --json`.

`ShapeVerdict` judges one policy on one shape; `ReplayResult` is the whole result. The other structs are its
parts.
"""

from __future__ import annotations

import msgspec


class ShapeVerdict(msgspec.Struct, frozen=True):
    """One policy on one shape; costs are None if there is no evidence."""

    policy: str
    collective: str
    phase: str
    message_bytes: int
    n_ranks: int
    n_nodes: int
    n_collectives: int
    setting: str
    baseline_us: float | None
    cost_us: float | None
    low_us: float | None
    high_us: float | None
    evidence: str
    n_samples: int
    n_channels: int
    """Channels that the setting would run on; 0 = NCCL's own count."""

    @property
    def is_judged(self) -> bool:
        """Whether both the policy's and the baseline's cost are known."""
        return self.cost_us is not None and self.baseline_us is not None


class PolicyTotal(msgspec.Struct, frozen=True):
    """One policy over the judged part of the trace; intervals are 95 %."""

    policy: str
    cost_us: float
    low_us: float
    high_us: float
    baseline_us: float
    """The baseline's cost of the same collectives."""
    gain_percent: float
    gain_low_percent: float
    gain_high_percent: float
    n_judged: int
    n_refused: int
    refused_share_percent: float
    """Share without evidence, of the logged communication time, or of the bytes if the trace has no times."""
    n_by_evidence: dict[str, int]


class StepFacts(msgspec.Struct, frozen=True):
    """The logged steps (medians of those behind the program), and how they were modelled."""

    n_steps: int
    step_us: float
    exposed_us: float
    communication_us: float
    compute_us: float
    method: str
    """`overlap`: by the step's program; `first order`: by the exposed share, for the reason in `reason`."""
    reason: str = ""
    model_error_percent: float = 0.0
    noise_percent: float = 0.0
    """Standard error of `step_us`."""
    waits: dict[str, str] = {}
    """Kind of collective -> when the rank is assumed to wait for it."""

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of all communication."""
        return min(self.exposed_us / self.communication_us, 1.0) if self.communication_us > 0 else 0.0


class StepEstimate(msgspec.Struct, frozen=True):
    """A policy's step; `low_us` and `high_us` bound its step time (95 %)."""

    policy: str
    step_us: float
    low_us: float
    high_us: float
    exposed_us: float
    communication_us: float
    change_percent: float
    """Change of step time against the baseline policy; the log may have had other settings."""
    change_low_percent: float
    change_high_percent: float


class StepRefusal(msgspec.Struct, frozen=True):
    """A policy whose step is not judged, and the share of the step's communication without evidence."""

    policy: str
    refused_share_percent: float


class WhatIf(msgspec.Struct, frozen=True):
    """The changed step: its length under each policy, and the assumptions."""

    change: str
    logged_step_us: float
    """Step time of the logged job by the same kind of program."""
    n_collectives: int
    """In one step."""
    communication_bytes: int
    compute_us: float
    totals: tuple[PolicyTotal, ...]
    """Totals of one step's communication."""
    step_estimates: tuple[StepEstimate, ...]
    step_refusals: tuple[StepRefusal, ...]
    assumptions: tuple[str, ...]


class CheaperPolicy(msgspec.Struct, frozen=True):
    """A policy whose cost is below the oracle's, over the collectives for which both have costs."""

    policy: str
    below_percent: float
    n_collectives: int
    """Collectives for which the policy's setting has a lower cost."""
    n_by_evidence: dict[str, int]
    """Numbers of these collectives by the evidence of their costs."""


class OracleFacts(msgspec.Struct, frozen=True):
    """Cases in which the oracle is not the lowest possible cost."""

    n_collectives: int
    n_alone: int
    """Collectives for which only NCCL's own choice has a cost, so the oracle keeps it."""
    n_refused: int
    """Collectives without any cost."""
    cheaper: tuple[CheaperPolicy, ...] = ()


class ReplayResult(msgspec.Struct, frozen=True):
    """The result of `zerotune replay`."""

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
    """Collectives (in other tools' traces: records) that ran and were not judged."""
    left_out_percent: float
    """Share of `n_left_out` in all that ran."""
    logged_us: float
    """Sum of the durations in the trace."""
    totals: tuple[PolicyTotal, ...]
    verdicts: tuple[ShapeVerdict, ...]
    steps: StepFacts | None = None
    step_estimates: tuple[StepEstimate, ...] = ()
    step_refusals: tuple[StepRefusal, ...] = ()
    what_if: WhatIf | None = None
    oracle: OracleFacts | None = None
    """Cases in which the oracle is not the lowest possible cost; None: it was not requested."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One JSON document."""
        return msgspec.json.encode(self).decode()
