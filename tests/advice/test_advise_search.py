"""What fits, what is fastest, and what is said when nothing fits."""

from __future__ import annotations

import re

import pytest

from zerotune.store.errors import UserError
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster
from zerotune.tuner.advice.models.model_shape import from_parameters
from zerotune.tuner.advice.problem import Problem, Software
from zerotune.tuner.advice.search import Wanted, search


def problem(parameters=7e9, machine="dgx_a100", nodes=2, **options) -> Problem:
    return Problem(
        shape=from_parameters(parameters),
        cluster=cluster(machine, nodes, DEFAULT, **options),
        software=Software(),
        constants=DEFAULT,
    )


def test_all_choices_fit_and_the_fastest_is_first():
    choices = search(problem())
    speeds = [choice.step.tokens_per_s.expected for choice in choices]
    assert speeds == sorted(speeds, reverse=True)
    assert all(choice.memory_share <= 1 for choice in choices)
    assert {choice.configuration.stage for choice in choices} >= {1, 2, 3}
    for choice in choices:
        step = choice.step.step_s
        assert 0 < step.low < step.expected < step.high
        assert choice.step.parts.total_s == pytest.approx(step.expected)


def test_plain_data_parallelism_needs_more_than_stage_3():
    stages = {choice.configuration.stage for choice in search(problem(20e9), Wanted(model_parallel=(1,)))}
    assert 0 not in stages
    assert 3 in stages


@pytest.mark.parametrize(("parameters", "nodes"), [(1e12, 1), (300e9, 2)])
def test_a_model_that_fits_nowhere_is_told_the_least_memory_that_would_do(parameters, nodes):
    with pytest.raises(UserError) as caught:
        search(problem(parameters, nodes=nodes))
    needed = [int(word) for word in caught.value.remedy.replace(",", "").split() if word.isdigit()]
    memory_gb, enough = needed
    assert search(problem(parameters, nodes=enough))
    with pytest.raises(UserError):
        search(problem(parameters, nodes=enough - 1))
    assert search(problem(parameters, nodes=nodes, memory_gb=memory_gb + 1))
    with pytest.raises(UserError):
        search(problem(parameters, nodes=nodes, memory_gb=0.95 * memory_gb))


def test_nothing_is_offered_that_would_be_refused():
    with pytest.raises(UserError) as caught:
        search(problem(9e17))
    assert not re.search(r"\d", caught.value.remedy)
    with pytest.raises(UserError) as caught:
        search(problem(60e9), Wanted(stages=(0,)))
    assert dict(re.findall(r"--([\w-]+) (\w+)", caught.value.remedy)).keys() == {"stage"}


@pytest.mark.parametrize(
    "wanted",
    [Wanted(stages=(3,), model_parallel=(8,)), Wanted(model_parallel=(3,)), Wanted(model_parallel=(16,)),
     Wanted(global_batch=10**20)],
)  # fmt: skip
def test_fixed_numbers_that_leave_nothing_to_try_are_refused(wanted):
    with pytest.raises(UserError) as caught:
        search(problem(1e9, nodes=1), wanted)
    assert " GB" not in caught.value.remedy  # no GPU is large enough for these
