"""`zerotune explain` from a store: candidates, intervals, counts, medians, cost, who decided when."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from rich.console import Console

from benchmarks.lib.simulated.brain_world import Call, OverlappedWorld, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective, Decision, Phase
from zerotune.store.sqlite.database import Store
from zerotune.tuner.decided import settled_decisions
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.offline import explanations, explanations_shown


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("explained") / "s.db"
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in (17, 20)] * 2
    world = World("ethernet_boxes", place, calls, compute_us=100_000.0)
    brain = make_brain(world)
    with Store.open(found) as store:
        store.record_job("job", world.fabric.fabric_id, world.fabric.describe(), 16)
        for _ in range(60):
            block, record = world.run_step()
            brain.observe(block)
            brain.step_finished(record)
            plan = brain.propose()
            store.record_measurements(world.fabric.fabric_id, "job", block)
            store.record_decisions(brain.decisions())
            world.follow(plan, brain)
        store.flush()
    return found


def test_every_key_shows_what_was_possible_and_what_it_cost(path: Path) -> None:
    explained = explanations.explain(path, None, None, None, None)
    assert len(explained) == 2
    for one in explained:
        assert len(one.alternatives) > 10
        for line in one.alternatives:
            assert line["predicted_low_us"] <= line["predicted_us"] <= line["predicted_high_us"]
        seen = [line for line in one.alternatives if line["n_measurements"]]
        assert len(seen) >= 2
        assert one.n_explored >= 1
        assert one.spent_us >= 0
        baseline = next(line for line in seen if line["candidate"] == "baseline")
        assert baseline["median_us"] == pytest.approx(baseline["measured_us"], rel=0.1)
        assert baseline["n_all_jobs"] >= baseline["n_measurements"]
        assert len(one.history) >= 2


def test_the_text_says_who_decided_when(path: Path) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    found = explanations.explain(path, None, "all_gather", "forward_gather", 1 << 20)
    explanations_shown.render(found, console, found[0].job)
    text = " ".join(console.export_text().split())
    assert (found[0].model_id, found[0].n_explored > 0) == ("", True)
    for words in ("epoch", "NCCL's cost", f" {found[0].n_explored} candidate", "all jobs (calls)", "earlier:"):
        assert words in text
    assert np.char.find(text, "1970") >= 0, "the brain's clock stands still in this test"


PLACES = ((Collective.all_gather, Phase.forward_gather), (Collective.reduce_scatter, Phase.gradient_scatter))


def _told(world: World, brain: Brain, n_steps: int) -> list[Decision]:
    play(world, brain, n_steps)
    return brain.decisions()


class Overlapped(NamedTuple):
    """A job in which variants were tried."""

    decisions: list[Decision]
    n_ended: int
    """Variants whose trial ended."""


@pytest.fixture(scope="module")
def overlapped() -> Overlapped:
    place = fabric.load("few_sms_node").communicator(range(8))
    calls = [Call(*kind, 1 << exponent) for exponent in (22, 24) for kind in PLACES for _ in range(3)]
    world = OverlappedWorld("few_sms_node", place, calls, compute_us=40_000.0)
    brain = make_brain(world)
    decisions, n_ended = [], 0
    for _ in range(300):
        before = brain.variant
        decisions += _told(world, brain, 1)
        n_ended += before is not None and brain.variant != before
    return Overlapped(decisions, n_ended)


def test_trials_of_other_plans_leave_a_trace_with_their_verdict_and_cost(overlapped: Overlapped) -> None:
    news = [one for one in overlapped.decisions if one.is_of_job]
    assert len(news) == overlapped.n_ended > 0
    for one in news:
        assert one.kind == "variant"
        assert one.step is not None
        assert len(re.findall(r"\d+\.\d", one.reason)) >= 2, "the gain, and how sure it is"
        assert re.search(r" [\d,]+ us$", one.reason), "the cost"
        assert one.alternatives == "[]"
    assert not any(one.is_of_job for one in settled_decisions(overlapped.decisions).values())
