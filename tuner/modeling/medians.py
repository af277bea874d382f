"""Medians and numbers of calls of each setting at each key, from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...store.records import BASELINE, Candidate, CandidateStatistics, DecisionKey


class MeasuredSetting(NamedTuple):
    """Median and number of calls of one setting at one key."""

    median_us: float
    n_calls: int
    setting: Candidate
    """The setting that ran; for the baseline, NCCL's most frequent choice."""

    def joined(self, other: MeasuredSetting) -> MeasuredSetting:
        """Both merged: the mean of their medians, weighted by calls."""
        n_calls = self.n_calls + other.n_calls
        median_us = (self.median_us * self.n_calls + other.median_us * other.n_calls) / n_calls
        return MeasuredSetting(median_us, n_calls, self.setting)


Medians = Mapping[DecisionKey, Mapping[Candidate, MeasuredSetting]]
"""By key and candidate; NCCL's own choice is BASELINE."""


def medians(lines: Sequence[CandidateStatistics]) -> Medians:
    """Statistics by key and candidate.

    If NCCL chose several settings at one key, their medians are weighted by their calls.
    """
    found: dict[DecisionKey, dict[Candidate, MeasuredSetting]] = {}
    for line in sorted(lines, key=lambda line: -line.count):
        known = found.setdefault(line.key, {})
        name = BASELINE if line.is_default else line.candidate
        measured = MeasuredSetting(line.median_us, line.count, line.candidate)
        known[name] = known[name].joined(measured) if name in known else measured
    return found
