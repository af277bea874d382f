"""Chaos that was interrupted goes on with the rounds that are left."""

from __future__ import annotations

import argparse
import math

import pytest

from benchmarks.agent import chaos
from benchmarks.agent.chaos_rounds import Rounds, together


@pytest.fixture
def played(monkeypatch):
    """What each round was asked for: its seed, seconds and deaths; the second one is interrupted once."""
    asked = []

    def play(arguments, seconds, n_deaths):
        asked.append((arguments.seed, seconds, n_deaths))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"seconds": seconds, "daemon_deaths": 40, "hangs": 0, "worst_step_ms": 10.0 * len(asked)}

    monkeypatch.setattr(chaos, "play", play)
    return asked


@pytest.fixture
def kept(tmp_path):
    return lambda plan: Rounds(plan, tmp_path / "chaos.jsonl")


def planned(**changes):
    return argparse.Namespace(**({"minutes": 15.0, "deaths": math.inf, "seed": 7, "quick": False} | changes))


def test_an_interrupted_run_goes_on_with_the_next_round(played, kept, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        chaos.go_on(planned(), kept("one"))
    kept("another").add({"seconds": 1.0})
    with (tmp_path / "chaos.jsonl").open("a") as file:
        file.write('{"plan": "one", "fig')  # cut off
    figures = chaos.go_on(planned(), rounds := kept("one"))
    assert played == [(7, 300.0, math.inf), *2 * [(1007, 300.0, math.inf)], (2007, 300.0, math.inf)]
    assert figures == {"seconds": 900.0, "daemon_deaths": 120, "hangs": 0, "worst_step_ms": 40.0}
    rounds.forget()
    assert (kept("one").figures, kept("another").figures) == ([], [{"seconds": 1.0}])


def test_enough_deaths_end_it(played, kept):
    with pytest.raises(KeyboardInterrupt):
        chaos.go_on(planned(deaths=100), kept("one"))
    assert chaos.go_on(planned(deaths=100), kept("one"))["daemon_deaths"] == 120
    assert [deaths for _, _, deaths in played] == [100, 60, 60, 20]


def test_figures_of_rounds_are_summed_but_for_the_worst():
    assert together([{"events": 2, "worst_step_ms": 9.0}, {"events": 3, "worst_step_ms": 4.0, "events@x": 1}]) == {
        "events": 5, "worst_step_ms": 9.0, "events@x": 1,
    }  # fmt: skip
