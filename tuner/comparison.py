"""A decided setting against NCCL's own choice: by what was measured, and by predictions only where nothing was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from store.records import BASELINE, Candidate, CandidateStatistics, Decision, DecisionKey


class Measured(NamedTuple):
    """What the store knows of one setting under one key."""

    median_us: float
    n_calls: int
    setting: Candidate
    """What ran; for the baseline the setting that NCCL chose most often."""


Medians = Mapping[DecisionKey, Mapping[Candidate, Measured]]
"""By key and candidate; NCCL's own choice is BASELINE."""


def medians(lines: Sequence[CandidateStatistics]) -> Medians:
    """Statistics by key and candidate.

    Where NCCL chose several settings under one key, their medians are weighed by their calls.
    """
    found: dict[DecisionKey, dict[Candidate, Measured]] = {}
    for line in sorted(lines, key=lambda line: -line.count):
        known = found.setdefault(line.key, {})
        name = BASELINE if line.is_default else line.candidate
        before = known.get(name, Measured(0.0, 0, line.candidate))
        n_calls = before.n_calls + line.count
        mean_us = (before.median_us * before.n_calls + line.median_us * line.count) / n_calls
        known[name] = Measured(mean_us, n_calls, before.setting)
    return found


class Comparison(NamedTuple):
    """One decision's setting and NCCL's own choice, both times from the same source."""

    own: Candidate | None
    """What NCCL chose by itself, as far as it was seen."""
    own_us: float | None
    us: float | None
    is_measured: bool

    @property
    def change_percent(self) -> float | None:
        """Change of time: negative is faster; None where one side is unknown."""
        return 100 * (self.us / self.own_us - 1) if self.us is not None and self.own_us else None

    def __str__(self) -> str:
        """The change in words for people; empty where it is unknown."""
        if self.change_percent is None:
            return ""
        return f"{self.change_percent:+.0f} %" + ("" if self.is_measured else " predicted")


def compare(decision: Decision, here: Medians, everywhere: Medians) -> Comparison:
    """`decision` by this job's medians, else by all jobs', else by what it saw itself, else by its prediction."""
    own = None
    for known in (here.get(decision.key, {}), everywhere.get(decision.key, {})):
        baseline, chosen = known.get(BASELINE), known.get(decision.candidate)
        own = own or (baseline.setting if baseline else None)
        if baseline and chosen:
            return Comparison(own, baseline.median_us, chosen.median_us, is_measured=True)
    seen = [
        one.get("measured_us") for one in alternatives_of(decision) if one.get("candidate") == str(decision.candidate)
    ]
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
