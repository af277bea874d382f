"""What calls' time is to training, in microseconds: what a trial may cost, and what the settings in force save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import BASELINE
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.evidence.keys import Traffic
from zerotune.tuner.learning.policy.steps.exposed import ExposedShare
from zerotune.tuner.learning.policy.trials.trial import KeyState

LOOKED_AT: Final = 48
"""Keys at which it is worked out anew in one window what their settings save."""


class Stakes(NamedTuple):
    """What depends on one key, and what there is to lose."""

    room_us: float
    calls_per_step: float
    charged_calls: float
    """Calls that a trial may run before it can be withdrawn, as far as the budget pays for their extra time."""
    least_odds: float = 0.0
    """A trial must be as likely as that to be faster."""


class Price:
    """How often keys are called, how much of that is waited for, and for how long a trial runs at least."""

    def __init__(self, steps_per_window: float) -> None:
        self.exposed = ExposedShare()
        self.steps_at_risk = steps_per_window
        """Steps that a setting runs before it can be withdrawn."""
        self.first_steps_at_risk = steps_per_window
        """Steps that a setting runs before anything is known of it."""
        self.connection_us = 0.0
        """What training waits for an algorithm to be connected, as far as this job has seen that."""
        self.traffic = Traffic.empty()
        self._saved_us = np.zeros(0)
        self._usual_us = np.zeros(0)
        """Per call, by key: what is saved by what usually runs, and what that takes."""
        self._next = 0

    @property
    def exposed_share(self) -> float:
        """Share of communication time that computation waits for."""
        return self.exposed.share

    @property
    def charged_share(self) -> float:
        """Share of a collective's extra time that the budget pays for: what is waited for, and a little more."""
        return min(1.0, self.exposed_share + 0.1)

    @property
    def calls_us(self) -> float:
        """What a step's calls are charged at."""
        here = len(self.traffic.per_step)
        return float(self._usual_us[:here] @ self.traffic.per_step) * self.charged_share

    def stakes(self, state: KeyState, room_us: float, least_odds: float) -> Stakes:
        """What a trial at one key puts at risk.

        Args:
            state: the key.
            room_us: what is left of the budget.
            least_odds: a trial must be as likely as this to be faster.

        Returns:
            As `best_option` takes it.
        """
        n_calls = self.traffic.calls_in(state.index, self.first_steps_at_risk)
        return Stakes(room_us, float(self.traffic.per_step[state.index]), n_calls * self.charged_share, least_odds)

    def saved_us(self, states: Sequence[KeyState], evidence: CallEvidence) -> float:
        """What a step is shorter by than with NCCL's own choices everywhere; some keys are looked at anew."""
        if (more := len(states) - len(self._saved_us)) > 0:
            more = max(more, len(self._saved_us))
            self._saved_us = np.concatenate([self._saved_us, np.zeros(more)])
            self._usual_us = np.concatenate([self._usual_us, np.zeros(more)])
        for offset in range(min(LOOKED_AT, len(states))):
            state = states[(self._next + offset) % len(states)]
            slot = evidence.find(state.index, state.usual)
            usual_us = math.nan if slot is None else math.exp(evidence.log_us(slot))
            self._usual_us[state.index] = usual_us if math.isfinite(usual_us) else 0.0
            self._saved_us[state.index] = 0.0 if state.usual.is_baseline else _saved_us(state, usual_us, evidence)
        self._next += LOOKED_AT
        here = len(self.traffic.per_step)
        return float(self._saved_us[:here] @ self.traffic.per_step) * self.exposed_share


def _saved_us(state: KeyState, usual_us: float, evidence: CallEvidence) -> float:
    """Per call, by what mostly runs at a key; nothing where that is not known."""
    slot = evidence.find(state.index, BASELINE)
    saved_us = math.nan if slot is None else math.exp(evidence.log_us(slot)) - usual_us
    return max(0.0, saved_us) if math.isfinite(saved_us) else 0.0
