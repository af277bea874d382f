"""Steps made of the calls that a test names."""

from __future__ import annotations

import numpy as np

from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.steps.anatomy import Step, encode


def step_of(*calls: tuple[Collective, int]) -> Step:
    """A step of (collective, bytes), all at the same time."""
    kinds, n_bytes = (np.array(column, np.int64) for column in zip(*calls, strict=True))
    return Step(encode(kinds, n_bytes), np.zeros(len(calls)))
