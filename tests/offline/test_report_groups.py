"""Groups of equal rows are those of np.unique on the same columns."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zerotune.tuner.offline.report.equal_rows import groups_of

ROW = [("a", "u1"), ("b", "i8"), ("c", "f4")]
rows = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-(2**62), 0, 2**62]), st.sampled_from([0.5, 2.0])))


@given(rows, st.sampled_from([["a"], ["b", "a"], ["a", "b", "c"]]))
def test_groups_are_those_of_numpy(found: list[tuple[int, int, float]], columns: list[str]):
    array = np.array(found, ROW)
    first, group = groups_of(array, columns)
    _, expected_first, expected = np.unique(array[columns], return_index=True, return_inverse=True)
    assert first.tolist() == expected_first.tolist()
    assert group.tolist() == expected.tolist()
