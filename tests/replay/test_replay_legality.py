"""Replay promises only what the job can run: NCCL refuses some settings to averages, and clamps channels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from replay_traces import FABRIC, records, table_of, verdict_of

from zerotune.agent.nccl import fabric as fabrics
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
from zerotune.tuner.modeling.cost_prior import CostPrior
from zerotune.tuner.offline.replay import FabricEvidence, replay_table
from zerotune.tuner.offline.replay.estimates import CostEstimates
from zerotune.tuner.offline.replay.legality import without_refused
from zerotune.tuner.offline.replay.policies import PolicyContext, model

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


def swept(collective: Collective, candidate: Candidate, us: float, *, is_default: bool = False) -> CandidateStatistics:
    key = DecisionKey(PAIR, collective, Phase.other, size_class(SMALL))
    return CandidateStatistics(key, candidate, is_default, 30, us, us, 0.03 * us, us, 0.0)


def named_by_model(table) -> Candidate:
    costs = CostPrior(table.fabric)
    estimates, (shapes, _) = CostEstimates(table), table.shapes
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
    result = replay_table(table, ["table", "oracle", "nearest"], FabricEvidence(sweep), plan=plan)
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
    small, _ = replay_table(table, ["oracle"], FabricEvidence(sweep)).verdicts
    assert small.setting == str(PAT_1)
    assert small.evidence == "measured_elsewhere"
