"""Calls that NCCL ran with another algorithm or protocol than it was asked for: it does not offer what was asked.

Cost tables tell what is offered, but not every NCCL reports one, and a daemon that starts late may miss it. What such a
call took says nothing of the setting that was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.trials.trial import Family, KeyState
from zerotune.tuner.modeling.features import NO_CELL, CostPrior, Ints

CERTAIN_CALLS: Final = 2
"""After this many such calls, and none that ran as asked, it is not offered."""

Flags = npt.NDArray[np.bool_]


class Refusals:
    """One job's, by family (communicator class and collective), algorithm and protocol."""

    def __init__(self) -> None:
        self._n_calls: Counter[tuple[Family, tuple[int, int]]] = Counter()

    def ran_something_else(self, block: npt.NDArray[np.void], slots: Ints, evidence: CallEvidence) -> Flags:
        """Which calls ran another algorithm or protocol than was asked for.

        Args:
            block: measurements (MEASUREMENT_FIELDS), shape [n].
            slots: that were asked for, shape [n].
            evidence: says what each slot asks.

        Returns:
            True for those calls, shape [n].
        """
        algorithm, protocol = block["algorithm"], block["protocol"]
        is_told = (evidence.algorithm[slots] != NO_CELL) & (algorithm != NO_CELL) & (protocol != NO_CELL)
        differs: Flags = is_told & ((algorithm != evidence.algorithm[slots]) | (protocol != evidence.protocol[slots]))
        return differs

    def learn(self, refused: Ints, states: Sequence[KeyState], evidence: CallEvidence, costs: CostPrior) -> None:
        """Tell `costs` what turns out not to be offered.

        Args:
            refused: slots that were asked for and did not run, one per call.
            states: of all keys, by key index.
            evidence: of the regime in force.
            costs: told of refused algorithms and protocols.
        """
        for slot, n_calls in zip(*(one.tolist() for one in np.unique(refused, return_counts=True)), strict=True):
            family = states[int(evidence.key[slot])].family
            cell = int(evidence.algorithm[slot]), int(evidence.protocol[slot])
            before = self._n_calls[family, cell]
            self._n_calls[family, cell] += n_calls
            if before < CERTAIN_CALLS <= before + n_calls and not self._has_run(family, cell, states, evidence):
                costs.learn_refused(*family, cell)

    @staticmethod
    def _has_run(family: Family, cell: tuple[int, int], states: Sequence[KeyState], evidence: CallEvidence) -> bool:
        alike = (evidence.algorithm == cell[0]) & (evidence.protocol == cell[1]) & (evidence.n_calls > 0)
        return any(states[key].family == family for key in evidence.key[alike].tolist())
