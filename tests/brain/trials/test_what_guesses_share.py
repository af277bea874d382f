"""What one measurement says about settings that nobody has tried: other sizes, channel counts and collectives."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.tuner.modeling.posterior import Column, Known, condition, covariance

OCTAVES_OF_ALL = 5.0
"""32 channels."""


def _place(
    *, log2_bytes: float = 27.0, octaves_fewer: float = 0.0, share: float = 1.0, cell: int = 1, collective: int = 0
) -> np.ndarray:
    row = np.zeros((1, len(Column)))
    row[0, Column.log2_bytes], row[0, Column.log2_channels] = log2_bytes, OCTAVES_OF_ALL - octaves_fewer
    row[0, Column.algorithm], row[0, Column.protocol], row[0, Column.std] = cell, cell, 0.5
    row[0, Column.transfer_share], row[0, Column.octaves_fewer] = share, octaves_fewer
    row[0, Column.collective], row[0, Column.key] = collective, int(log2_bytes) + 100 * collective
    return row


def _known(measured: np.ndarray, regime: int = 0, off_by: float = 1.0) -> Known:
    return Known(measured, np.array([regime]), np.array([off_by]), np.array([1e-4]))


def _shift(target: np.ndarray, measured: np.ndarray) -> float:
    """How far a guess follows another one that was off by 1 (log)."""
    return float(condition(target, _known(measured), 0.0)[0][0])


@pytest.mark.parametrize("octaves_fewer", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_variance_is_the_diagonal_of_the_covariance(octaves_fewer: float, share: float) -> None:
    place = _place(octaves_fewer=octaves_fewer, share=share)
    nothing = Known(place[:0], np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    _, std = condition(place, nothing, 0.0)
    assert covariance(place, place)[0, 0] * place[0, Column.std] ** 2 == pytest.approx(std[0] ** 2)


def test_what_is_wrong_at_one_channel_count_is_wrong_at_lower_ones() -> None:
    """Where a link is full earlier than believed, it is so for all lower counts, and at neighbouring sizes."""
    measured = _place(octaves_fewer=2.0)
    lower, all_channels = _place(octaves_fewer=3.0), _place(octaves_fewer=0.0)
    assert _shift(lower, measured) > 0.7
    assert _shift(lower, measured) > _shift(all_channels, measured) + 0.1
    assert _shift(_place(octaves_fewer=3.0, log2_bytes=24.0), measured) > 0.5


def test_near_sizes_say_more_than_far_ones() -> None:
    assert _shift(_place(log2_bytes=27.0), _place(log2_bytes=28.0)) > 0.4
    assert _shift(_place(log2_bytes=20.0), _place(log2_bytes=28.0)) < 0.25


def test_a_cell_that_is_slow_in_one_collective_is_not_surely_slow_in_another() -> None:
    mean, std = condition(_place(), _known(_place(collective=1)), 0.0)
    assert mean[0] < 0.8
    assert std[0] > 0.3


def test_how_far_another_network_is_from_the_first_is_not_what_a_setting_takes() -> None:
    """All that ran in the second network took three times as long: so will others there, and only there."""
    slow = [_place(cell=cell, log2_bytes=size) for cell in (1, 2, 3) for size in (26.0, 27.0)]
    known = [_known(place, regime=1, off_by=1.1) for place in slow]
    both = Known(*(np.concatenate(parts) for parts in zip(*known, strict=True)))
    there, before = (condition(_place(cell=4), both, 0.0, regime)[0][0] for regime in (1, 0))
    assert there > 0.7
    assert before < 0.5 * there
