"""What a job's brain hears, and who hears of its plans."""

from __future__ import annotations

import logging

from service_stubs import kinds, report, steps

from zerotune.store import wire
from zerotune.store.records import Plan, StepRecord


def test_plans_go_to_rank_0_only(bench, caplog):
    caplog.set_level(logging.INFO)
    bench.join_all()
    bench.brains["job"].plans = [Plan(1)]
    replies = bench.send(0, steps(1))
    assert (b"job/0", wire.PlanOffer("job", Plan(1))) in replies
    assert not [r for r in replies if isinstance(r[1], wire.PlanOffer) and r[0] != b"job/0"]
    assert bench.store.steps == [StepRecord(1, 0, 1000.0)]
    assert [d.reason for d in bench.store.decisions] == ["scripted"]
    assert "scripted" in bench.service.jobs()[0].last_decisions[0]
    line = "job job: epoch 0: keep baseline for all_gather forward_gather from 1048576 bytes: scripted"
    assert line in caplog.messages, "what -v logs can be read"


def test_a_plan_that_needs_no_measurement_goes_out_before_there_is_one(bench, records):
    bench.hello(0)
    bench.service.model_ready("fabric", "knowledge")
    bench.brains["job"].plans = [Plan(1)]
    enqueued = records(2, flags=0)
    bench.send(0, wire.Observations("job", 0, len(enqueued), 0), enqueued)
    assert (b"job/0", wire.PlanOffer("job", Plan(1))) in bench.tick(0.1)
    assert not bench.store.blocks


def test_a_restarted_daemon_learns_the_epoch_in_force(bench):
    bench.hello(0, epoch=17)
    bench.service.model_ready("fabric", "knowledge")
    assert bench.brains["job"].told == [("adopted", (17, 0))]


def test_a_restarted_rank_0_gets_the_offer_again(bench):
    bench.join_all()
    bench.brains["job"].plans = [Plan(1)]
    bench.send(0, steps(1))
    again = wire.Hello("job", 0, 4, 0, "node", 2, "fabric", {}, 22809, 5)
    replies = bench.service.handle(b"new connection", again, None)
    assert (b"new connection", wire.PlanOffer("job", Plan(1))) in replies
    bench.service.handle(b"new connection", wire.Adopted("job", 1, 2), None)
    replies = bench.service.handle(b"third connection", again, None)
    assert "PlanOffer" not in [name for _, name in kinds(replies)]
    assert bench.service.n_sessions == 4


def test_a_failing_brain_costs_its_job_the_tuning_and_others_nothing(bench, records, caplog):
    bench.join_all()
    bench.join_all(job="other")
    bench.brains["job"].failing = True
    report(bench, records, n=2)
    bench.tick()
    assert "ZeroDivisionError" in next(s.health for s in bench.service.jobs() if s.job_id == "job")
    assert len(bench.store.measurements) == 2
    bench.send(0, steps(2))
    bench.brains["other"].plans = [Plan(1)]
    step = wire.Steps("other", 0, (StepRecord(1, 0, 1.0),))
    assert "PlanOffer" in [name for _, name in kinds(bench.send(0, step, job="other"))]
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
