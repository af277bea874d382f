"""Decisions as records that `zerotune explain` can print long after the job has ended."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ....store.records import BASELINE, OF_JOB, Candidate, Decision, DecisionKind
from ...modeling.features import Floats
from ..policy.choice import Event
from ..policy.keys import CandidateTable, KeyState
from ..policy.observations import CallEvidence
from .words import Z_90


class _Measured(NamedTuple):
    us: float | None
    """Mean of the calls' logs with stragglers clipped; verdicts compare these."""
    n_calls: int
    spent_us: float
    """Charge on the budget for trying it, beyond the incumbent's time."""


_NOT_MEASURED: Final = _Measured(None, 0, 0.0)


def decision(
    *,
    job_id: str,
    fabric_id: str,
    model_id: str,
    epoch: int,
    now_s: float,
    event: Event,
    field: CandidateTable,
    evidence: CallEvidence,
) -> Decision:
    """The store's record of one decision at `now_s` (seconds since the epoch), with all options of its key.

    Predictions are those of the last look at the key with later measurements, or the starting guess (`is_guess`).
    `epoch` is that of the plan that carries the decision out. `evidence` must be of the regime in force.
    """
    state, candidate = event.state, event.candidate
    # The options may have changed since the key was looked at.
    is_guess = state.last_posterior is None or len(state.last_posterior[0]) != len(field.options)
    guess = field.table[:, 4], field.table[:, 5]
    slots: list[int] = np.flatnonzero(evidence.key[: len(evidence)] == state.index).tolist()
    if not is_guess and state.last_posterior is not None:
        mean, spread = state.last_posterior
        guess = _up_to_date(mean.tolist(), spread.tolist(), state.index, slots, field, evidence)
    predicted = _intervals(*guess)
    at = field.place.get(candidate)
    own = predicted[at] if at is not None and all(map(math.isfinite, predicted[at])) else [None, None, None]
    measured = {
        evidence.candidates[slot]: _Measured(
            round(math.exp(evidence.log_us(slot)), 3),
            int(evidence.n_calls[slot]),
            round(max(0.0, float(evidence.extra_us[slot])), 3),
        )
        for slot in slots
        if evidence.n_calls[slot]
    }
    now_us = measured.get(state.usual, _NOT_MEASURED).us
    predicted_gain = why_tried(now_us, own[0], own[1]) if event.kind == DecisionKind.explore else ""
    is_of_job = event.kind in OF_JOB
    alternatives = [] if is_of_job else _alternatives(field, predicted, measured, state, is_guess=is_guess)
    return Decision(
        job_id=job_id,
        fabric_id=fabric_id,
        key=state.key,
        candidate=candidate,
        epoch=epoch,
        kind=event.kind.value,
        reason=event.reason + predicted_gain,
        predicted_us=own[0],
        predicted_low_us=own[1],
        predicted_high_us=own[2],
        baseline_us=measured.get(BASELINE, _NOT_MEASURED).us,
        n_measurements=measured.get(candidate, _NOT_MEASURED).n_calls,
        model_id=model_id,
        decided_at_s=now_s,
        alternatives=msgspec.json.encode(alternatives).decode(),
        step=event.step,
    )


def why_tried(now_us: float | None, mean_us: float | None, low_us: float | None) -> str:
    """A clause for the reason if a trial is predicted to be no faster than the setting in force; else "".

    Means are of durations. `low_us` is the low end of the prediction's 90 % interval. None: nothing is known.
    """
    if now_us is None or mean_us is None or low_us is None or mean_us < now_us:
        return ""
    gain_percent = 100 * (1 - low_us / now_us)
    if gain_percent >= 0.5:
        return f"; tried for what it may gain within that interval, up to {gain_percent:.0f} % of the time"
    return "; tried for the small chance that it is faster all the same"


def guessed(state: KeyState, field: CandidateTable) -> list[dict[str, Any]]:
    """The starting guess of every option, best first, as in `Decision.alternatives`."""
    return _alternatives(field, _intervals(field.table[:, 4], field.table[:, 5]), {}, state, is_guess=True)


def _up_to_date(
    mean: list[float], spread: list[float], key: int, slots: list[int], field: CandidateTable, evidence: CallEvidence
) -> tuple[Floats, Floats]:
    """A prediction (log), updated by measurements since the key was last looked at.

    If the prediction is wider than the measurements' noise, it does not include them yet.
    """
    sigma = float(evidence.sigma(key))
    for slot in slots:
        at = field.place.get(evidence.candidates[slot])
        noise = sigma**2 / (evidence.units(slot) + 1.0)
        if at is None or not evidence.n_calls[slot] or not math.isfinite(mean[at]) or spread[at] ** 2 <= 1.05 * noise:
            continue
        weight = 1.0 / spread[at] ** 2 + 1.0 / noise
        mean[at] = (mean[at] / spread[at] ** 2 + evidence.log_us(slot) / noise) / weight
        spread[at] = 1.0 / math.sqrt(weight)
    return np.array(mean), np.array(spread)


def _intervals(mean: Floats, spread: Floats) -> list[list[float]]:
    """Microseconds by option: the expected duration and both ends of its 90 % interval."""
    half = Z_90 * spread
    ends: list[list[float]] = np.exp(np.array([mean, mean - half, mean + half])).round(3).T.tolist()
    return ends


def _alternatives(
    field: CandidateTable,
    predicted: list[list[float]],
    measured: dict[Candidate, _Measured],
    state: KeyState,
    *,
    is_guess: bool,
) -> list[dict[str, Any]]:
    return [
        _alternative(field.options[index], predicted[index], measured, state, is_guess=is_guess)
        for index in np.argsort([mean_us for mean_us, *_ in predicted]).tolist()
        if all(map(math.isfinite, predicted[index]))
    ]


def _alternative(
    option: Candidate, predicted: list[float], measured: dict[Candidate, _Measured], state: KeyState, *, is_guess: bool
) -> dict[str, Any]:
    found = measured.get(option, _NOT_MEASURED)
    return {
        "candidate": _name(option),
        "predicted_us": predicted[0],
        "predicted_low_us": predicted[1],
        "predicted_high_us": predicted[2],
        "is_guess": is_guess,
        "measured_us": found.us,
        "n_measurements": found.n_calls,
        "spent_us": found.spent_us,
        "note": state.banned.get(option) or state.retired.get(option) or "",
    }


@lru_cache(maxsize=4096)
def _name(candidate: Candidate) -> str:
    return str(candidate)
