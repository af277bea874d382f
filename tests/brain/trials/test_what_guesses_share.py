"""What one measurement says about settings that nobody has tried: other sizes, channel counts and collectives."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.tuner.learning.policy.surrogate import (
    Guess,
    Known,
    SettingPoints,
    condition,
    covariance,
    variance_of,
)

OCTAVES_OF_ALL = 5.0
"""32 channels."""


def _place(
    *, log2_bytes: float = 27.0, octaves_fewer: float = 0.0, share: float = 1.0, cell: int = 1, collective: int = 0
) -> SettingPoints:
    one = np.array([1], np.int64)
    return SettingPoints(
        np.array([log2_bytes]),
        np.array([OCTAVES_OF_ALL - octaves_fewer]),
        cell * one,
        cell * one,
        collective * one,
        np.array([int(log2_bytes) + 100 * collective], np.int64),
        np.array([share]),
        np.array([octaves_fewer]),
    )


def _shift(target: SettingPoints, measured: SettingPoints) -> float:
    """How far a guess follows another one that was off by 1 (log)."""
    one = np.ones(1)
    guess, known = Guess(target, np.zeros(1), 0.5 * one), Known(measured, 0.5 * one, one, 1e-4 * one)
    mean, _ = condition(guess, known, 0.0)
    return float(mean[0])


@pytest.mark.parametrize("octaves_fewer", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_variance_is_the_diagonal_of_the_covariance(octaves_fewer: float, share: float) -> None:
    place = _place(octaves_fewer=octaves_fewer, share=share)
    assert covariance(place, place)[0, 0] == pytest.approx(variance_of(place)[0])


def test_what_is_wrong_at_one_channel_count_is_wrong_at_lower_ones() -> None:
    """Where a link is full earlier than believed, it is so for all lower counts, and at neighbouring sizes."""
    measured = _place(octaves_fewer=2.0)
    lower, all_channels = _place(octaves_fewer=3.0), _place(octaves_fewer=0.0)
    assert _shift(lower, measured) > 0.7
    assert _shift(lower, measured) > _shift(all_channels, measured) + 0.1
    assert _shift(_place(octaves_fewer=3.0, log2_bytes=24.0), measured) > 0.5


def test_near_sizes_say_more_than_far_ones() -> None:
    assert _shift(_place(log2_bytes=27.0), _place(log2_bytes=28.0)) > 0.4
    assert _shift(_place(log2_bytes=20.0), _place(log2_bytes=28.0)) < 0.15


def test_a_cell_that_is_slow_in_one_collective_is_not_surely_slow_in_another() -> None:
    one = np.ones(1)
    guess, known = Guess(_place(), np.zeros(1), 0.5 * one), Known(_place(collective=1), 0.5 * one, one, 1e-4 * one)
    mean, std = condition(guess, known, 0.0)
    assert mean[0] < 0.8
    assert std[0] > 0.3
