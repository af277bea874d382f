"""Lateness of one call, against plain Python."""

from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.tuner.late_ranks.waits import behind_the_others, medians

groups = st.lists(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=9), min_size=1, max_size=8)


@given(groups)
def test_each_is_compared_with_the_median_of_the_others(groups):
    values = np.array([value for group in groups for value in group])
    starts = np.cumsum([0, *map(len, groups)])[:-1]
    expected = [
        median(group[:at] + group[at + 1 :]) - value if len(group) > 1 else 0.0
        for group in groups
        for at, value in enumerate(group)
    ]
    assert behind_the_others(values, starts) == pytest.approx(expected)
    assert medians(values, starts) == pytest.approx([median(group) for group in groups])
