"""What goes into the store comes out again, and what is refused is counted."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

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
    Source,
    Stage,
    StepRecord,
    size_class,
)
from zerotune.store.sqlite.database import ModelRecord, Retention, Store
from zerotune.store.sqlite.soundness import check
from zerotune.tuner.modeling.statistics import statistics

FABRIC = {"gpu": "H100", "n_gpus": 8, "emulated": "one_node", "nvlink": True, "bus_gbs": 1.5}
KEY = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.forward_gather, size_class(1 << 20))


def test_measurements_come_back_as_they_went_in(store, block):
    first = block(3, memory_pressure=[0.25, np.nan, 1.0], epoch=7, step=[1, 2, 3], source=Source.sweep)
    second = block(2500, message_bytes=np.arange(1, 2501), is_default=1, timing_source=4)
    store.record_measurements("fabric-a", "job-1", first)
    store.record_measurements("fabric-b", "job-2", second)
    store.flush()
    assert store.measurements("fabric-a").tobytes() == first.tobytes()
    np.testing.assert_array_equal(store.measurements(job_id="job-2"), second)
    assert len(store.measurements()) == 2503
    assert len(store.measurements("fabric-a", "job-2")) == 0
    assert len(store.measurements(source=Source.sweep)) == 3
    np.testing.assert_array_equal(store.measurements("fabric-b", limit=10), second[-10:])
    assert store.n_written == 2503


def test_chunk_sizes_are_series_of_their_own(path, block):
    with Store.open(path) as store:
        for chunk_bytes in (0, 65536, 131072, 65536, 1024, 2**25 + 1024, 65537):
            store.record_measurements("f", "j", block(2, chunk_bytes=chunk_bytes))
        store.flush()
        assert len(store.measurements()) == len(store.stored("f")) == 2
        n_measured = [len(store.measurements("f", chunk_bytes=size)) for size in (65536, 131072, None)]
        assert n_measured == [4, 2, 8]
        assert store.n_invalid == 6, "no chunk sizes"
        assert len(store.stored("f", any_chunk_size=True)) == store.measured()["j", "f"] == 8
        np.testing.assert_array_equal(store.measurements(chunk_bytes=131072), block(2, chunk_bytes=131072))
        n_sizes = len(np.unique(block(2)["message_bytes"]))
        assert len(store.series("f")) == 3 * n_sizes
        assert {line.candidate.chunk_bytes for line in statistics(store, "f")} == {0, 65536, 131072}
    assert check(path).is_sound


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("message_bytes", 0), ("message_bytes", 2**64 - 1), ("duration_us", np.nan), ("duration_us", -1.0),
        ("duration_us", np.inf), ("collective", 99), ("phase", 5), ("algorithm", 7), ("algorithm", 255),
        ("protocol", 3), ("n_channels", 65), ("is_default", 2), ("source", 3), ("outcome", 4),
        ("timing_source", 6),
    ],
)  # fmt: skip
def test_a_malformed_measurement_is_counted_and_leaves_the_others(store, block, field, value):
    mixed = block(3)
    mixed[field][1] = value
    store.record_measurements("f", "j", mixed)
    store.flush()
    assert store.n_invalid == 1
    np.testing.assert_array_equal(store.measurements(), mixed[[0, 2]])


def test_statistics_equal_numpy_on_the_same_rows(store, block):
    rng = np.random.default_rng(1)
    n = 4000
    rows = block(
        n,
        duration_us=rng.lognormal(3, 1, n),
        message_bytes=rng.choice([1 << 20, (1 << 20) + 4, 1 << 21], n),
        n_channels=rng.choice([4, 8], n),
        is_default=rng.choice([0, 1], n),
        outcome=rng.choice([0, 0, 0, 3], n),
        phase=Phase.forward_gather,
    )
    store.record_measurements("f", "j", rows)
    store.record_measurements("other", "j", block(100))
    store.flush()
    found = statistics(store, "f")
    assert len(found) == 2 * 2 * 2, "two size classes, two channel counts, chosen by NCCL or not"
    assert [one.key for one in found] == sorted(one.key for one in found)
    one = next(
        s
        for s in found
        if s.key == KEY and s.candidate == Candidate(Algorithm.ring, Protocol.simple, 8) and s.is_default
    )
    mask = (
        (rows["message_bytes"] < 1 << 21)
        & (rows["n_channels"] == 8)
        & (rows["is_default"] == 1)
        & (rows["outcome"] == 0)
    )
    expected_us = rows["duration_us"][mask]
    assert one.count == len(expected_us)
    assert one.median_us == pytest.approx(np.median(expected_us))
    assert one.mean_us == pytest.approx(expected_us.mean())
    assert one.std_us == pytest.approx(expected_us.std(ddof=1))
    assert one.min_us == pytest.approx(expected_us.min())
    assert one.last_seen_s > 0
    assert statistics(store, "never seen") == []


def test_jobs_and_fabrics(path):
    now_s = [100.0]
    with Store.open(path, clock=lambda: now_s[0]) as store:
        store.record_job("job-1", "fabric-a", FABRIC, 8)
        now_s[0] = 200.0
        store.record_job("job-1", "fabric-a", FABRIC, 8)  # the daemon was restarted
        store.update_job("job-1", stage=Stage.zero3)
        store.update_job("job-1", ended_at_s=300.0)
        store.flush()
        (job,) = store.jobs()
        assert (job.stage, job.n_ranks, job.started_at_s, job.ended_at_s) == (Stage.zero3, 8, 100.0, 300.0)
        assert store.fabrics() == {"fabric-a": FABRIC}


def test_steps(store):
    steps = [StepRecord(1, 0, 10.5), StepRecord(2, 1, 11.0, exposed_us=3.0, memory_pressure=0.5)]
    store.record_steps("job", steps)
    store.record_steps("job", [StepRecord(2, 1, 12.0)])
    store.flush()
    assert store.steps("job") == [steps[0], StepRecord(2, 1, 12.0)]
    assert store.steps("unknown") == []


def test_decisions(store):
    decision = Decision(
        "job", "fabric", KEY, Candidate(Algorithm.ring, Protocol.ll128, 4), 3, "promote", "faster",
        predicted_us=1.5, predicted_low_us=1.0, n_measurements=40, decided_at_s=5, alternatives='[{"a": 1}]', step=70,
    )  # fmt: skip
    baseline = msgspec.structs.replace(decision, candidate=BASELINE, epoch=4, kind="rollback")
    channels = msgspec.structs.replace(decision, candidate=Candidate(n_channels=2), job_id="other")
    store.record_decisions([decision, baseline, channels])
    store.flush()
    assert store.decisions() == [decision, baseline, channels]
    assert store.decisions("job") == [decision, baseline]
    assert store.decisions("job", "fabric", limit=1) == [baseline]
    assert store.decisions(fabric_id="elsewhere") == []


def test_models_are_replaced_by_name_and_fabric(store):
    old = ModelRecord("correction", "f", b"\0\xff", {"features": "1"}, "abc", 0.25, 10.0)
    new = msgspec.structs.replace(old, blob=b"new", error=0.125)
    store.save_model(old)
    store.save_model(msgspec.structs.replace(old, fabric_id=""))
    store.save_model(new)
    store.flush()
    assert store.load_model("correction", "f") == new
    assert store.load_model("correction", "g") is None
    assert len(store.models()) == 2


def test_retention_keeps_the_newest_rows_of_each_fabric(path, block):
    with Store.open(path, retention=Retention(max_rows_per_fabric=50)) as store:
        store.record_measurements("small", "j", block(40))
        store.record_measurements("large", "j", block(500, step=np.arange(500)))
        store.flush()
    # The first write after opening applies it to what is there.
    with Store.open(path, retention=Retention(max_rows_per_fabric=50)) as store:
        store.record_measurements("large", "j", block(1, step=500))
        store.flush()
        assert len(store.measurements("small")) == 40
        np.testing.assert_array_equal(store.measurements("large")["step"], np.arange(451, 501))


def test_retention_by_days_on_which_anything_was_measured(path, block, caplog):
    for step, day in enumerate((10, 500, 501)):
        with Store.open(path, retention=Retention(max_days=2), clock=lambda day=day: day * 86400.0) as store:
            store.record_job(f"job-{step}", "f", {}, 8)
            store.record_steps(f"job-{step}", [StepRecord(1, 0, 1.0)])
            store.record_measurements("f", f"job-{step}", block(7, step=step))
            store.flush()
    with Store.open(path, read_only=True) as store:
        np.testing.assert_array_equal(np.unique(store.measurements()["step"]), [1, 2])
        assert store.steps("job-0") == []
        assert len(store.steps("job-1")) == 1
        assert [one.job_id for one in store.jobs()] == ["job-1", "job-2"]
    (said,) = caplog.messages
    assert " 7 " in said, "what is deleted is counted"


@pytest.mark.parametrize("jump_days", [3 * 365, -3 * 365], ids=["ahead", "behind"])
def test_a_wrong_clock_deletes_nothing_and_what_it_dates_grows_old_as_all_else(path, block, caplog, jump_days):
    days = [2000 + day for day in range(5)]
    for step, day in enumerate((*days, days[-1] + jump_days, days[-1] + 1)):
        with Store.open(path, retention=Retention(max_days=10), clock=lambda day=day: day * 86400.0) as store:
            store.record_job(f"job-{step}", "f", {}, 8)
            store.record_measurements("f", f"job-{step}", block(4, step=step))
            store.flush()
    with Store.open(path, read_only=True) as store:
        np.testing.assert_array_equal(store.measurements()["step"], np.repeat(np.arange(7), 4))
        assert len(store.jobs()) == 7
    assert not caplog.messages
    with Store.open(path, retention=Retention(max_days=1), clock=lambda: days[-1] * 86400.0 + 2 * 86400.0) as store:
        store.record_measurements("f", "last", block(4, step=9))
        store.flush()
        np.testing.assert_array_equal(store.measurements()["step"], [9] * 4)


def test_a_limit_of_rows_holds_while_a_job_runs(path, block):
    with Store.open(path, retention=Retention(max_rows_per_fabric=50)) as store:
        for _ in range(30):
            store.record_measurements("f", "j", block(4))
            store.flush()
            assert len(store.measurements()) <= 55


def test_a_full_queue_drops_and_counts(store, block, monkeypatch):
    monkeypatch.setattr("zerotune.store.sqlite.writing.writer.MAX_PENDING_ROWS", 100)
    monkeypatch.setattr("zerotune.store.sqlite.writing.writer.LINGER_S", 30.0)
    for _ in range(5):
        store.record_measurements("f", "j", block(40))
    store.flush()
    assert (store.n_dropped, store.n_written) == (120, 80)
    assert len(store.measurements()) == 80


def test_one_bad_operation_does_not_take_its_batch_along(store, block, caplog):
    store.record_measurements("f", "j", block(4))
    store.record_steps("j", [StepRecord(2**70, 0, 1.0)])  # more than SQLite's integers hold
    store.record_measurements("f", "j", block(4))
    store.record_measurements("g", "j2", block(4))
    store.flush()
    assert (len(store.measurements()), store.n_dropped) == (12, 1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert len(store.measurements("g", "j2")) == 4


def test_other_threads_read_while_the_writer_writes(store, block):
    store.record_measurements("f", "j", block(100))
    store.flush()
    counts: list[int] = []

    def read() -> None:
        counts.extend(len(store.measurements("f")) for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        store.record_measurements("f", "j", block(100))
    for thread in threads:
        thread.join()
    store.flush()
    assert len(counts) == 60
    assert min(counts) >= 100
    assert len(store.measurements("f")) == 2100
