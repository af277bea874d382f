"""Settings that NCCL makes the same thing of are one candidate of a data set, not several lucky ones."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import block_problems
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Protocol
from zerotune.store.sqlite.rows.measurements import MEASUREMENT

LITTLE, MUCH = 16 << 10, 16 << 20
"""Bytes that fill one channel of 16 KiB, and more channels than anybody has."""
RING = int(Algorithm.ring)


def _rows(nbytes: int, protocol: Protocol, counts: tuple[int, ...], first_us: float) -> list[np.void]:
    """NCCL's own choice, and one call of each count, each a microsecond slower than the one before."""
    rows = []
    for at, n_channels in enumerate((0, *counts)):
        row = np.zeros(1, MEASUREMENT)[0]
        row["n_ranks"], row["n_nodes"], row["message_bytes"] = 16, 2, nbytes
        row["collective"], row["duration_us"] = Collective.all_gather, first_us + at
        row["algorithm"], row["protocol"], row["n_channels"] = RING, protocol, n_channels
        row["is_default"] = not n_channels
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (LITTLE, {4: 12.0}),
        (4 * LITTLE, {4: 12.0}),
        (8 * LITTLE, {4: 11.0, 8: 12.5}),
        (MUCH, {4: 11.0, 8: 12.0, 16: 13.0}),
    ],
)
def test_counts_that_come_to_the_same_are_one_candidate(nbytes: int, expected: dict[int, float]) -> None:
    (problem,) = block_problems(np.array(_rows(nbytes, Protocol.simple, (4, 8, 16), 10.0), MEASUREMENT))
    found = {one.n_channels: us for one, us in zip(problem.candidates[1:], problem.truth_us[1:], strict=True)}
    assert problem.candidates[0] == BASELINE
    assert found == expected


def test_low_latency_fills_channels_with_a_quarter_of_the_bytes() -> None:
    (problem,) = block_problems(np.array(_rows(4 * LITTLE, Protocol.ll, (4, 8, 16), 10.0), MEASUREMENT))
    assert [one.n_channels for one in problem.candidates[1:]] == [4, 8, 16]


def test_joined_counts_go_by_the_lowest_that_was_asked_at_any_size() -> None:
    """The tuner offers the lowest count of those that come to the same: a data set must know it by that name."""
    rows = [*_rows(LITTLE, Protocol.simple, (16,), 10.0), *_rows(MUCH, Protocol.simple, (2, 16), 100.0)]
    small, large = block_problems(np.array(rows, MEASUREMENT))
    assert small.candidates[1:] == (Candidate(Algorithm.ring, Protocol.simple, 2),)
    assert [one.n_channels for one in large.candidates[1:]] == [2, 16]


def test_counts_that_nobody_asked_for_stay_as_they_are() -> None:
    rows = _rows(LITTLE, Protocol.simple, (4,), 10.0)
    rows[1]["n_channels"] = 0
    (problem,) = block_problems(np.array(rows, MEASUREMENT))
    assert problem.candidates[1:] == (Candidate(Algorithm.ring, Protocol.simple, 0),)
