"""Finds the evidence that is missing if collectives do not show the kind of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...store.records import Collective, DecisionKey, MissingEvidence, size_class_range
from .steps.anatomy import IS_SEEN, TINY_BYTES

RARE: Final = 0.1
"""Calls rarer than this share of the most frequent one, such as broadcasts before the first step, belong to no step."""
EARLY_STEPS: Final = 20
"""Least steps before evidence can be called missing: a stage may need as many to be recognised."""
_REDUCTIONS: Final = (Collective.all_reduce, Collective.reduce_scatter, Collective.reduce)


def missing_evidence(counts: Mapping[tuple[int, int], int], *, repeats: bool = True) -> MissingEvidence:
    """Why calls, counted by collective and message bytes, show no stage.

    `repeats` tells whether two steps were seen that are alike.
    """
    seen = {call: n for call, n in counts.items() if IS_SEEN[call[0] & 15]}
    if not seen:
        return MissingEvidence.no_collectives
    least = RARE * max(seen.values())
    large = {call for call, n in seen.items() if n >= least and call[1] > TINY_BYTES}
    if not large:
        return MissingEvidence.only_small
    if not any(kind in _REDUCTIONS for kind, _ in large):
        return MissingEvidence.nothing_reduced
    if len(large) == 1:
        return MissingEvidence.one_size
    return MissingEvidence.ambiguous if repeats else MissingEvidence.no_repetition


def missing_after(n_steps: int, missing: MissingEvidence) -> MissingEvidence:
    """The missing evidence after `n_steps` of a job whose collectives lack `missing` so far."""
    return MissingEvidence.too_early if missing and n_steps < EARLY_STEPS else missing


def missing_of_keys(n_calls: Mapping[DecisionKey, int]) -> MissingEvidence:
    """Why a job's measured calls, counted by key, show no stage; a size class counts as one size."""
    counts: dict[tuple[int, int], int] = {}
    for key, n in n_calls.items():
        call = int(key.collective), size_class_range(key.size_class)[1]
        counts[call] = counts.get(call, 0) + n
    return missing_evidence(counts)
