"""What fits, what is fastest, and what is said when nothing fits."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.store.errors import UserError
from zerotune.tuner.advice.configuration import Software, ZeroConfiguration
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster
from zerotune.tuner.advice.models.model_shape import from_dimensions, from_parameters
from zerotune.tuner.advice.prediction.memory import largest_batch, memory_parts
from zerotune.tuner.advice.prediction.step import estimate
from zerotune.tuner.advice.problem import Measured, Problem
from zerotune.tuner.advice.search import Wanted, choice_of, search

SMALL = from_dimensions(4, 512, 8, 256, 1000)


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


def test_without_room_for_a_block_ahead_none_is_gathered_ahead():
    only = Wanted(stages=(3,), model_parallel=(1,), recompute=("full",))
    roomy = problem(70e9)
    usual, least = (
        memory_parts(roomy.shape, one, 16, roomy.software, DEFAULT).total_bytes / DEFAULT.usable_memory / 1e9
        for one in (
            ZeroConfiguration(stage=3, micro_batch=1, recompute="full"),
            ZeroConfiguration(stage=3, micro_batch=1, recompute="full", bucket_bytes=4 << 20, prefetch=0),
        )
    )
    choices = search(problem(70e9, memory_gb=(usual + least) / 2), only)
    assert [choice.configuration.prefetch for choice in choices] == [0]
    with pytest.raises(UserError):
        search(problem(70e9, memory_gb=0.99 * least), only)


@pytest.mark.parametrize(("parameters", "nodes"), [(1e12, 1), (300e9, 2)])
def test_what_fits_nowhere_says_the_least_that_would(parameters, nodes):
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


def test_measurements_move_and_narrow_the_range():
    one = problem()
    configuration = ZeroConfiguration(stage=3, micro_batch=2)
    before = choice_of(one, configuration).step.step_s
    after = choice_of(msgspec.structs.replace(one, measured=Measured(1.5, 1.0)), configuration).step.step_s
    assert after.expected > 1.2 * before.expected
    assert after.high / after.low < before.high / before.low


@settings(max_examples=40)
@given(
    stage=st.integers(0, 3),
    batch=st.integers(1, 64),
    ranks=st.integers(1, 512),
    recompute=st.sampled_from(["none", "half", "full"]),
    prefetch=st.integers(0, 4),
)
def test_memory_grows_with_the_batch_and_falls_with_the_stage(stage, batch, ranks, recompute, prefetch):
    one = ZeroConfiguration(stage=stage, micro_batch=batch, recompute=recompute, prefetch=prefetch)
    more = msgspec.structs.replace(one, micro_batch=batch + 1)
    parts = memory_parts(SMALL, one, ranks, Software(), DEFAULT)
    assert memory_parts(SMALL, more, ranks, Software(), DEFAULT).total_bytes > parts.total_bytes
    if stage < 2:
        later = memory_parts(SMALL, msgspec.structs.replace(one, stage=stage + 1), ranks, Software(), DEFAULT)
        assert later.total_bytes <= parts.total_bytes
    fits = largest_batch(SMALL, one, ranks, parts.total_bytes / DEFAULT.usable_memory + 1, Software(), DEFAULT)
    assert fits == batch


def test_gathering_ahead_hides_gathers():
    place = msgspec.structs.replace(problem(1e9, "ethernet_box", 4), shape=SMALL)
    late, ahead = (
        estimate(place, ZeroConfiguration(stage=3, micro_batch=64, prefetch=depth)).step_s.expected for depth in (0, 1)
    )
    assert ahead < late
