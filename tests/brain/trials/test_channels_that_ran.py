"""On little traffic fewer channels run than were asked for: earlier measurements are known by what was asked for."""

from __future__ import annotations

import math

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.cost_model import channels_used
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.cost_prior import CostPrior

MESSAGE_BYTES = 75_000
ASKED, RAN = (Candidate(Algorithm.ring, Protocol.simple, n_channels) for n_channels in (8, 5))
PLACE = fabric.load("h100_ib_2").communicator(range(16))
KEY = DecisionKey(PLACE, Collective.all_gather, Phase.forward_gather, size_class(MESSAGE_BYTES))


def known(*durations: tuple[Candidate, float]) -> Knowledge:
    lines = [CandidateStatistics(KEY, one, one.is_baseline, 50, us, us, 0.02 * us, us, 0.0) for one, us in durations]
    return Knowledge(lines, None, "", [lines])


def test_fewer_channels_run_on_so_little() -> None:
    assert channels_used(KEY.collective, Protocol.simple, MESSAGE_BYTES, ASKED.n_channels) == RAN.n_channels


def test_candidates_without_the_baseline_are_weighed_too() -> None:
    """As a replay asks for one setting at a time, of a store that knows NCCL's own choice as well."""
    costs = CostPrior(fabric.load("h100_ib_2").describe())
    mean, _ = known((BASELINE, 100.0), (RAN, 60.0)).prior(KEY, MESSAGE_BYTES, (ASKED,), costs)
    assert mean[0] == pytest.approx(math.log(60.0))


def test_a_later_job_begins_with_it_under_the_name_that_is_on_offer() -> None:
    for us, kind in ((60.0, "prior"), (98.0, "provisional")):
        knowledge = known((BASELINE, 100.0), (RAN, us))
        calls = [Call(KEY.collective, KEY.phase, MESSAGE_BYTES)]
        world = World("h100_ib_2", PLACE, calls)
        brain = make_brain(world, knowledge)
        play(world, brain, 3)
        assert [one.candidate for one in brain.decisions() if one.kind == "prior"] == [ASKED], kind
