"""What ranks report becomes measurements in store and brain, of a call once all its ranks are heard."""

from __future__ import annotations

from service_stubs import report


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


def test_what_was_joined_when_the_daemon_stops_is_recorded(bench, records):
    bench.join_all()
    report(bench, records, n=10)
    bench.now_s += 1.0
    bench.service.tick()
    assert not bench.store.blocks
    bench.service.close()
    assert len(bench.store.measurements) == 10
