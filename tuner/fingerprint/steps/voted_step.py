"""Keeps a step that was voted for as long as most of what comes is that step."""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np

from zerotune.tuner.fingerprint.steps.voting import Ints, is_odd_again, once, voted, walk

GROWTH: Final = 0.3
MIN_CALLS: Final = 32
"""Least calls between two votes."""
MAX_UNCHECKED: Final = 12
MAX_ROUNDS: Final = 6
"""Most steps between two votes, and most steps that vote: so constant losses cost little."""
MAX_CALLS_UNCHECKED: Final = 4096
"""Most calls without a vote, less than the history keeps."""
WHOLE_CALLS: Final = 512
"""After this many calls without an odd one, and at least six steps, records are no longer lost."""
FOREIGN_CALLS: Final = 16
MAX_FOREIGN: Final = 64
"""Kinds of foreign calls that are remembered."""
OWN_PER_FOREIGN: Final = 3
"""Calls of the step that make up for one that it does not have."""
EXPLAINED: Final = 0.75
"""Least share of the calls that the step must explain, or it has changed."""


class VoteOutcome(Enum):
    """What a vote says of the step."""

    same = "the step is confirmed"
    mended = "the step is a little different"
    whole = "no calls are lost any more"
    gone = "this is another step"


class VotedStep:
    """A step and how long it has held."""

    def __init__(self, step: Ints, n_explained: int) -> None:
        self.step = step
        """As most rounds have it; it ends where the calls do that are checked."""
        self.n_known = n_explained
        """Calls that it explains."""
        self._n_unchecked = 0
        self._n_whole = 0
        """Calls since the last that was odd."""
        self._n_foreign = 0
        """Calls lately that it does not have."""
        self._foreign: set[int] = set()
        self._has_again = False
        """Whether a foreign call came again: then it belongs to another step."""

    @property
    def is_over(self) -> bool:
        """What comes now is mostly not the step's."""
        return self._n_foreign >= FOREIGN_CALLS

    @property
    def is_due(self) -> bool:
        """Time for another vote."""
        pause = max(MIN_CALLS, min(GROWTH * self.n_known, MAX_UNCHECKED * len(self.step), MAX_CALLS_UNCHECKED))
        return self._has_again or self._n_unchecked >= pause

    def add(self, codes: Ints) -> None:
        """More calls of the sequence."""
        self._n_unchecked += len(codes)
        is_own = np.isin(codes, self.step)
        n_own = int(np.count_nonzero(is_own))
        self._n_foreign = max(0, self._n_foreign + len(codes) - n_own - OWN_PER_FOREIGN * n_own)
        if len(self._foreign) > MAX_FOREIGN:
            self._foreign.clear()
        for code in codes[~is_own][:MAX_FOREIGN].tolist():
            self._has_again |= code in self._foreign
            self._foreign.add(code)

    def vote(self, history: Ints) -> VoteOutcome:
        """Of the last rounds in `history`, which ends with what was added last."""
        n_new = self._n_unchecked
        if self._has_again:
            return VoteOutcome.gone
        ahead = walk(history[len(history) - n_new :][::-1], self.step[::-1])
        if ahead.n_explained < EXPLAINED * n_new:
            return VoteOutcome.gone
        step = np.roll(self.step, -(ahead.n_passed % len(self.step)))
        n_known = self.n_known + ahead.n_explained
        codes = history[: len(history) - n_new + ahead.n_explained][-min(n_known, MAX_ROUNDS * len(step)) :]
        walked = walk(codes, step)
        if walked.n_explained < EXPLAINED * len(codes) or is_odd_again(step, walked):
            return VoteOutcome.gone
        self.n_known, self._n_unchecked = n_known, n_new - ahead.n_explained
        self._n_whole = 0 if ahead.n_odd or walked.n_odd else self._n_whole + ahead.n_explained
        if self._n_whole >= max(WHOLE_CALLS, MAX_ROUNDS * len(step)) and not self._n_unchecked:
            self.step = step
            return VoteOutcome.whole
        mended = once(voted(step, walked))
        if len(mended) < 2:
            return VoteOutcome.gone
        self.step = mended
        return VoteOutcome.same if np.array_equal(mended, step) else VoteOutcome.mended
