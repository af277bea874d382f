"""The joiner against a plain-Python model, and each of its rules alone."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.store.records import Algorithm
from zerotune.store.wire import FLAG_CAPTURED, FLAG_MATCHED, FLAG_TIMED
from zerotune.tuner import join
from zerotune.tuner.join import OBSERVATION, UNKNOWN_EPOCH, measurements_of


class Joiner(join.Joiner):
    def join(self, *args, **options):
        observed, n_records = super().join(*args, **options)
        return measurements_of(observed), n_records


def test_the_measurement_is_what_the_last_arrival_saw(records):
    joiner = Joiner()
    for rank, duration_us in enumerate([140.0, 100.0, 120.0, 130.0]):
        joiner.add(rank, records(1, duration_us=duration_us, memory_pressure=rank / 10, step=9, epoch=3))
    (row,), n_observations = joiner.join(0.0, 4)
    assert n_observations == 4
    assert row["duration_us"] == 100.0
    assert row["memory_pressure"] == pytest.approx(0.3)
    assert (row["step"], row["epoch"], row["n_ranks"], row["n_nodes"]) == (9, 3, 4, 1)
    assert (row["collective"], row["phase"], row["algorithm"], row["protocol"], row["n_channels"]) == (2, 1, 1, 2, 8)
    assert row["timing_source"] == 1
    assert joiner.n_pending == 0


@pytest.mark.parametrize("algorithm", [Algorithm.collnet_direct, Algorithm.nvls_tree])
def test_calls_without_reported_channels_are_measured_with_those_that_ran(records, algorithm):
    """The plugin has counted them by then, and timed them like any other's."""
    joiner = Joiner()
    joiner.add(0, records(1, n_ranks=1, algorithm=algorithm, n_channels=2, flags=FLAG_TIMED))
    (row,) = joiner.join(0.0, 1)[0]
    assert (row["algorithm"], row["n_channels"], row["is_default"]) == (algorithm, 2, 1)


def test_records_that_come_faster_than_they_are_joined_are_bounded(records, monkeypatch):
    monkeypatch.setattr(join, "MOST_KEPT", 100)
    joiner = Joiner()
    for first in range(0, 500, 50):
        joiner.add(0, records(50, n_ranks=1, sequence=np.arange(first, first + 50)))
    assert joiner.n_pending == 150
    assert joiner.n_partial == 350
    assert len(joiner.join(0.0, 1)[0]) == 150


def test_a_chunk_size_that_was_asked_for_is_measured(records):
    joiner = Joiner()
    asked = [0, 4096, 65536, 2**25]
    joiner.add(0, records(4, n_ranks=1, chunk_bytes=asked, sequence=np.arange(4)))
    assert joiner.join(0.0, 1)[0]["chunk_bytes"].tolist() == asked


@pytest.mark.parametrize(("flags", "is_default"), [(FLAG_TIMED, 1), (FLAG_TIMED | FLAG_MATCHED, 0)])
def test_a_row_that_no_plan_matched_was_nccls_own_choice(records, flags, is_default):
    joiner = Joiner()
    joiner.add(0, records(1, n_ranks=1, flags=flags))
    assert joiner.join(0.0, 1)[0]["is_default"] == [is_default]


@pytest.mark.parametrize("fields", [{"flags": FLAG_TIMED | FLAG_CAPTURED}, {"algorithm": 255, "protocol": 255}])
def test_a_replayed_graph_or_a_symmetric_kernel_is_no_choice_of_now(records, fields):
    """It is measured, but neither NCCL's own choice nor what the plan of now asked for."""
    joiner = Joiner()
    joiner.add(0, records(1, n_ranks=1, epoch=5, **fields))
    (row,) = joiner.join(0.0, 1)[0]
    assert (row["is_default"], row["epoch"]) == (0, UNKNOWN_EPOCH)


@pytest.mark.parametrize(
    "useless",
    [{"flags": FLAG_MATCHED}, {"duration_us": -1.0}, {"duration_us": np.nan}, {"collective": 11}, {"n_ranks": 0}],
)
def test_records_without_a_duration_or_sense_are_not_joined(records, useless):
    joiner = Joiner()
    joiner.add(0, records(3, **{"n_ranks": 1} | useless))
    assert len(joiner.join(0.0, 1, give_up=True)[0]) == 0
    assert joiner.n_pending == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        *({"algorithm": 9}, {"protocol": 3}, {"phase": 7}, {"message_bytes": 0}),
        *({"duration_us": 0}, {"duration_us": 1e-40}),
        *({"chunk_bytes": one} for one in (1, 1024, 65537, 2**25 + 1024, 2**32 - 1)),
    ],
)
def test_measurements_that_the_store_would_refuse_reach_nobody(records, nonsense):
    joiner = Joiner()
    mixed = records(3, n_ranks=1)
    for name, value in nonsense.items():
        mixed[name][1] = value
    joiner.add(0, mixed)
    assert len(joiner.join(0.0, 1)[0]) == 2


def test_a_record_sent_twice_counts_once(records):
    joiner = Joiner()
    joiner.add(0, records(3, n_ranks=2))
    joiner.add(0, records(3, n_ranks=2))
    assert len(joiner.join(0.0, 2)[0]) == 0
    assert joiner.n_late == 3


def test_records_that_wait_for_other_ranks_are_bounded(records, monkeypatch):
    monkeypatch.setattr(join, "MAX_PENDING", 100)
    joiner = Joiner()
    joiner.add(0, records(1000))
    joiner.join(0.0, 4)
    assert joiner.n_pending == 0


def test_communicators_are_bounded(records, monkeypatch):
    monkeypatch.setattr(join, "MAX_COMMUNICATORS", 4)
    joiner = Joiner()
    for comm_id in range(40):
        joiner.add(0, records(1, n_ranks=1, comm_id=comm_id))
        assert len(joiner.join(0.0, 1)[0]) == 1
    joiner.add(0, records(40, n_ranks=1, comm_id=np.arange(100, 140)))
    joiner.join(0.0, 1)
    assert joiner.n_pending == 0


@settings(max_examples=60)
@given(st.data())
def test_any_order_and_any_split_of_arrivals_joins_the_same(data):
    """Against dictionaries: every call that all ranks report is joined once, to its minimum."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n_ranks = data.draw(st.integers(1, 5))
    calls = [(int(c), int(k), s) for c in (3, 2**64 - 1) for k in (2, 3) for s in range(data.draw(st.integers(0, 12)))]
    model: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    joiner, found = Joiner(), []
    per_rank = []
    for _ in range(n_ranks):
        mine = np.zeros(len(calls), OBSERVATION)
        for index, (comm_id, collective, sequence) in enumerate(calls):
            mine[index]["comm_id"], mine[index]["collective"], mine[index]["sequence"] = comm_id, collective, sequence
        mine["duration_us"] = rng.integers(1, 1000, len(calls))
        mine["flags"], mine["n_ranks"], mine["algorithm"], mine["message_bytes"] = FLAG_TIMED, n_ranks, 1, 64
        mine["start_ns"] = rng.integers(0, 1000, len(calls))
        for call, duration_us in zip(calls, mine["duration_us"], strict=True):
            model[call].append(float(duration_us))
        per_rank.append(mine)
    chunks = []
    for rank, mine in enumerate(per_rank):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(mine)), max_size=3)))
        chunks.append([(rank, part) for part in np.split(mine, cuts)])
    while any(chunks):
        rank = data.draw(st.sampled_from([index for index, rest in enumerate(chunks) if rest]))
        joiner.add(*chunks[rank].pop(0))
        if data.draw(st.booleans()):
            found.append(joiner.join(0.0, n_ranks)[0])
    found.append(joiner.join(0.0, n_ranks)[0])
    joined = np.concatenate(found)
    assert sorted(joined["duration_us"]) == sorted(map(min, model.values()))
    assert (joiner.n_pending, joiner.n_late, joiner.n_partial) == (0, 0, 0)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_random_bytes_never_break_it(seed, n):
    joiner = Joiner()
    rng = np.random.default_rng(seed)
    for rank in range(3):
        joiner.add(rank, np.frombuffer(rng.bytes(n * OBSERVATION.itemsize), OBSERVATION))
        joiner.join(float(rank), 3)
    joiner.join(10.0, 3, give_up=True)
    assert joiner.n_pending == 0
