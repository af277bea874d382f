"""If records are lost, no two rounds are equal, and several of them say what the step is."""

from __future__ import annotations

import pytest

from benchmarks.fingerprint.corpus.dataset import recorded
from benchmarks.fingerprint.evaluation import recognised
from zerotune.tuner.fingerprint.encoding.weights import default_encoder


@pytest.mark.slow
def test_recorded_frameworks_are_recognised_although_calls_get_lost() -> None:
    """One of a hundred, lost or exchanged with its neighbour; read after six steps."""
    lstm = default_encoder()
    accuracy = recognised(lstm, recorded()[::3], 13, rate=0.01, n_steps=6)
    assert accuracy.stage_percent >= 95.0, accuracy.mistakes
    assert accuracy.percent >= 93.0, accuracy.mistakes
