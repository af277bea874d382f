"""What one absurd measurement costs the budget, and what a setting costs that is truly slow."""

from __future__ import annotations

import numpy as np
import pytest

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
from zerotune.tuner.learning.policy.accounting import ABSURD, TrialAccounting
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.keys import CandidateTables, KeyState
from zerotune.tuner.learning.policy.risk import Budget
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.modeling.cost_prior import CostPrior

TRIED = Candidate(Algorithm.tree, Protocol.ll, 4)
USED = Candidate(Algorithm.tree, Protocol.simple, 8)
"""The same algorithm: nothing is connected."""
USUAL_US = 100.0


class Job:
    """One key with a trial; durations of its calls in, what the budget was charged out."""

    def __init__(self) -> None:
        key = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, 80)
        self.state = KeyState(0, key, 1 << 20)
        self.state.trial, self.state.default_setting = TRIED, USED
        self.budget = Budget(0.01)
        self.regimes = Regimes()
        surrogate = Surrogate(CandidateTables(CostPrior({})), self.regimes)
        surrogate.tables.register(self.state)
        self.banned: list[float] = []
        self.accounting = TrialAccounting(self.budget, surrogate)
        self._step = 0
        for _ in range(4):
            self.run(BASELINE, [USUAL_US] * 2)

    def run(self, candidate: Candidate, durations_us: list[float]) -> None:
        evidence = self.regimes.evidence
        slots = np.full(len(durations_us), evidence.slot(0, candidate))
        logs, steps = np.log(durations_us), np.full(len(durations_us), self._step)
        calls = evidence.calls(slots, logs)
        self.accounting.charge(slots, logs, steps, exposed_share=1.0)
        self.banned += [one.ratio for one in self.accounting.catastrophes()]
        evidence.add(calls, steps)
        self._step += 1


@pytest.mark.parametrize("n_before", [0, 1, 5])
def test_one_absurd_call_is_charged_as_an_expected_one(n_before: int) -> None:
    job = Job()
    for _ in range(n_before):
        job.run(TRIED, [120.0, 120.0])
    job.run(TRIED, [120.0, 1e7, 120.0])
    for _ in range(2):
        job.run(TRIED, [120.0, 120.0])
    n_sane = 2 * n_before + 6
    assert job.budget.spent_us == pytest.approx(n_sane * 20.0 + (ABSURD - 1.0) * USUAL_US)
    assert not job.banned


def test_a_setting_banned_for_one_call_is_charged_in_full() -> None:
    job = Job()
    job.run(TRIED, [1e7])
    assert job.banned, "nothing says that it was none of its doing"
    assert job.budget.spent_us == pytest.approx(1e7 - USUAL_US)


@pytest.mark.parametrize("n_before", [0, 5])
@pytest.mark.parametrize("ratio", [15.0, 50.0, 1e4])
def test_a_truly_slow_setting_is_charged_in_full(ratio: float, n_before: int) -> None:
    """Also where it became so later, and where only every other call of it is."""
    for pattern in ([ratio] * 4, [1.2, ratio] * 2):
        job = Job()
        for _ in range(n_before):
            job.run(TRIED, [USUAL_US] * 2)
        for factor in pattern:
            job.run(TRIED, [factor * USUAL_US])
        assert job.budget.spent_us == pytest.approx(sum(factor - 1.0 for factor in pattern) * USUAL_US)
