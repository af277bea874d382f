"""Slopes of memory over a run: a leak is told from noise, and noise from a leak."""

from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks.lib.growth import N_BLOCKS, PAGE_BYTES, WARM_UP, Growth, power_factor, slope_of


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_smaller_than_the_noise_is_seen_in_a_long_run(seed: int) -> None:
    chance = np.random.default_rng(seed)
    x = np.linspace(0.0, 1.0, 2400)
    slope, low, high = slope_of(x, 3.0 * x + chance.normal(0.0, 1.0, len(x)))
    assert low < 3.0 < high
    assert low > 1.0
    assert slope == pytest.approx(3.0, abs=1.0)


def test_noise_is_rarely_taken_for_a_leak() -> None:
    chance = np.random.default_rng(0)
    x = np.linspace(0.0, 1.0, 600)
    n_taken = sum(slope_of(x, chance.normal(0.0, 1.0, len(x)))[1] > 0.0 for _ in range(200))
    assert n_taken <= 12  # 2.5 % are due


def test_a_level_that_wanders_is_rarely_taken_for_a_leak_and_a_leak_below_it_is_seen() -> None:
    chance = np.random.default_rng(0)
    x = np.linspace(0.0, 1.0, 600)
    walks = [np.cumsum(chance.normal(0.0, 0.1, len(x))) for _ in range(400)]
    assert sum(slope_of(x, walk)[1] > 0.0 for walk in walks) <= 20  # 2.5 % are due
    assert sum(slope_of(x, 12.0 * x + walk)[1] > 0.0 for walk in walks) >= 360


def test_a_leak_of_the_size_that_is_told_is_seen_nine_times_of_ten() -> None:
    chance = np.random.default_rng(0)
    x = np.linspace(0.0, 1.0, 600)
    walks = [np.cumsum(chance.normal(0.0, 0.1, len(x))) for _ in range(400)]
    halves = [high - slope for slope, _, high in (slope_of(x, walk) for walk in walks)]
    leak = power_factor() * np.mean(halves)
    assert sum(slope_of(x, leak * x + walk)[1] > 0.0 for walk in walks) >= 340


def test_processes_are_looked_at_until_they_end() -> None:
    growth = Growth()
    for at in range(100):
        growth.look(float(at), {"own": os.getpid(), "none": 2**22 + 1})
    names = {result.metric for result in growth.results(1.0, "look")}
    assert {"own_KiB_growth", "own_KiB_growth_low", "own_files_growth_high"} <= names
    assert not any(name.startswith("none") for name in names)


@pytest.mark.parametrize(("pages_per_block", "is_met"), [(0.5, True), (3.0, False)])
def test_a_page_now_and_then_is_no_leak(pages_per_block: float, is_met: bool) -> None:
    at = np.arange(1000.0)
    pages = np.floor(1000 + pages_per_block * at / (1000 * (1 - WARM_UP) / N_BLOCKS))
    growth = Growth({"own": [(x, PAGE_BYTES * n, 5.0) for x, n in zip(at, pages, strict=True)]})
    (low,) = (result for result in growth.results(100.0, "hundred") if result.metric == "own_KiB_growth_low")
    assert low.value > 0
    assert low.is_met is is_met
