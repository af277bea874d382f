"""What runs on although the budget is overdrawn: what has cost all that it will."""

from __future__ import annotations

from collections.abc import Container, Iterable

from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.trials.trial import KeyState


def pays_back(
    trials: Iterable[KeyState], leads: Iterable[KeyState], evidence: Evidence, doubted: Container[int]
) -> list[int]:
    """Keys at which going on with the trial, or the lead where there is no trial, pays back what it has cost.

    It is measured to be faster, or was connected at a price; to stop would not undo the cost.

    Args:
        trials: keys with a trial.
        leads: keys with a lead.
        evidence: of the regime in force.
        doubted: slots that were seen to be slow.

    Returns:
        Key indices.
    """
    explored = [(state, state.trial) for state in trials]
    explored += [(state, state.lead) for state in leads if state.trial is None]
    return [state.index for state, candidate in explored if _is_paid(state, candidate, evidence, doubted)]


def _is_paid(state: KeyState, candidate: Candidate | None, evidence: Evidence, doubted: Container[int]) -> bool:
    slot = None if candidate is None else evidence.find(state.index, candidate)
    incumbent = evidence.find(state.index, state.incumbent)
    if slot is None or incumbent is None or slot in doubted:
        return False
    if not evidence.n_calls[slot]:
        return bool(evidence.extra_us[slot] > 0)
    return evidence.log_us(slot) < evidence.log_us(incumbent)
