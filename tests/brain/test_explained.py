"""`zerotune explain` from a store: candidates, intervals, counts, medians, cost, who decided when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from brain_world import Call, World, make_brain
from rich.console import Console

from agent.nccl import fabric
from store.database import Store
from store.records import Collective, Phase
from tuner import explanations


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
            if plan is not None:
                world.plan = plan
                brain.adopted(plan.epoch, world.step)
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
    explanations.render(explanations.explain(path, None, "all_gather", "forward_gather", 1 << 20), console)
    text = " ".join(console.export_text().split())
    for words in (
        "epoch",
        "predictions by NCCL's cost, no model yet",
        "on trial here",
        "all jobs (calls)",
        "earlier:",
    ):
        assert words in text
    assert np.char.find(text, "1970") >= 0, "the brain's clock stands still in this test"
