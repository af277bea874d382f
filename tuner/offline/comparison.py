"""Compares a decided setting with NCCL's own choice, by measurements, or by predictions if there are none."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ...store.counted import faster
from ...store.records import BASELINE, Candidate, Decision
from ..modeling.equal_channels import as_offered
from ..modeling.medians import Medians


class Comparison(NamedTuple):
    """One decision's setting and NCCL's own choice, both times from the same source."""

    own: Candidate | None
    """The setting that NCCL chose most often; None if that was not observed."""
    own_us: float | None
    us: float | None
    is_measured: bool

    @property
    def change_percent(self) -> float | None:
        """Change of time: negative is faster; None if one side is unknown."""
        return 100 * (self.us / self.own_us - 1) if self.us is not None and self.own_us else None

    def __str__(self) -> str:
        """The change as text; empty if it is unknown."""
        if self.change_percent is None:
            return ""
        return faster(self.change_percent) + ("" if self.is_measured else " predicted")


def compare(decision: Decision, here: Medians, everywhere: Medians) -> Comparison:
    """Compare a decided setting with NCCL's own choice at the same key; None if no source has both times.

    The times come from the first source that has both: this job's medians, all jobs' medians, the decision's own
    measurements, the decision's predictions.
    """
    own = None
    weighed = alternatives_of(decision)
    offered = {str(decision.candidate), *(str(one.get("candidate")) for one in weighed)}
    for at in (here, everywhere):
        known = as_offered(at.get(decision.key, {}), offered, decision.key)
        baseline, chosen = known.get(BASELINE), known.get(decision.candidate)
        own = own or (baseline.setting if baseline else None)
        if baseline and chosen:
            return Comparison(own, baseline.median_us, chosen.median_us, is_measured=True)
    seen = [one.get("measured_us") for one in weighed if one.get("candidate") == str(decision.candidate)]
    if seen and seen[0] is not None and decision.baseline_us:
        return Comparison(own, decision.baseline_us, float(seen[0]), is_measured=True)
    if decision.candidate.is_baseline:
        return Comparison(own, decision.baseline_us, decision.baseline_us, is_measured=decision.baseline_us is not None)
    return Comparison(own, decision.baseline_us, decision.predicted_us, is_measured=False)


def alternatives_of(decision: Decision) -> list[dict[str, Any]]:
    """The candidates that a decision weighed; empty when it names none."""
    try:
        found = json.loads(decision.alternatives)
    except ValueError:
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
