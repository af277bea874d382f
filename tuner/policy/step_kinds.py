"""Steps of several kinds: what a step moves says much of how long it takes, whatever its settings.

Validation moves less than training, a short batch of experts' tokens less than a long one. Steps of different kinds say
nothing of settings until it is known by how much such steps differ anyway. Kinds are told by the bytes that a step's
calls move together. How a kind differs is what its steps take longer than neighbouring steps of the others; the kind
seen first is the yardstick. Where all steps move about as much, nothing is changed.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from tuner.features import Ints

WIDTH: Final = 0.2
"""Steps within so much (log bytes) are of one kind."""
NEIGHBOURS: Final = 40
"""Steps of other kinds count for as long."""
COMPARED: Final = 9
"""So many of them, the newest."""
ENOUGH: Final = 3
"""Steps of a kind before it is known how it differs."""
REMEMBERED: Final = 20
MOST_KINDS: Final = 32
LEAST_DIFFERENCE: Final = 0.03
"""Less (log) is noise."""
MOST_UNJUDGED: Final = 1024
"""Steps that were heard of, but have not finished."""


class _Step(NamedTuple):
    kind: int
    log_us: float
    """As long as it would have taken as one of the first kind."""


class StepKinds:
    """One job's steps; `heard` tells what they move, `usual_us` how long they would have taken as usual ones."""

    def __init__(self) -> None:
        self._bytes: dict[int, float] = {}
        self._newest: deque[_Step] = deque(maxlen=NEIGHBOURS)
        self._differences: dict[int, deque[float]] = {}

    @property
    def differ(self) -> bool:
        """Steps of more than one kind were seen."""
        return len(self._differences) > 1

    def heard(self, steps: Ints, message_bytes: Ints) -> None:
        """Calls were measured, shape [n] each: the steps in which they ran and what they moved."""
        when, of = np.unique(steps, return_inverse=True)
        for step, moved in zip(when.tolist(), np.bincount(of, message_bytes).tolist(), strict=True):
            self._bytes[step] = self._bytes.get(step, 0.0) + moved
        while len(self._bytes) > MOST_UNJUDGED:
            del self._bytes[next(iter(self._bytes))]

    def usual_us(self, step: int, duration_us: float) -> float | None:
        """A step's duration as one of the first kind; None where too little is known of its kind."""
        moved = self._bytes.pop(step, 0.0)
        if moved <= 0 or not duration_us > 0:
            return None if self.differ else duration_us
        kind, log_us = round(math.log(moved) / WIDTH), math.log(duration_us)
        if kind not in self._differences:
            if len(self._differences) >= MOST_KINDS:
                return None
            self._differences[kind] = deque([0.0] if not self._differences else [], maxlen=REMEMBERED)
        differences = self._differences[kind]
        if kind != next(iter(self._differences)):
            others = [one.log_us for one in self._newest if one.kind != kind][-COMPARED:]
            if others:
                differences.append(log_us - median(others))
            if len(differences) < ENOUGH:
                return None
        difference = median(differences)
        if abs(difference) > LEAST_DIFFERENCE:
            log_us -= difference
        self._newest.append(_Step(kind, log_us))
        return math.exp(log_us)
