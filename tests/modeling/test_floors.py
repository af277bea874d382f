"""What benchmarks print beside a figure as the least that anybody could reach."""

from __future__ import annotations

import pytest

from benchmarks.lib.data.data_sets import DataSet
from benchmarks.modeling.prediction_held_out import floors
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
)

OTHER = Candidate(Algorithm.ring, Protocol.ll, 0)


def _floors(times_us: list[tuple[float, float]]) -> dict[str, float]:
    place = CommunicatorClass(2, 1)
    problems = [
        Problem(
            DecisionKey(place, Collective.broadcast, Phase.other, 4 * at), 1 << at, (BASELINE, OTHER), BASELINE, us, 0.0
        )
        for at, us in enumerate(times_us, 12)
    ]
    return {one.metric.split("@")[0]: one.value for one in floors("grid", [DataSet("grid", problems, {})])}


def test_smooth_times_can_be_predicted_and_an_isolated_jump_cannot() -> None:
    smooth = [(10.0 * 2**at, 40.0 * 1.5**at) for at in range(9)]
    assert max(_floors(smooth).values()) < 10.0
    jump = [(10.0, 11.0), (20.0, 22.0), (400.0, 44.0), (80.0, 88.0), (160.0, 176.0)]
    found = _floors(jump)
    assert found["interpolated_regret_worst"] == pytest.approx(100 * (400 / 44 - 1))
    assert found["neighbours_regret_worst"] == found["interpolated_regret_worst"], "not even in hindsight"
