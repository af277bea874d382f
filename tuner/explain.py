"""Decisions as records that `zerotune explain` can print long after the job has ended."""

from __future__ import annotations

import json
import math

from store.records import BASELINE, Candidate, Decision
from tuner.features import Floats
from tuner.policy.evidence import Evidence
from tuner.policy.trial import KeyState

Z_90 = 1.645


def decision(
    *,
    job_id: str,
    fabric_id: str,
    model_id: str,
    epoch: int,
    now_s: float,
    state: KeyState,
    candidate: Candidate,
    kind: str,
    reason: str,
    evidence: Evidence,
    posterior: tuple[Floats, Floats],
) -> Decision:
    """The record of one decision, with the whole field it was taken from."""
    mean, spread = posterior
    place = {option: index for index, option in enumerate(state.options)}.get(candidate)
    alternatives = [
        _alternative(option, float(mean[index]), float(spread[index]), state, evidence)
        for index, option in enumerate(state.options)
        if math.isfinite(mean[index])
    ]
    alternatives.sort(key=lambda line: float(str(line["predicted_us"])))
    baseline_us, _ = _measured(state, BASELINE, evidence)
    _, n_measurements = _measured(state, candidate, evidence)
    known = place is not None and math.isfinite(mean[place])
    log_us, log_std = (float(mean[place]), float(spread[place])) if known and place is not None else (0.0, 0.0)
    return Decision(
        job_id=job_id,
        fabric_id=fabric_id,
        key=state.key,
        candidate=candidate,
        epoch=epoch,
        kind=kind,
        reason=reason,
        predicted_us=math.exp(log_us) if known else None,
        predicted_low_us=math.exp(log_us - Z_90 * log_std) if known else None,
        predicted_high_us=math.exp(log_us + Z_90 * log_std) if known else None,
        baseline_us=baseline_us,
        n_measurements=n_measurements,
        model_id=model_id,
        decided_at_s=now_s,
        alternatives=json.dumps(alternatives),
    )


def _alternative(
    option: Candidate, log_us: float, log_std: float, state: KeyState, evidence: Evidence
) -> dict[str, str | float | int | None]:
    measured_us, count = _measured(state, option, evidence)
    return {
        "candidate": str(option),
        "predicted_us": round(math.exp(log_us), 3),
        "predicted_low_us": round(math.exp(log_us - Z_90 * log_std), 3),
        "predicted_high_us": round(math.exp(log_us + Z_90 * log_std), 3),
        "measured_us": measured_us,
        "n_measurements": count,
        "note": state.banned.get(option) or state.retired.get(option) or "",
    }


def _measured(state: KeyState, candidate: Candidate, evidence: Evidence) -> tuple[float | None, int]:
    slot = evidence.find(state.index, candidate)
    if slot is None or not evidence.n_calls[slot]:
        return None, 0
    return round(math.exp(evidence.log_us(slot)), 3), int(evidence.n_calls[slot])
