"""Decisions as rows."""

from __future__ import annotations

from typing import Any, Final

from ...records import Collective, CommunicatorClass, Decision, DecisionKey, Phase
from .measurements import candidate_of

DECISION_COLUMNS: Final = (
    "n_ranks", "n_nodes", "collective", "phase", "size_class", "algorithm", "protocol", "n_channels", "chunk_bytes",
    "epoch", "kind", "reason", "predicted_us", "predicted_low_us", "predicted_high_us", "baseline_us",
    "n_measurements", "model_id", "decided_at_s", "alternatives", "step",
)  # fmt: skip


def decision_values(decision: Decision) -> tuple[Any, ...]:
    """The values of DECISION_COLUMNS."""
    key, candidate = decision.key, decision.candidate
    return (
        key.communicator.n_ranks, key.communicator.n_nodes, key.collective, key.phase, key.size_class,
        candidate.algorithm, candidate.protocol, candidate.n_channels, candidate.chunk_bytes,
        *(getattr(decision, name) for name in DECISION_COLUMNS[9:]),
    )  # fmt: skip


def decision_of(row: tuple[Any, ...]) -> Decision:
    """The decision in job_id, fabric_id and DECISION_COLUMNS."""
    job_id, fabric_id, n_ranks, n_nodes, collective, phase, size_class = row[:7]
    key = DecisionKey(CommunicatorClass(n_ranks, n_nodes), Collective(collective), Phase(phase), size_class)
    rest = dict(zip(DECISION_COLUMNS[9:], row[11:], strict=True))
    setting = candidate_of(row[7], row[8], row[9], row[10] or 0)  # an older store has no chunk sizes
    return Decision(job_id, fabric_id, key, setting, **rest)
