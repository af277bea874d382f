"""Keeps interruptions, such as a checkpoint's gathers or an evaluation, out of training's sequence.

Between two steps a job may gather parameters and optimizer states to save them. That is rare, reduces nothing, and
training goes on as before. So calls that a known step does not have are held back. If they include reductions, or come
again in the next step, another kind of training has begun. If more than a whole step passes without them, the old one
goes on, and they are left out.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ....store.records import Collective
from .anatomy import TINY_BYTES, Floats, Ints

MAX_HELD: Final = 8192
"""Most calls that are held back; of a longer stretch the end is kept."""
_REDUCTIONS: Final = (Collective.all_reduce, Collective.reduce_scatter, Collective.reduce)

Call = tuple[int, float]
"""(code, gap)."""


class Interruptions:
    """Filters a sequence before it is cut into steps."""

    def __init__(self) -> None:
        self._known: Ints = np.zeros(0, np.int64)
        self._last: list[int] = []
        """The calls that passed last, as many as a step has."""
        self._held: list[Call] = []
        self._n_since = 0
        """Calls since the last foreign one."""
        self._has_reduced = False
        """Whether a foreign call was a reduction."""

    @property
    def is_watching(self) -> bool:
        """Whether a step is known; if not, everything passes."""
        return bool(self._last)

    def expect(self, step: Ints) -> None:
        """Set the calls of one step that ends with the newest call that passed; empty: no step is known."""
        self._known, self._last = np.unique(step), step.tolist()

    def passed(self, codes: Ints, gaps_us: Floats) -> tuple[Ints, Floats]:
        """Calls that are now known to belong to training, in order; others are held back."""
        if not self.is_watching:
            if not self._held:
                return codes, gaps_us
            held = self._released(0)  # calls of a time when a step was known
            before = np.array([code for code, _ in held], np.int64), np.array([gap for _, gap in held], np.float64)
            return np.concatenate([before[0], codes]), np.concatenate([before[1], gaps_us])
        is_known = self._known[np.minimum(np.searchsorted(self._known, codes), len(self._known) - 1)] == codes
        reduces = _reduces(codes)
        if not self._held and (is_known | reduces).all():
            self._pass_on(codes.tolist())
            return codes, gaps_us
        passed: list[Call] = []
        rows = zip(codes.tolist(), gaps_us.tolist(), is_known.tolist(), reduces.tolist(), strict=True)
        for code, gap_us, known, reducing in rows:
            now = self._decided((code, gap_us), is_known=known, reduces=reducing)
            self._pass_on([code for code, _ in now])
            passed += now
        return np.array([code for code, _ in passed], np.int64), np.array([gap for _, gap in passed], np.float64)

    def _pass_on(self, codes: list[int]) -> None:
        n_calls = len(self._last)
        if n_calls:
            self._last = (codes if len(codes) >= n_calls else [*self._last, *codes])[-n_calls:]

    def _decided(self, call: Call, *, is_known: bool, reduces: bool) -> list[Call]:
        """The calls that may pass after this call."""
        if not self.is_watching or (not self._held and (is_known or reduces)):
            return [call]
        self._held.append(call)
        if not is_known and (reduces or self._has_reduced):  # another kind of training
            released = self._released(0)
            self.expect(np.zeros(0, np.int64))
            return released
        self._n_since = self._n_since + 1 if is_known else 0
        self._has_reduced |= reduces
        if self._has_reduced and self._n_since > len(self._last):
            return self._released(self._where_training_goes_on())
        if len(self._held) > MAX_HELD:
            del self._held[: MAX_HELD // 2]
        return []

    def _where_training_goes_on(self) -> int:
        """Index of the held call with which training goes on.

        It comes after the last foreign call, and after calls that only look like the step's: some tensors are as large
        as the step's gathers. The calls that passed before end within a step, which goes on from there.
        """
        first = len(self._held) - self._n_since
        codes = [code for code, _ in self._held]
        for start in range(first, first + self._n_since // 2):
            if codes[start:] == [*self._last, *self._last][: len(codes) - start]:
                return start
        return first

    def _released(self, start: int) -> list[Call]:
        released, self._held = self._held[start:], []
        self._n_since, self._has_reduced = 0, False
        return released


def _reduces(codes: Ints) -> npt.NDArray[np.bool_]:
    kinds = codes & 15
    reduces: npt.NDArray[np.bool_] = (kinds == _REDUCTIONS[0]) | (kinds == _REDUCTIONS[1]) | (kinds == _REDUCTIONS[2])
    return reduces & (codes >> 4 > TINY_BYTES)
