"""What is to be expected of every option of a key: its starting guess, conditioned on what was measured near.

When the network changes, what was measured is not forgotten: guesses are moved by what has changed at the key, and what
older regimes measured says more or less what settings take that the new one has not measured yet
(`observed_points.py`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.store.records import CommunicatorClass
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.evidence.field import FieldBook
from zerotune.tuner.learning.policy.evidence.observed_points import ObservedPoints
from zerotune.tuner.learning.policy.evidence.posterior import (
    Guess,
    Known,
    SettingPoints,
    condition,
    condition_gains,
)
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import CostPrior, Floats

COMMON_DOUBT: Final = 1.5
"""How far off (log) all guesses are together where nobody has described the hardware: its scale is a guess, too, and
the first calls tell it.
"""


class Surrogate:
    """Posterior opinions about the keys of one job.

    The evidence of the regime in force is passed in; when another regime comes into force, `leave` takes the old one's.
    """

    def __init__(self, costs: CostPrior) -> None:
        self.fields = FieldBook(costs)
        self._places: defaultdict[CommunicatorClass, ObservedPoints] = defaultdict(ObservedPoints)
        self._n_followed = 0
        """Slots of the regime in force that have their places."""

    def posterior(self, state: KeyState, states: list[KeyState], evidence: CallEvidence) -> tuple[Floats, Floats]:
        """What every option of a key is expected to take; kept as `state.opinion`.

        Args:
            state: the key.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            Mean (log us; infinite: not available) and standard deviation (log), each [n_options], the baseline first.
        """
        usable, given = self._given(state, states, evidence)
        mean, spread = condition(*given)
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion

    def gains(self, state: KeyState, states: list[KeyState], evidence: CallEvidence) -> tuple[Floats, Floats]:
        """By how much every option of a key is faster than NCCL's own choice.

        Args:
            state: the key.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            Gain (log; -inf: not known) and its standard deviation (log), each [n_options].
        """
        usable, given = self._given(state, states, evidence)
        gain, spread = condition_gains(*given)
        return np.where(usable & usable[0], gain, -np.inf), spread

    def _given(
        self, state: KeyState, states: list[KeyState], evidence: CallEvidence
    ) -> tuple[npt.NDArray[np.bool_], tuple[Guess, Known, float]]:
        """Which options of `state` are available, and what their posterior follows from."""
        table = self.fields.of(state).table
        guess, std = table[:, 4], table[:, 5]
        usable = np.isfinite(guess)
        places = self._follow(states, evidence)[state.key.communicator]
        known = places.near(state, states, self.fields, evidence)
        collective = np.full(len(table), int(state.key.collective))
        guess = np.where(usable, guess + places.level(state), 0.0)
        lie = SettingPoints.of_table(table, collective, np.full(len(table), state.index))
        return usable, (Guess(lie, guess, std), known, self._common_std(state))

    def follow(self, states: list[KeyState], evidence: CallEvidence) -> None:
        """Follow what has changed with the network."""
        self.fields.follow()
        for places in self._follow(states, evidence).values():
            places.follow_levels(evidence)

    def leave(self, states: list[KeyState], evidence: CallEvidence) -> None:
        """The regime with this evidence is in force no longer."""
        for places in self._follow(states, evidence).values():
            places.leave(evidence)
        self._n_followed = 0

    def _common_std(self, state: KeyState) -> float:
        fields = self.fields
        return COMMON_DOUBT if fields.is_guesswork(state.family) else fields.doubt_in_common(state.family)

    def _follow(self, states: list[KeyState], evidence: CallEvidence) -> defaultdict[CommunicatorClass, ObservedPoints]:
        """Take in slots made since the last call."""
        for slot in range(self._n_followed, len(evidence)):
            state = states[int(evidence.key[slot])]
            self._places[state.key.communicator].append(slot, state, evidence.candidates[slot])
        self._n_followed = len(evidence)
        return self._places
