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
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, Decision, DecisionKey, Phase
from zerotune.store.sqlite.database import Store
from zerotune.tuner.decided import proven_decisions, settled_decisions
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.offline import explaining
from zerotune.tuner.offline.explaining.words import render


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
    explained = explaining.explain(path, None, None, None, None)
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
    found = explaining.explain(path, None, "all_gather", "forward_gather", 1 << 20)
    render(found, console, found[0].job)
    text = " ".join(console.export_text().split())
    assert (found[0].model_id, found[0].n_explored > 0) == ("", True)
    told = f" {found[0].n_explored} candidate", "all jobs, us", "(all calls)"
    for words in ("epoch", "NCCL's cost", *told, "earlier:"):
        assert words in text
    assert np.char.find(text, "1970") >= 0, "the brain's clock stands still in this test"


PLACES = ((Collective.all_gather, Phase.forward_gather), (Collective.reduce_scatter, Phase.gradient_scatter))
KEY = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.forward_gather, 80)
NOTHING = Decision("job", "fabric", KEY, BASELINE, 0, "keep", "nothing was decided")


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


def test_the_setting_of_a_new_size_in_short_memory_is_told() -> None:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [Call(Collective.all_gather, Phase.forward_gather, 1 << 20)] * 2
    world = World("ethernet_boxes", place, calls, compute_us=100_000.0)
    brain = make_brain(world)
    play(world, brain, 60)
    assert not brain.keys[0].incumbent.is_baseline
    world.memory_pressure = 0.97
    play(world, brain, 10)
    brain.decisions()
    world.calls = [Call(Collective.all_gather, Phase.forward_gather, 1 << 21)] * 2
    told = _told(world, brain, 3)
    assert brain.keys[-1].key != brain.keys[0].key
    assert [(one.kind, one.candidate) for one in told if one.key == brain.keys[-1].key][:1] == [
        ("prior", brain.keys[-1].incumbent)
    ]


def test_a_brain_that_takes_over_says_so_once() -> None:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    call = Call(Collective.all_gather, Phase.forward_gather, 1 << 20)
    world = World("ethernet_boxes", place, [call] * 2, compute_us=100_000.0)
    first = make_brain(world)
    assert "takeover" not in [one.kind for one in _told(world, first, 40)]
    assert world.plan.epoch > 0
    second = make_brain(world)
    second.adopted(world.plan.epoch, world.step)
    told = [one for one in _told(world, second, 40) if one.kind == "takeover"]
    assert len(told) == 1
    assert told[0].is_of_job


def test_the_last_word_on_a_key_is_what_usually_runs_there() -> None:
    """What leads included, through a change of the network and back, and with memory that gets short."""
    place = fabric.load("h100_ib_2").communicator(range(16))
    calls = [Call(kind, phase, 1 << size) for kind, phase in PLACES for size in (16, 19, 22, 25)]
    world = World("h100_ib_2", place, calls, compute_us=20_000.0)
    brain = make_brain(world)
    decisions: list[Decision] = []
    led = set()

    def agree(n_steps: int) -> None:
        for _ in range(n_steps):
            decisions.extend(_told(world, brain, 1))
            settled = settled_decisions(decisions)
            for state in brain.keys:
                word = settled[state.key].candidate if state.key in settled else BASELINE
                assert word == state.usual, (world.step, state.key)
                if state.provisional is not None:
                    led.add(state.key)
                    assert proven_decisions(decisions).get(state.key, NOTHING).candidate == state.incumbent

    def provisionals() -> set[tuple[DecisionKey, Candidate]]:
        return {(state.key, state.provisional) for state in brain.keys if state.provisional is not None}

    agree(20)
    while not provisionals() and world.step < 150:
        agree(1)
    assert led
    world.slowdown = dict.fromkeys(("all_gather", "reduce_scatter"), 2.0)
    while not brain.regime:
        before = provisionals()
        agree(1)
    agree(50)
    world.slowdown = {}
    while brain.regime:
        agree(1)
    usual = {(state.key, state.usual) for state in brain.keys}
    assert before
    assert before <= usual, "what led runs again, be it that it was proven meanwhile"
    agree(40)
    world.memory_pressure = 0.99
    agree(20)
