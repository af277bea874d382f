"""What ranks report becomes measurements in store and brain, of a call once all its ranks are heard."""

from __future__ import annotations

import numpy as np
from service_stubs import report

from zerotune.store import wire
from zerotune.store.records.passages import Passage, PassageKind, Passages
from zerotune.tuner.service.job import HELLO_TIMEOUT_S, NEWS_EVERY_S


def test_observations_become_measurements_in_store_and_brain(bench, records):
    bench.join_all()
    report(bench, records, n=10, duration_us=50.0)
    bench.tick()
    assert (bench.store.measurements["duration_us"] == 50.0).all()
    assert len(bench.store.measurements) == 10
    assert bench.store.blocks[0][:2] == ("fabric", "job")
    told = bench.brains["job"].told
    assert [what for what, _ in told] == ["sequence", "observe"], "the sequence of rank 0 only"
    assert len(told[0][1]) == len(told[1][1]) == 10
    assert bench.service.jobs()[0].n_observations == 40


def test_calls_without_tuner_are_summed_over_ranks_and_kept(bench, records):
    bench.join_all()

    def saw(rank, n_calls):
        sends = Passage(PassageKind.point_to_point, n_calls, 1000 * n_calls)
        bench.send(rank, wire.Observations("job", rank, 0, passages=Passages((sends,), 1, (), 2)), records(n=0))

    for rank, n_calls in ((0, 1), (1, 5), (0, 2)):  # a rank's later word is of all that it saw
        saw(rank, n_calls)
    expected = Passages((Passage(PassageKind.point_to_point, 7, 7000),), 2, (), 4)
    assert bench.service.jobs()[0].passages == expected
    bench.tick(NEWS_EVERY_S)
    assert bench.store.jobs["job"]["passages"] == expected
    saw(0, 3)
    for rank in range(4):
        bench.send(rank, wire.Goodbye("job", rank))
    assert bench.store.jobs["job"]["passages"].kinds[0].n_calls == 8


def test_a_call_waits_for_ranks_that_may_still_greet(bench, records):
    """With a trace ranks record from the start: one may report before another has even said hello."""
    bench.hello(0, n_ranks=2)
    report(bench, records, ranks=(0,), n=10, n_ranks=2, duration_us=700.0)
    bench.tick(0.5)
    bench.tick(2.0)
    assert bench.store.blocks == []
    bench.hello(1, n_ranks=2)
    report(bench, records, ranks=(1,), n=10, n_ranks=2, duration_us=200.0)
    bench.tick(0.5)
    assert bench.store.measurements["duration_us"].tolist() == [200.0] * 10


def test_ranks_without_an_agent_are_waited_for_no_longer_than_it_takes_to_greet(bench, records):
    bench.hello(0, n_ranks=2)
    report(bench, records, ranks=(0,), n=10, n_ranks=2)
    bench.tick(HELLO_TIMEOUT_S)
    assert len(bench.store.measurements) == 10
    report(bench, records, ranks=(0,), n=5, n_ranks=2, sequence=np.arange(10, 15))
    bench.tick(0.5)
    bench.send(0, wire.Goodbye("job", 0))
    assert len(bench.store.measurements) == 15


def test_the_last_calls_of_ranks_that_leave_one_after_the_other_are_joined_whole(bench, records):
    """Each sends what it saw last and says goodbye; the other's part is still on its way."""
    for rank in range(2):
        bench.hello(rank, n_ranks=2)
    report(bench, records, ranks=(1,), n=10, n_ranks=2, duration_us=700.0)
    bench.send(1, wire.Goodbye("job", 1))
    bench.tick(0.5)
    report(bench, records, ranks=(0,), n=12, n_ranks=2, duration_us=200.0)
    bench.tick(0.5)
    bench.send(0, wire.Goodbye("job", 0))
    assert bench.store.measurements["duration_us"].tolist() == [200.0] * 10, "of two calls rank 1 never told"


def test_a_rank_that_was_left_alone_is_measured_alone_in_the_end(bench, records):
    for rank in range(2):
        bench.hello(rank, n_ranks=2)
    report(bench, records, ranks=(0, 1), n=10, n_ranks=2)
    bench.tick(0.5)
    bench.send(1, wire.Goodbye("job", 1))
    report(bench, records, ranks=(0,), n=5, n_ranks=2, sequence=np.arange(10, 15))
    for _ in range(int(2 * HELLO_TIMEOUT_S) + 1):
        bench.tick(0.5)
    assert len(bench.store.measurements) == 10, "what rank 1 may have taken part in"
    report(bench, records, ranks=(0,), n=5, n_ranks=2, sequence=np.arange(15, 20))
    bench.tick(0.5)
    assert len(bench.store.measurements) == 15


def test_a_tick_comes_in_slices_and_nothing_is_lost_between_them(bench, records):
    bench.join_all()
    report(bench, records, n=10)
    bench.now_s += 1.0
    n_slices = 0
    while bench.service.next_tick_s <= bench.now_s and not bench.store.blocks:
        bench.service.tick()
        n_slices += 1
    assert n_slices > 1, "messages can be answered before the store and the brain are told"
    assert bench.brains["job"].names() == ["sequence"]
    bench.service.close()
    assert bench.brains["job"].names() == ["sequence", "observe"]
    assert len(bench.store.measurements) == 10


def test_a_failure_of_looking_for_late_ranks_costs_no_measurement(bench, records, monkeypatch):
    bench.join_all()
    monkeypatch.setattr("zerotune.tuner.late_ranks.finder.LateRankFinder.observe", lambda *_: 1 / 0)
    for first in (0, 5):
        for rank in range(4):
            block = records(5, sequence=np.arange(first, first + 5))
            bench.send(rank, wire.Observations("job", rank, 5), block)
        bench.tick()
    assert len(bench.store.measurements) == 10
