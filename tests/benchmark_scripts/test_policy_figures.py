"""Figures by which policies are judged, on choices whose worth is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.reporting import Result
from benchmarks.policy.policy_size import LIMITS, REACHED, code_lines, constants, sizes
from benchmarks.policy.recorded_figures import JUDGED_CALLS, N_CALLS, WINDOW_STEPS, recorded, together
from benchmarks.policy.regret_policies import Problem
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)

RING = Candidate(Algorithm.ring, Protocol.ll, 1)
TREE = Candidate(Algorithm.tree, Protocol.ll, 1)
COMM_SHARE = 0.5


def problem(exponent: int, *truth_us: float) -> Problem:
    key = DecisionKey(CommunicatorClass(8, 1), Collective.all_reduce, Phase.other, size_class(1 << exponent))
    return Problem(key, 1 << exponent, (BASELINE, RING, TREE), BASELINE, truth_us, 0.03)


PROBLEMS = [problem(12, 10.0, 5.0, 20.0), problem(20, 90.0, 95.0, 900.0)]
NOTHING_TRIED = np.zeros((2, N_CALLS), np.int64)


def test_nccls_own_choice_costs_nothing_and_reaches_nothing() -> None:
    found = recorded(PROBLEMS, NOTHING_TRIED, COMM_SHARE)
    assert (found.gain, found.regret) == (pytest.approx(0.05), pytest.approx(0.5))
    assert (found.loss, found.worst_window, found.has_reached_95) == (0.0, 0.0, False)


def test_the_best_from_some_call_on_is_reached_before_the_end_only() -> None:
    arms = NOTHING_TRIED.copy()
    arms[0, 50:] = 1
    assert recorded(PROBLEMS, arms, COMM_SHARE).has_reached_95
    assert recorded(PROBLEMS, arms, COMM_SHARE).regret == 0.0
    late = NOTHING_TRIED.copy()
    late[0, JUDGED_CALLS - 5 :] = 1
    assert not recorded(PROBLEMS, late, COMM_SHARE).has_reached_95


def test_what_trials_cost_is_a_share_of_the_worst_window_of_steps() -> None:
    arms = NOTHING_TRIED.copy()
    arms[1, JUDGED_CALLS + 10] = arms[1, JUDGED_CALLS + WINDOW_STEPS + 5] = 2  # 810 us more each, in one window
    arms[1, JUDGED_CALLS - 1] = 2  # the first window's
    found = recorded(PROBLEMS, arms, COMM_SHARE)
    assert found.worst_window == pytest.approx(2 * 810 / (WINDOW_STEPS * 200))
    assert found.loss == pytest.approx(810 / (JUDGED_CALLS * 100))


def test_recordings_with_little_to_gain_do_not_count_among_those_that_reach_it() -> None:
    nothing_to_gain = [problem(12, 10.0, 11.0, 12.0)]
    both = [recorded(PROBLEMS, NOTHING_TRIED, COMM_SHARE), recorded(nothing_to_gain, NOTHING_TRIED[:1], COMM_SHARE)]
    results: dict[str, Result] = {result.metric: result for result in together(both)}
    assert results["recorded_grids"].value == 2
    assert results["recorded_reached_95_share"].value == 0.0
    assert "recorded_reached_95_share" not in {each.metric for each in together(both[1:])}


def test_constants_are_names_in_capitals_with_a_number_and_all_settings() -> None:
    source = """
LIMIT_US: Final = 3.0
_STEPS = 2 * OTHER
NAMES = ("a", "b")
ON = True
lower = 5
class Policy:
    EVERY = {1: 2}
    field: int = 3
class BrainSettings(NamedTuple):
    min_gain: float = 0.005
def f():
    INSIDE = 1
"""
    assert sorted(constants(source)) == ["EVERY", "LIMIT_US", "_STEPS", "min_gain"]


def test_lines_of_code_are_those_without_words() -> None:
    source = '''"""What it is.

Longer.
"""

# why
WORDS = """two
lines"""
"""Of an attribute."""


class Policy:
    """One line."""

    def decide(self) -> None:  # that is all
        """More."""
        return None
'''
    assert code_lines(source) == 5


def test_the_policy_does_not_grow() -> None:
    size = sizes()
    for metric, limit in LIMITS.items():
        assert size[metric] <= max(REACHED[metric], limit), metric
