"""What is told of a store: the setting in force, between the sizes that were measured and nowhere else."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.inductor import RuntimeEstimation
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.inductor.measured_times import STEP, MeasuredTimes

PLACE = CommunicatorClass(8, 1)
TUNED = Candidate(Algorithm.ring, Protocol.ll128, 4)
GATHER = Collective.all_gather
NEAR = {"rel": STEP - 1}
"""Times are kept in steps."""


def row(nbytes, us, candidate=BASELINE, phase=Phase.other):
    ran = Candidate(Algorithm.ring, Protocol.simple) if candidate.is_baseline else candidate
    where = PLACE.n_ranks, PLACE.n_nodes, nbytes, us, 0, 0, math.nan
    return (*where, int(GATHER), int(phase), int(ran.algorithm), int(ran.protocol), ran.n_channels,
            candidate.is_baseline, 0, 0, 4)  # fmt: skip


def decided(kind, candidate, nbytes):
    key = DecisionKey(PLACE, GATHER, Phase.other, size_class(nbytes))
    return Decision("job", "here", key, candidate, 1, kind, "measured")


@pytest.fixture
def times_of(tmp_path):
    def read(rows, decisions=(), fabric_id="here"):
        with Store.open(tmp_path / "store.db") as store:
            store.record_job("job", "here", {}, 8)
            store.record_measurements("here", "job", np.array(rows, MEASUREMENT))
            store.record_decisions(decisions)
            store.commit()
        return MeasuredTimes.of_store(tmp_path / "store.db", fabric_id)

    return read


def test_the_setting_in_force_is_nccls_until_another_is_proven(times_of):
    rows = [row(2**20, 100.0), row(2**20, 40.0, TUNED), row(2**24, 900.0), row(2**24, 500.0, TUNED)]
    times = times_of(rows, [decided("explore", TUNED, 2**20), decided("promote", TUNED, 2**24)])
    assert times.us(GATHER, PLACE, 2**20) == pytest.approx(100.0, **NEAR)
    assert times.us(GATHER, PLACE, 2**24) == pytest.approx(500.0, **NEAR)


def test_only_between_sizes_that_were_measured(times_of):
    times = times_of([row(2**20, 100.0), row(2**22, 400.0), row(2**26, 6000.0)])
    assert times.us(GATHER, PLACE, 2**21) == pytest.approx(200.0, **NEAR)
    for unknown in (2**19, 2**24, 2**27):  # below all, between sizes far apart, above all
        assert times.us(GATHER, PLACE, unknown) is None
    assert times.us(Collective.all_reduce, PLACE, 2**21) is None
    assert times.us(GATHER, CommunicatorClass(8, 2), 2**21) is None


def test_nothing_of_other_hardware(times_of):
    assert times_of([row(2**20, 100.0)], fabric_id="elsewhere") == MeasuredTimes()


curves = st.dictionaries(
    st.tuples(st.integers(0, 10), st.integers(1, 2**16), st.integers(1, 2**16)),
    st.lists(st.tuples(st.integers(1, 2**40), st.floats(0.1, 1e9)), max_size=5).map(lambda one: tuple(sorted(one))),
    max_size=4,
)


@given(curves)
def test_they_travel(found):
    times = MeasuredTimes(found)
    assert MeasuredTimes.unpack(times.pack()) == times
    # Inductor pickles it into the keys of its cache; only these bytes of our own are loaded.
    assert pickle.loads(pickle.dumps(RuntimeEstimation(times, 8))).times == times


@given(st.binary())
def test_other_bytes_say_nothing(packed):
    assert MeasuredTimes.unpack(packed) == MeasuredTimes()
