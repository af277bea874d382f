"""What kind of training the bare sequence of collectives shows: DDP, ZeRO-1, 2, 3, or none of them.

Read per step from rank 0's records: which collectives, how many bytes, in what order. Rules, because they
can be read and because they need no training data:

- DDP reduces gradients with all_reduce and gathers nothing;
- ZeRO-3 gathers parameters before and while it scatters gradients, the same message sizes more than once;
- ZeRO-2 scatters gradients during backward and gathers the updated parameters after the last of them;
- ZeRO-1 is ZeRO-2 whose gradients are all in when the first leaves, or that reduces them with all_reduce.

Gradient accumulation repeats the forward and backward part; a step is what lies between two optimizer steps.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from store.records import Collective, Stage

MIN_MESSAGE_BYTES: Final = 16 << 10
"""Smaller messages are losses, norms and flags, not parameters or gradients."""
SOME_SHARE: Final = 0.02
AGREEING_STEPS: Final = 2

Ints = npt.NDArray[np.int64]


def classify(collectives: Ints, message_bytes: Ints) -> Stage:
    """Stage that one step's collectives show, in the order they were enqueued; shapes [n]."""
    relevant = message_bytes >= MIN_MESSAGE_BYTES
    if not relevant.any() and len(message_bytes):
        relevant = message_bytes >= np.max(message_bytes) / 4
    kinds, sizes = collectives[relevant], message_bytes[relevant]
    gathers = kinds == Collective.all_gather
    scatters = kinds == Collective.reduce_scatter
    reduces = kinds == Collective.all_reduce
    gathered = float(sizes[gathers].sum())
    scattered = float(sizes[scatters].sum())
    reduced = float(sizes[reduces].sum())
    total = gathered + scattered + reduced
    if total <= 0 or total < 0.5 * float(sizes.sum()):
        return Stage.unknown
    # Gradients leave once in many micro-steps, while parameters are gathered in each: a small share counts.
    gathers_much, scatters_much = gathered > SOME_SHARE * total, scattered > SOME_SHARE * total
    if not gathers_much and not scatters_much:
        return Stage.ddp
    if not gathers_much:
        return Stage.unknown
    if not scatters_much:
        if not reduces.any():
            return Stage.unknown
        after = _share_after(gathers, reduces, sizes)
        return Stage.zero1 if reduced >= 0.3 * total and after > 0.9 else Stage.unknown
    after = _share_after(gathers, scatters, sizes)
    if after < 0.5:
        return Stage.zero3
    if after < 0.9:
        return Stage.unknown
    return Stage.zero2


def _share_after(gathers: npt.NDArray[np.bool_], sends: npt.NDArray[np.bool_], sizes: Ints) -> float:
    """Share of gathered bytes that is enqueued after the last reduction."""
    last = int(np.flatnonzero(sends)[-1])
    after = gathers.copy()
    after[: last + 1] = False
    return float(sizes[after].sum()) / max(1.0, float(sizes[gathers].sum()))


class StageFingerprint:
    """Follows one job; a stage holds once two steps in a row show it."""

    def __init__(self) -> None:
        self.stage = Stage.unknown
        self._recent: deque[Stage] = deque(maxlen=AGREEING_STEPS)
        self._open: list[tuple[Ints, Ints]] = []
        self._step: int | None = None

    @property
    def gathers_after_step(self) -> bool:
        """All-gathers outside backward are updated parameters (ZeRO-1, 2), not forward gathers."""
        return self.stage in (Stage.zero1, Stage.zero2)

    def add(self, collectives: Ints, message_bytes: Ints, steps: Ints) -> bool:
        """Take in enqueued collectives in order; True when the stage has changed."""
        changed = False
        begins = np.flatnonzero(np.r_[True, steps[1:] != steps[:-1]]) if len(steps) else steps
        for start, end in zip(begins.tolist(), [*begins[1:].tolist(), len(steps)], strict=True):
            step = int(steps[start])
            if self._step is not None and step != self._step:
                changed |= self._finish()
            self._step = step
            self._open.append((collectives[start:end], message_bytes[start:end]))
        return changed

    def _finish(self) -> bool:
        kinds = np.concatenate([part for part, _ in self._open])
        sizes = np.concatenate([part for _, part in self._open])
        self._open = []
        shown = classify(kinds, sizes)
        self._recent.append(shown)
        if len(self._recent) == AGREEING_STEPS and len(set(self._recent)) == 1 and shown is not self.stage:
            self.stage = shown
            return True
        return False
