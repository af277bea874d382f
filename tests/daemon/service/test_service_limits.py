"""What nobody may say or take: it is refused, dropped and counted."""

from __future__ import annotations

import gc
import weakref

import pytest
from service_stubs import kinds

from zerotune.store import wire
from zerotune.store.records import StepRecord
from zerotune.tuner.modeling.requests import MAX_FABRICS, Request, RequestKind
from zerotune.tuner.service import service as service_module
from zerotune.tuner.service.service import RANK_TIMEOUT_S


def test_a_connection_speaks_for_its_own_rank_only(bench, records):
    bench.join_all()
    bench.join_all(job="other")
    forged = [
        wire.Goodbye("job", 2),
        wire.Goodbye("other", 1),
        wire.Observations("job", 0, 1),
        wire.Adopted("other", 9, 9),
        wire.Steps("unknown", 1, ()),
    ]
    for message in forged:
        ((receiver, reply),) = bench.send(1, message, records(1))
        assert (receiver, reply.code) == (b"job/1", "NotYours")
    assert bench.service.n_refused == len(forged)
    assert [status.n_ranks_seen for status in bench.service.jobs()] == [4, 4]


def test_a_connection_that_greets_as_another_rank_has_changed(bench):
    bench.hello(0)
    bench.send(0, wire.Hello("second", 1, 2, 1, "node", 1, "fabric", {}, 1, 5))
    (status,) = bench.service.jobs()
    assert (status.job_id, status.n_ranks_seen) == ("second", 1)


def test_ranks_that_have_not_greeted_are_ignored(bench, records):
    assert bench.send(0, wire.Observations("job", 0, 1), records(1)) == []
    assert bench.send(0, wire.Goodbye("job", 0)) == []
    assert bench.service.n_unannounced == 2
    assert bench.service.jobs() == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 4},
        {"n_ranks": 0},
    ],
)
def test_impossible_greetings_are_refused(bench, fields):
    values = {"job_id": "job", "rank": 0, "n_ranks": 4, "fabric_id": "fabric"} | fields
    hello = wire.Hello(local_rank=0, node="n", pid=1, fabric={}, nccl_version=1, tuner_abi=5, **values)
    ((_, reply),) = bench.send(0, hello)
    assert reply.code == "BadHello"
    assert bench.service.jobs() == ()


def test_connections_are_bounded(bench, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_SESSIONS", 3)
    names = [kinds(bench.hello(rank))[0][1] for rank in range(4)]
    assert names == ["Welcome", "Welcome", "Welcome", "ErrorReply"]
    assert kinds(bench.hello(0))[0][1] == "Welcome", "those here stay welcome"


def test_jobs_are_bounded(bench, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_JOBS", 2)
    names = [kinds(bench.hello(0, job=f"job{at}"))[0][1] for at in range(3)]
    assert names == ["Welcome", "Welcome", "ErrorReply"]
    assert kinds(bench.hello(1, job="job0"))[0][1] == "Welcome", "a further rank of a job that is here"
    assert len(bench.service.jobs()) == 2


def test_records_that_wait_for_a_brain_are_bounded_in_bytes(bench, records, monkeypatch):
    monkeypatch.setattr("zerotune.tuner.service.job.MAX_BACKLOG_BYTES", 100 * wire.OBSERVATION_BYTES)
    bench.hello(0, n_ranks=1)
    for _ in range(5):
        bench.send(0, wire.Observations("job", 0, 30), records(30, n_ranks=1))
    bench.service.model_ready("fabric", "knowledge")
    assert sum(len(block) for what, block in bench.brains["job"].told if what == "sequence") == 90


def test_the_end_joins_all_jobs_though_ranks_of_others_fell_silent(bench, records):
    for job in ("silent", "live"):
        bench.hello(0, n_ranks=1, job=job)
    bench.now_s += RANK_TIMEOUT_S + 0.1
    bench.hello(0, n_ranks=1, job="live")
    bench.send(0, wire.Observations("live", 0, 5, 0), records(5, n_ranks=2), job="live")
    bench.service.close()
    assert sum(len(block) for _, job, block in bench.store.blocks if job == "live") == 5


def test_a_fabric_is_described_in_so_many_words_only(bench):
    much = {f"fact {at}": "\U0001f600" * 900 for at in range(200)}
    hello = wire.Hello("job", 0, 1, 0, "node", 1, "fabric", much, 22809, 5)
    ((_, reply),) = bench.send(0, hello)
    assert isinstance(reply, wire.ErrorReply)
    assert not bench.service.jobs()


def test_no_step_waits_longer_than_it_takes(bench):
    bench.hello(0, n_ranks=1)
    bench.send(0, wire.Steps("job", 0, (StepRecord(1, 0, 1000.0, 1e11),)))
    assert [(one.duration_us, one.exposed_us) for one in bench.store.steps] == [(1000.0, 1000.0)]


def test_fabrics_that_nobody_is_on_any_more_are_forgotten(bench):
    class Known:
        """What was learned of one."""

    alive = []
    for number in range(MAX_FABRICS + 2):
        bench.hello(0, n_ranks=1, job=f"job{number}", fabric=f"fabric{number}")
        known = Known()
        alive.append(weakref.ref(known))
        bench.service.model_ready(f"fabric{number}", known)
        bench.send(0, wire.Goodbye(f"job{number}", 0), job=f"job{number}")
        bench.brains.clear()
    gc.collect()
    assert alive[0]() is None
    bench.hello(0, n_ranks=1, job="again", fabric="fabric0")
    assert bench.requests.count(Request(RequestKind.load, "fabric0")) == 2, "it is loaded again"
