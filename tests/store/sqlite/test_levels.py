"""Settings that ran at different times are compared as if the network had been the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from zerotune.store.records import CandidateStatistics
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.modeling.statistics import at_usual_level, statistics

Maker = Callable[..., NDArray[np.void]]
USUAL_US = 100.0
FASTER = 0.8
"""Of the setting with 16 channels over NCCL's own choice, which has 8."""


@pytest.fixture
def job(block: Maker) -> Callable[..., NDArray[np.void]]:
    """Calls of a job: NCCL's own choice up to a step and 16 channels from it on, beside another key that stays."""

    def make(n_steps: int, switches_at: int, level: Callable[[int], float], seed: int = 0) -> NDArray[np.void]:
        rng = np.random.default_rng(seed)
        made = []
        for step in range(n_steps):
            wins = step >= switches_at
            rows = block(4, is_default=[not wins, not wins, 1, 1], n_channels=[16 if wins else 8] * 2 + [8, 8])
            rows["message_bytes"] = [1 << 20] * 2 + [1 << 24] * 2
            rows["duration_us"] = np.array([FASTER if wins else 1.0] * 2 + [20.0] * 2) * USUAL_US * level(step)
            rows["duration_us"] *= np.exp(rng.normal(0.0, 0.03, 4) + rng.normal(0.0, 0.005))
            rows["step"] = step
            made.append(rows)
        return np.concatenate(made)

    return make


def _gain(store: Store, job_id: str | None = None) -> tuple[CandidateStatistics, CandidateStatistics, float]:
    small = [line for line in statistics(store, "f", job_id) if line.key.size_class == 80]
    default = next(line for line in small if line.is_default)
    winner = next(line for line in small if not line.is_default)
    return default, winner, math.log(default.median_us / winner.median_us)


@pytest.mark.parametrize("slower", [1.2, 1.5, 2.0, 0.6])
def test_a_winner_that_ran_mostly_while_the_network_was_slow_is_still_the_winner(store, job, slower):
    store.record_measurements("f", "j", job(400, 60, lambda step: slower if step >= 100 else 1.0))
    store.flush()
    for job_id in (None, "j"):
        default, winner, gain = _gain(store, job_id)
        assert (default.count, winner.count) == (120, 680)
        assert gain == pytest.approx(-math.log(FASTER), abs=0.02)
        assert 0.0 < winner.level_std < 0.03
        assert winner.std_us / winner.median_us < 0.05
        assert default.median_us == pytest.approx(USUAL_US * min(slower, 1.0), rel=0.03), "the fastest level is usual"


def test_a_job_beside_a_neighbour_is_moved_to_the_level_of_the_others(store, job):
    jobs = [job(100, 50, lambda _: 1.0, 1), job(300, 0, lambda _: 1.5, 2), job(100, 50, lambda _: 1.0, 3)]
    for number, rows in enumerate(jobs):
        store.record_measurements("f", f"j{number}", rows)
    store.flush()
    default, _, gain = _gain(store)
    assert default.median_us == pytest.approx(USUAL_US, rel=0.02)
    assert gain == pytest.approx(-math.log(FASTER), abs=0.02)


def test_measurements_for_a_model_are_at_the_same_level(store, job):
    rows = job(400, 60, lambda step: 1.5 if step >= 100 else 1.0)
    rows["outcome"][::50] = 3
    store.record_measurements("f", "j", rows)
    store.flush()
    found = at_usual_level(store, "f")[[*MEASUREMENT.names]].astype(MEASUREMENT)
    failed = rows["outcome"] == 3
    np.testing.assert_array_equal(found[failed], rows[failed])
    small = found[(found["message_bytes"] == 1 << 20) & ~failed]
    medians = [np.median(small["duration_us"][small["is_default"] == one]) for one in (0, 1)]
    assert medians[0] / medians[1] == pytest.approx(FASTER, rel=0.02)
    assert len(at_usual_level(store, "f", limit=10)) == 10


def test_a_winner_that_nothing_ties_to_the_default_is_no_surer_than_other_keys_make_it(store, job):
    """It began just when the network changed: only the other key tells the level, and this one may suffer less."""
    store.record_measurements("f", "j", job(200, 100, lambda step: 1.5 if step >= 100 else 1.0))
    store.flush()
    _, winner, gain = _gain(store)
    assert winner.level_std > 0.1
    assert gain == pytest.approx(-math.log(FASTER), abs=0.05)
