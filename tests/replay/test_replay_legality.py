"""Replay promises only what the job can run: NCCL refuses some settings to averages, and clamps channels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_traces import FABRIC, RING_LL_4, records, table_of, verdict_of

from zerotune.agent.nccl import cost_model
from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl.cost_model import in_effect
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    PlanRow,
    Protocol,
    size_class,
)
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.replay import replay_table
from zerotune.tuner.offline.replay.estimates import CostEstimates, Grade
from zerotune.tuner.offline.replay.legality import SUMS_ONLY, without_refused
from zerotune.tuner.offline.replay.policies import PolicyContext, model
from zerotune.tuner.offline.replay.table import Shape

PAIR = CommunicatorClass(2, 2)
SMALL = 10_280
PAT_1, PAT_8 = (Candidate(Algorithm.pat, Protocol.simple, n) for n in (1, 8))
RING_LL_1 = Candidate(Algorithm.ring, Protocol.ll, 1)


class PatIsFree(Knowledge):
    """Sure that PAT costs nothing, and the more channels the less."""

    def prior(self, key, message_bytes, candidates, costs):
        del key, message_bytes, costs
        mean = [np.log(20.0 / one.n_channels) if one.algorithm is Algorithm.pat else np.log(50.0) for one in candidates]
        return np.array(mean), np.full(len(mean), 0.01)


def scatter(n: int, us: float, candidate: Candidate = RING_LL_1, **changes: object) -> np.ndarray:
    shape = {"collective": Collective.reduce_scatter, "phase": Phase.gradient_scatter, "message_bytes": SMALL}
    return records(n, us, candidate=candidate, **(shape | changes))


def gather(n: int, us: float, candidate: Candidate = RING_LL_1, **changes: object) -> np.ndarray:
    return records(n, us, candidate=candidate, **({"message_bytes": SMALL} | changes))


def swept(collective: Collective, candidate: Candidate, us: float, *, is_default: bool = False) -> CandidateStatistics:
    key = DecisionKey(PAIR, collective, Phase.other, size_class(SMALL))
    return CandidateStatistics(key, candidate, is_default, 30, us, us, 0.03 * us, us, 0.0)


def named_by_model(table) -> Candidate:
    shapes, index = table.shapes()
    costs = CostPrior(table.fabric)
    estimates = CostEstimates(table, shapes, index)
    if not estimates.sums:
        without_refused(costs, fabrics.load(FABRIC), shapes)
    return model(PolicyContext(estimates, knowledge=PatIsFree(), costs=costs), shapes[0])


def test_nothing_is_promised_of_what_averages_are_refused(tmp_path: Path):
    """FSDP2's reduce-scatter averages: neither a plan, nor a sweep of sums, nor a model makes PAT run."""
    table = table_of(tmp_path, scatter(20, 54.0))
    assert named_by_model(table) == BASELINE
    plan = [PlanRow(PAIR, Collective.reduce_scatter, Phase.gradient_scatter, SMALL, SMALL, PAT_8)]
    sweep = [
        swept(Collective.reduce_scatter, RING_LL_1, 54.0, is_default=True),
        swept(Collective.reduce_scatter, PAT_1, 20.0),
    ]
    result = replay_table(table, ["table", "oracle", "nearest"], statistics=sweep, plan=plan)
    assert verdict_of(result, "table").cost_us is None, "refused, not guessed"
    assert result.totals[0].n_refused == 20
    assert verdict_of(result, "oracle").setting == "baseline"
    assert verdict_of(result, "nearest").setting != str(PAT_1)


def test_a_job_that_ran_it_sums(tmp_path: Path):
    ran = scatter(20, 40.0, PAT_1, is_default=False, first=20, message_bytes=2 * SMALL)
    table = table_of(tmp_path, scatter(20, 54.0), ran)
    assert named_by_model(table).algorithm is Algorithm.pat
    sweep = [
        swept(Collective.reduce_scatter, RING_LL_1, 54.0, is_default=True),
        swept(Collective.reduce_scatter, PAT_1, 20.0),
    ]
    small, _ = replay_table(table, ["oracle"], statistics=sweep).verdicts
    assert small.setting == str(PAT_1)
    assert small.evidence == "measured_elsewhere"


def test_costs_are_those_that_a_running_job_reports():
    costs, fabric = CostPrior(fabrics.load(FABRIC).describe()), fabrics.load(FABRIC)
    shapes = [Shape(2, 2, collective, Phase.other, 1 << 24) for collective in Collective]
    without_refused(costs, fabric, shapes)
    assert {Algorithm.pat, Algorithm.nvls} == SUMS_ONLY
    offered = {one.algorithm for one in costs.candidates(PAIR, Collective.reduce_scatter)}
    assert offered == {None, Algorithm.ring}
    assert Algorithm.pat in {one.algorithm for one in costs.candidates(PAIR, Collective.all_gather)}
    own = cost_model.default_choice(fabric.topology(PAIR), Collective.reduce_scatter, 1 << 24, redop_is_sum=False)
    found = costs.default(PAIR, Collective.reduce_scatter, 1 << 24)
    assert found is not None
    assert (found.algorithm, found.protocol) == (own.algorithm, own.protocol)


def test_channel_counts_that_come_to_the_same_are_one_setting(tmp_path: Path):
    """10,280 bytes fill one channel: a plan that asks for eight gets what was measured of one."""
    table = table_of(tmp_path, gather(20, 54.0), gather(20, 74.6, PAT_1, is_default=False, first=20))
    assert named_by_model(table) == PAT_1
    plan = [PlanRow(PAIR, Collective.all_gather, Phase.forward_gather, SMALL, SMALL, PAT_8)]
    found = verdict_of(replay_table(table, ["table"], plan=plan), "table")
    assert (found.evidence, found.cost_us) == ("measured_here", pytest.approx(74.6))


def test_a_sweep_tells_of_counts_that_come_to_its_own(tmp_path: Path):
    table = table_of(tmp_path, gather(20, 54.0))
    sweep = [swept(Collective.all_gather, RING_LL_1, 54.0, is_default=True), swept(Collective.all_gather, PAT_1, 74.6)]
    shapes, index = table.shapes()
    estimates = CostEstimates(table, shapes, index, sweep, lambda *_: (10.0, 0.1))
    found = estimates.estimate(shapes[0], PAT_8)
    assert found is not None
    assert found.grade is Grade.measured_elsewhere
    assert found.cost_us == pytest.approx(74.6)


def test_predictions_are_doubted_by_their_distance_from_measurements(tmp_path: Path):
    table = table_of(tmp_path, records(20, 100.0), records(20, 100.0, message_bytes=1 << 26, first=20))
    shapes, index = table.shapes()
    estimates = CostEstimates(table, shapes, index, (), lambda *_: (100.0, 0.01))
    errors = []
    for candidate in (*(Candidate(Algorithm.ring, Protocol.simple, n) for n in (4, 2)), RING_LL_4):
        found = estimates.estimate(shapes[0], candidate)
        assert found is not None
        errors.append(found.error)
    assert errors[0] < errors[1] < errors[2], "one rung away, two, and another protocol"
    assert errors[2] > 0.6


@given(st.sampled_from(Collective), st.integers(1, 1 << 34), st.integers(1, 64))
def test_what_is_in_effect_stays_in_effect(collective: Collective, message_bytes: int, n_channels: int):
    ran = in_effect(collective, message_bytes, Candidate(Algorithm.ring, Protocol.simple, n_channels))
    assert 1 <= ran.n_channels <= n_channels
    assert in_effect(collective, message_bytes, ran) == ran
    assert in_effect(collective, message_bytes, BASELINE) == BASELINE
