"""Decisions as records that `zerotune explain` can print long after the job has ended."""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np

from store.records import BASELINE, Candidate, Decision
from tuner.policy.choice import Event
from tuner.policy.evidence import Evidence
from tuner.policy.field import Field
from tuner.policy.trial import KeyState

Z_90 = 1.645


def decision(
    *,
    job_id: str,
    fabric_id: str,
    model_id: str,
    epoch: int,
    now_s: float,
    event: Event,
    field: Field,
    evidence: Evidence,
) -> Decision:
    """The record of one decision, with the whole field it was taken from.

    Predictions are those of when the key was last looked at, before the candidate's own trial; until then
    they are the starting guess.
    """
    state, candidate = event.state, event.candidate
    mean, spread = state.opinion or (field.table[:, 4], field.table[:, 5])
    if len(mean) != len(field.options):  # the key was looked at before its options changed
        mean, spread = field.table[:, 4], field.table[:, 5]
    predicted = np.round(np.exp(np.stack([mean, mean - Z_90 * spread, mean + Z_90 * spread], axis=1)), 3)
    is_known: list[bool] = np.all(np.isfinite(predicted), axis=1).tolist()
    at = field.place.get(candidate)
    own = predicted[at].tolist() if at is not None and is_known[at] else [None, None, None]
    measured = {
        evidence.candidates[slot]: (round(math.exp(evidence.log_us(slot)), 3), int(evidence.n_calls[slot]))
        for slot in evidence.slots_of(state.index)
        if evidence.n_calls[slot]
    }
    rows = predicted.tolist()
    alternatives = [
        _alternative(field.options[index], rows[index], measured, state)
        for index in np.argsort(predicted[:, 0]).tolist()
        if is_known[index]
    ]
    return Decision(
        job_id=job_id,
        fabric_id=fabric_id,
        key=state.key,
        candidate=candidate,
        epoch=epoch,
        kind=event.kind,
        reason=event.reason,
        predicted_us=own[0],
        predicted_low_us=own[1],
        predicted_high_us=own[2],
        baseline_us=measured.get(BASELINE, (None, 0))[0],
        n_measurements=measured.get(candidate, (None, 0))[1],
        model_id=model_id,
        decided_at_s=now_s,
        alternatives=msgspec.json.encode(alternatives).decode(),
    )


def _alternative(
    option: Candidate, predicted: list[float], measured: dict[Candidate, tuple[float, int]], state: KeyState
) -> dict[str, str | float | int | None]:
    measured_us, count = measured.get(option, (None, 0))
    return {
        "candidate": _name(option),
        "predicted_us": predicted[0],
        "predicted_low_us": predicted[1],
        "predicted_high_us": predicted[2],
        "measured_us": measured_us,
        "n_measurements": count,
        "note": state.banned.get(option) or state.retired.get(option) or state.ties.get(option) or "",
    }


@lru_cache(maxsize=4096)
def _name(candidate: Candidate) -> str:
    return str(candidate)
