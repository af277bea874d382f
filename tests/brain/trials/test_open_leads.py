"""What led when a job ended, and was not proven, leads in the next job, on the evidence of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.knowledge import Knowledge, Promising

PLACE = CommunicatorClass(16, 2)
KEY = DecisionKey(PLACE, Collective.all_gather, Phase.forward_gather, size_class(1 << 20))
LEADING = Candidate(Algorithm.ring, Protocol.ll128, 8)
CALL = Call(Collective.all_gather, Phase.forward_gather, 1 << 17)


@dataclass
class Line:
    """One setting's durations in one job."""

    candidate: Candidate
    is_default: bool
    median_us: float
    count: int = 100
    std_us: float = 2.0
    level_std: float = 0.0
    key: DecisionKey = KEY


def _job(faster: float, *, level_us: float = 100.0, n_default: int = 100, n_leading: int = 100) -> list[Line]:
    """A job in which the leading setting took `faster` (log) less than NCCL's own choice."""
    return [
        Line(Candidate(Algorithm.ring, Protocol.simple, 16), True, level_us, n_default),
        Line(LEADING, False, level_us * math.exp(-faster), n_leading),
    ]


def _lead(*jobs: Sequence[Line]) -> Promising | None:
    return Knowledge(by_job=jobs).promising(KEY)


def test_evidence_adds_up_from_job_to_job() -> None:
    first, third = _lead(_job(0.007)), _lead(*[_job(0.007)] * 3)
    assert first is not None
    assert third is not None
    assert first.candidate == third.candidate == LEADING
    assert third.predicted_gain[0] == pytest.approx(0.007)
    assert third.predicted_gain[1] == pytest.approx(first.predicted_gain[1] / math.sqrt(3))
    hardly = _job(0.0025, n_default=25, n_leading=25)
    assert _lead(hardly) is None, "one job's noise is more than twice as large"
    assert _lead(*[hardly] * 8) is not None


@given(st.floats(0.2, 5.0), st.integers(10, 1000), st.integers(10, 1000))
def test_jobs_are_compared_within_themselves(congestion: float, n_default: int, n_leading: int) -> None:
    """A network that was another in the second job says nothing about settings, however often each of them ran."""
    jobs = [_job(0.0), _job(0.0, level_us=100.0 * congestion, n_default=n_default, n_leading=n_leading)]
    assert _lead(*jobs) is None


def _playing(believed: float, seed: int) -> tuple[World, Brain]:
    """A job on ethernet_boxes that is told that the slowest setting which is not twice as slow gains `believed`."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, [CALL] * 2, seed=seed, compute_us=20_000.0)
    options = make_brain(world).costs.candidates(place, CALL.collective)
    usual_us = world.truth(CALL, Candidate())[0]
    bad = max(
        (one for one in options if 1.02 < world.truth(CALL, one)[0] / usual_us < 1.5),
        key=lambda one: world.truth(CALL, one)[0],
    )
    key = DecisionKey(place, CALL.collective, CALL.phase, size_class(CALL.message_bytes))
    lines = [Line(Candidate(), True, 100.0, key=key), Line(bad, False, 100.0 * math.exp(-believed), key=key)]
    brain = make_brain(world, Knowledge(by_job=[lines]))
    play(world, brain, 2)
    return world, brain


def test_a_lead_runs_at_once_and_a_wrong_one_ends_early_and_cheaply() -> None:
    for seed in range(5):
        world, brain = _playing(0.008, seed)
        wrong = brain.keys[0].provisional
        assert wrong is not None
        assert not any(decision.kind == "promote" for decision in brain.decisions())
        play(world, brain, 30)
        assert brain.keys[0].provisional != wrong
        assert brain.spent_percent < 1.0
        assert wrong not in [one.candidate for one in brain.decisions() if one.kind == "promote"]
