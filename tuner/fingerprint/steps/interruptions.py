"""Keeps what is no part of training out of its sequence: a checkpoint's gathers, a forward pass to evaluate.

Between two steps a job may gather parameters and optimizer states to write them down. That comes seldom, reduces
nothing, and training goes on as before. So calls that a known step does not have are held back until it is clear what
they are: with foreign reductions, or with others of them in the very next step, another kind of training has begun;
when more than a whole step passes without, the old one goes on, and all that was foreign is left out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.steps.anatomy import TINY_BYTES, Floats, Ints

MAX_HELD: Final = 8192
"""Calls that are held back at most; of a longer stretch the end is kept."""
_REDUCES: Final = (Collective.all_reduce, Collective.reduce_scatter, Collective.reduce)


class Interruptions:
    """Stands between a sequence and the cutter of its steps."""

    def __init__(self) -> None:
        self._known: Ints = np.zeros(0, np.int64)
        self._n_calls = 0
        self._held: list[tuple[int, float, bool]] = []
        """(code, gap, whether the step has it)."""
        self._n_since = 0
        """Calls since the last that the step does not have."""
        self._has_reduced = False
        """Whether one of them was a reduction."""

    def expect(self, step: Ints) -> None:
        """These are the calls of one step; none: no step is known, everything passes."""
        self._known, self._n_calls = np.unique(step), len(step)

    def passed(self, codes: Ints, gaps_us: Floats) -> tuple[Ints, Floats]:
        """The calls that belong to training, as far as that is clear by now, in their order."""
        if not self._held:
            if not len(self._known):
                return codes, gaps_us
            at = np.minimum(np.searchsorted(self._known, codes), len(self._known) - 1)
            foreign = (self._known[at] != codes) & ~_reduces(codes)
            if not foreign.any():
                return codes, gaps_us
        is_known, reduces = np.isin(codes, self._known), _reduces(codes)
        rows = zip(codes.tolist(), gaps_us.tolist(), is_known.tolist(), reduces.tolist(), strict=True)
        passed: list[tuple[int, float]] = []
        for code, gap_us, known, reducing in rows:
            passed += self._passed(code, gap_us, is_known=known, reduces=reducing)
        return np.array([code for code, _ in passed], np.int64), np.array([gap for _, gap in passed], np.float64)

    def _passed(self, code: int, gap_us: float, *, is_known: bool, reduces: bool) -> list[tuple[int, float]]:
        if not len(self._known) or (not self._held and (is_known or reduces)):
            return [(code, gap_us)]
        is_another = not is_known and (reduces or self._has_reduced)
        self._held.append((code, gap_us, is_known))
        if is_another:  # foreign reductions, or foreign calls once more before a whole step went by
            return self._release(foreign_too=True)
        self._n_since = self._n_since + 1 if is_known else 0
        self._has_reduced |= reduces
        if self._has_reduced and self._n_since > self._n_calls:
            return self._release(foreign_too=False)
        if len(self._held) > MAX_HELD:
            del self._held[: MAX_HELD // 2]
        return []

    def _release(self, *, foreign_too: bool) -> list[tuple[int, float]]:
        released = [(code, gap_us) for code, gap_us, is_known in self._held if is_known or foreign_too]
        self._held, self._n_since, self._has_reduced = [], 0, False
        if foreign_too:
            self.expect(np.zeros(0, np.int64))
        return released


def _reduces(codes: Ints) -> npt.NDArray[np.bool_]:
    return np.isin(codes & 15, _REDUCES) & (codes >> 4 > TINY_BYTES)
