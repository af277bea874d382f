"""A belief moves as Bayes' rule has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.tuner.modeling.kalman_filter import KalmanFilter

FIGURES = st.floats(-3.0, 3.0)
OBSERVATIONS = st.lists(st.tuples(FIGURES, FIGURES, FIGURES, FIGURES, st.floats(0.1, 2.0)), max_size=8)


@given(OBSERVATIONS)
def test_observations_one_by_one_say_what_they_say_together(observations: list[tuple[float, ...]]) -> None:
    variances = np.array([1.0, 0.25, 4.0])
    belief = KalmanFilter()
    assert belief.add(*variances[:1]) == 0
    assert belief.add(*variances[1:]) == 1
    for *design, value, noise in observations:
        belief.observe(np.array(design), value, noise)
    # Bayesian linear regression in closed form.
    precision, weighted = np.diag(1.0 / variances), np.zeros(3)
    for *design, value, noise in observations:
        precision += np.outer(design, design) / noise**2
        weighted += np.array(design) * value / noise**2
    np.testing.assert_allclose(belief.covariance, np.linalg.inv(precision), atol=1e-8)
    np.testing.assert_allclose(belief.mean, np.linalg.solve(precision, weighted), atol=1e-7)


def test_what_is_added_later_is_independent_of_what_is_known() -> None:
    belief = KalmanFilter()
    belief.add(1.0, 1.0)
    belief.observe(np.array([1.0, 1.0]), 2.0, 0.5)
    known = belief.expected(np.array([1.0, 1.0]))
    assert belief.add(9.0) == 2
    assert belief.expected(np.array([1.0, 1.0, 0.0])) == pytest.approx(known)
    assert belief.expected(np.array([0.0, 0.0, 1.0])) == (0.0, 9.0)


def test_a_value_far_off_counts_as_one_at_the_limit() -> None:
    beliefs = [KalmanFilter() for _ in range(2)]
    for belief in beliefs:
        belief.add(1.0)
    limit = 3.0 * np.sqrt(1.0 + 0.5**2)
    surprise, variance = beliefs[0].observe(np.ones(1), -1e6, 0.5, clip=3.0)
    beliefs[1].observe(np.ones(1), -limit, 0.5)
    assert surprise == pytest.approx(-limit)
    assert variance == pytest.approx(1.25)
    np.testing.assert_allclose(beliefs[0].mean, beliefs[1].mean)
