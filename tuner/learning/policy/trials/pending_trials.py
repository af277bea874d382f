"""Trials of which nothing is measured yet: what they may cost is set aside until it is known.

A key that is called once in a hundred steps may have a trial that waits as long; hundreds of such keys may all be
called in one step. What each of them was admitted for stays reserved, and a trial of a key that is not expected to be
called any more is withdrawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.trials.options import Option
from zerotune.tuner.learning.policy.trials.trial import KeyState

UNLUCKY_Z: Final = 2.33
"""One trial in a hundred is slower than predicted by more standard deviations."""


class _Waiting(NamedTuple):
    state: KeyState
    candidate: Candidate
    risk_us: float


class PendingTrials:
    """Trials that wait for their first measurement, by key index."""

    def __init__(self, catastrophic_ratio: float) -> None:
        self._log_catastrophe = math.log(catastrophic_ratio)
        self._waiting: dict[int, _Waiting] = {}

    @property
    def reserved_us(self) -> float:
        """What all of them may cost, on average over the cases in which they are slower and those in which not."""
        return sum(one.risk_us for one in self._waiting.values())

    def begin(self, state: KeyState, found: Option, evidence: CallEvidence) -> None:
        """A trial begins.

        Args:
            state: the key.
            found: the trial.
            evidence: of the regime in force.
        """
        if not evidence.has_measured(state.index, found.candidate):
            self._waiting[state.index] = _Waiting(state, found.candidate, found.risk_us)

    def review(self, evidence: CallEvidence, is_expected: Callable[[KeyState], bool]) -> list[KeyState]:
        """Forget what is known by now; the keys whose trial is to be withdrawn."""
        withdrawn = []
        for one in list(self._waiting.values()):
            is_over = one.state.trial != one.candidate or evidence.has_measured(one.state.index, one.candidate)
            is_withdrawn = not is_over and not is_expected(one.state)
            if is_withdrawn:
                withdrawn.append(one.state)
            if is_over or is_withdrawn:
                del self._waiting[one.state.index]
        return withdrawn

    def has_twin(self, state: KeyState, found: Option, within_classes: int) -> bool:
        """Whether what might be a catastrophe is on trial already at a near size: it would be slow here, too.

        Args:
            state: the key.
            found: the trial that might begin.
            within_classes: size classes that count as near.

        Returns:
            True if so.
        """
        hoped, std = found.hope
        if UNLUCKY_Z * std - hoped <= self._log_catastrophe:
            return False
        return any(
            one.state.trial == one.candidate == found.candidate
            and one.state.key.communicator == state.key.communicator
            and abs(one.state.key.size_class - state.key.size_class) <= within_classes
            for one in self._waiting.values()
        )
