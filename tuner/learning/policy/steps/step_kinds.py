"""Steps of several kinds: what a step moves says much of how long it takes, whatever its settings.

Validation moves less than training, a short batch of experts' tokens less than a long one. Steps of different kinds say
nothing of settings until it is known by how much such steps differ anyway. Kinds are told by the bytes that a step's
calls move together. How a kind differs is what its steps take longer than neighbouring steps of the others; the first
kind that comes several times is the yardstick. Where all steps move about as much, nothing is changed.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from zerotune.tuner.modeling.features import Ints

WIDTH: Final = 0.2
"""Steps within this much (log bytes) are of one kind."""
NEIGHBOURS: Final = 40
"""Steps of other kinds count for as long."""
COMPARED: Final = 9
"""So many of them, the newest."""
OFTEN: Final = 6
"""The first kind of this many steps is the yardstick: two of validation may come before training."""
ENOUGH: Final = 3
"""Steps of another kind before it is known how it differs."""
REMEMBERED: Final = 20
MOST_KINDS: Final = 32
LEAST_DIFFERENCE: Final = 0.03
"""Less (log) is noise."""
NOTHING_SEEN: Final = 0
"""The kind of steps that enqueue nothing: a replayed graph, or nobody listened yet. It is no yardstick."""
MOST_UNJUDGED: Final = 1024
"""Steps that have begun, but not finished, as far as is known."""


class _Step(NamedTuple):
    kind: int
    log_us: float
    """As long as it would have taken as one of the yardstick's kind."""


class StepKinds:
    """One job's steps; `enqueued` tells what they move, `usual_us` how long they would have taken as usual ones."""

    def __init__(self) -> None:
        self._bytes: dict[int, float] = {}
        self._newest: deque[_Step] = deque(maxlen=NEIGHBOURS)
        self._yardstick: int | None = None
        self._differences: dict[int, deque[float]] = {}
        """Of the other kinds."""

    def enqueued(self, steps: Ints, message_bytes: Ints) -> None:
        """Calls of rank 0, shape [n] each: the steps in which they were enqueued and what they move."""
        when, of = np.unique(steps, return_inverse=True)
        for step, moved in zip(when.tolist(), np.bincount(of, message_bytes).tolist(), strict=True):
            self._bytes[step] = self._bytes.get(step, 0.0) + moved
        while len(self._bytes) > MOST_UNJUDGED:
            del self._bytes[next(iter(self._bytes))]

    def usual_us(self, step: int, duration_us: float) -> float | None:
        """A step's duration, which is above 0, as one of the usual kind; None where too little is known of its own."""
        kind = round(math.log(max(1.0, self._bytes.pop(step, 0.0))) / WIDTH)
        log_us = math.log(duration_us)
        if self._yardstick is None:
            self._newest.append(_Step(kind, log_us))
            alike = [one for one in self._newest if one.kind == kind]
            if kind != NOTHING_SEEN and len(alike) >= OFTEN:
                self._yardstick, self._newest = kind, deque(alike, NEIGHBOURS)
            return duration_us
        if kind != self._yardstick:
            difference = self._difference(kind, log_us)
            if difference is None:
                return None
            log_us -= difference if abs(difference) > LEAST_DIFFERENCE else 0.0
        self._newest.append(_Step(kind, log_us))
        return math.exp(log_us)

    def _difference(self, kind: int, log_us: float) -> float | None:
        """How much longer (log) steps of another kind than the yardstick's take, by this step, too."""
        if kind not in self._differences:
            if len(self._differences) >= MOST_KINDS:
                return None
            self._differences[kind] = deque(maxlen=REMEMBERED)
        known = self._differences[kind]
        others = [one.log_us for one in self._newest if one.kind != kind][-COMPARED:]
        if others:
            known.append(log_us - median(others))
        return median(known) if len(known) >= ENOUGH else None
