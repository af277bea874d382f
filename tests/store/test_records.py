from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    NextStage,
    Plan,
    PlanRow,
    Protocol,
    size_class,
    size_class_floor,
    size_class_range,
)


@given(st.integers(1, 2**50))
def test_every_size_is_within_its_class(message_bytes):
    low, high = size_class_range(size_class(message_bytes))
    assert low <= message_bytes <= high


@given(st.integers(8, 180))
def test_classes_join_without_gap_or_overlap(index):
    assert size_class_range(index)[1] + 1 == size_class_range(index + 1)[0]
    assert size_class(size_class_floor(index)) == index


@given(st.integers(0, 50))
def test_powers_of_two_start_a_class(exponent):
    assert size_class_floor(size_class(2**exponent)) == 2**exponent


@pytest.mark.parametrize("message_bytes", [0, -1])
def test_no_class_for_nothing(message_bytes):
    with pytest.raises(ValueError, match="not positive"):
        size_class(message_bytes)


@pytest.mark.parametrize(
    "fields", [(Algorithm.ring, None, 65), (None, Protocol.ll, 0), (None, None, 65), (None, None, -1)]
)
def test_impossible_candidates_cannot_be_made(fields):
    with pytest.raises(ValueError, match=r"algorithm|protocol|channels"):
        Candidate(*fields)


def test_candidates_say_what_they_are():
    assert str(BASELINE) == "baseline"
    assert BASELINE.is_baseline
    assert str(Candidate(n_channels=4)) == "any/4ch"
    assert not Candidate(n_channels=4).is_baseline
    assert str(Candidate(Algorithm.ring, Protocol.ll128, 8)) == "ring/ll128/8ch"
    assert str(Candidate(Algorithm.ring, Protocol.ll128, 8, 65536)) == "ring/ll128/8ch/64KiB"
    assert not Candidate(chunk_bytes=65536).is_baseline


rows = st.builds(
    PlanRow,
    st.just(CommunicatorClass(8, 1)),
    st.sampled_from([Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce]),
    st.none(),
    st.just(1),
    st.integers(1, 2**40),
    st.just(Candidate(Algorithm.ring, Protocol.simple, 4)),
)
some_rows = st.lists(rows, max_size=4).map(tuple)


stages = st.builds(NextStage, st.integers(1, 9), st.integers(0, 5), some_rows)


@given(some_rows, st.lists(stages, max_size=3).map(tuple))
def test_each_stage_of_a_plan_without_some_collectives_is_that_stage_without_them(first, then):
    left_out = (Collective.reduce_scatter, Collective.all_reduce)
    plan = Plan(3, first, then=then)
    left = [tuple(row for row in stage.rows if row.collective not in left_out) for _, stage in plan.stages()]
    assert [stage.rows for _, stage in plan.without(left_out).stages()] == left
    assert [after for after, _ in plan.without(left_out).stages()] == [after for after, _ in plan.stages()]
    assert plan.without(left_out).last_epoch == plan.last_epoch
