"""What other settings cost training beside what their calls take, learned from how steps went with them.

Of what a group of keys takes longer, training feels the part that nothing hides, its *exposure*: all of it where it is
waited for, next to nothing behind long computation. And a collective that runs beside computation takes multiprocessors
from it: by how much (log) steps get shorter is about what was *released*, channels times the share of a step for which
they are held no longer, times a *toll* per channel. The toll is in part the machine's, the same for all groups, and in
part each group's own: where nobody computes, channels cost nothing. All are found by Bayesian linear regression over
the outcomes of trials by step time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from zerotune.tuner.learning.policy.evidence.belief import KalmanFilter

SHARED_TOLL: Final = 0.007
"""How much (log) one channel may slow computation down, before any step has spoken: 16 of them about a ninth."""
OWN_TOLL: Final = 0.012
"""How far a group's toll may be from what all have in common."""
EXPOSURE: Final = 0.35
"""How far a group's exposure may be from that of all communication, which is measured."""
EXPOSURE_MEASURED_TO: Final = 0.05
_LEAST_DOUBT: Final = 1e-6


class Change(NamedTuple):
    """What other settings of one group change, as shares of a step."""

    extra: float
    """How much longer its calls take."""
    released: float
    """Channels times the time for which they are held no longer; negative where more are held."""


class TrainingCost:
    """Exposure and toll of groups of keys, by name."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._belief = KalmanFilter()
        """The toll of all groups, then of each group its exposure and its toll, as they differ from that of all."""
        self._belief.add(SHARED_TOLL**2)

    def know_groups(self, shares: Mapping[str, float]) -> None:
        """Groups and how long they run: where one is more exposed than all together, others must be less."""
        if all(name in self._places for name in shares):
            return
        for name in shares:
            self._place(name)
        in_all = self._design({name: Change(-share, 0.0) for name, share in shares.items()})
        self._belief.observe(in_all, 0.0, EXPOSURE_MEASURED_TO)

    def expected(self, changes: Mapping[str, Change], exposed_share: float) -> tuple[float, float]:
        """Mean and standard deviation (log, positive = faster) of what a step gains by these changes.

        Args:
            changes: by group.
            exposed_share: of all communication, between 0 and 1.
        """
        differs, variance = self._belief.expected(self._design(changes))
        return _as_if_all(changes, exposed_share) + differs, math.sqrt(variance)

    def of_group(self, name: str, exposed_share: float) -> tuple[float, float] | None:
        """What a microsecond of a group's calls costs training: (whatever the channels, for each channel).

        None where it is not known that channels cost anything.
        """
        if name not in self._places:
            return None
        toll, variance = self._belief.expected(self._design({name: Change(0.0, 1.0)}))
        if toll <= math.sqrt(variance):
            return None
        return max(0.0, exposed_share + float(self._belief.mean[self._places[name]])), toll

    def learn(self, changes: Mapping[str, Change], exposed_share: float, gain: float, doubt: float) -> None:
        """Take in how much shorter steps were with some changes.

        Args:
            changes: by group of keys.
            exposed_share: share of calls' time that is waited for.
            gain: by how much (log) steps were shorter.
            doubt: standard deviation of that.
        """
        differs = gain - _as_if_all(changes, exposed_share)
        self._belief.observe(self._design(changes), differs, max(doubt, _LEAST_DOUBT))

    def _design(self, changes: Mapping[str, Change]) -> np.ndarray:
        places = [self._place(name) for name in changes]
        design = np.zeros(len(self._belief.mean))
        for place, change in zip(places, changes.values(), strict=True):
            design[0] += change.released
            design[place : place + 2] = -change.extra, change.released
        return design

    def _place(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = self._belief.add(EXPOSURE**2, OWN_TOLL**2)
        return place


def _as_if_all(changes: Mapping[str, Change], exposed_share: float) -> float:
    return -math.log1p(max(-0.5, exposed_share * sum(change.extra for change in changes.values())))
