"""What a job's brain hears, and who hears of its plans."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
from service_stubs import kinds, report, steps

from zerotune.store import wire
from zerotune.store.records import Plan, StepRecord
from zerotune.tuner.modeling.requests import Request, RequestKind
from zerotune.tuner.service.job import HELLO_TIMEOUT_S

COST = np.dtype(wire.COST_FIELDS)


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


def test_only_the_leading_ranks_steps_and_adoptions_count(bench):
    bench.join_all()
    bench.send(1, wire.Steps("job", 1, (StepRecord(5, 0, 1.0),)))
    bench.send(1, wire.Adopted("job", 4, 5))
    assert bench.brains["job"].told == []
    bench.send(0, wire.Adopted("job", 4, 5))
    assert bench.brains["job"].told == [("adopted", (4, 5))]
    assert bench.service.jobs()[0].epoch == 4


def test_short_memory_is_told_and_what_torch_could_do_without_apart(bench):
    bench.join_all()
    bench.brains["job"].memory = SimpleNamespace(is_short=True, pressure=0.95)
    bench.send(0, steps(1))
    health = bench.service.jobs()[0].health
    assert "95%" in health
    assert "cache" not in health
    bench.send(0, wire.Steps("job", 0, (StepRecord(2, 0, 1.0),), cached_share=0.3))
    health = bench.service.jobs()[0].health
    assert "95%" in health
    assert "30%" in health
    bench.brains["job"].memory.is_short = False
    bench.send(0, steps(3))
    assert bench.service.jobs()[0].health == "ok"


def test_cost_tables_reach_the_brain_once(bench):
    bench.join_all()
    block = np.zeros(2, COST)
    for rank in range(4):
        bench.send(rank, wire.CostTables("job", rank, 2), block)
    assert bench.brains["job"].names() == ["cost_tables"]


def test_windows_open_when_all_ranks_are_here(bench):
    for rank in range(3):
        bench.hello(rank)
    bench.tick(0.1)
    assert kinds(bench.tick(0.1)) == []
    bench.hello(3)
    assert sorted(kinds(bench.tick(0.5))) == [(f"job/{rank}", "Observe") for rank in range(4)]


def test_events_before_the_knowledge_is_loaded_are_not_lost(bench, records):
    for rank in range(4):
        bench.hello(rank)
    assert bench.requests == [Request(RequestKind.load, "fabric")], "asked for once"
    bench.send(0, wire.CostTables("job", 0, 1), np.zeros(1, COST))
    report(bench, records, n=3)
    bench.tick()
    bench.send(0, steps(1))
    assert len(bench.store.measurements) == 3
    assert bench.brains == {}
    bench.service.model_ready("fabric", "knowledge")
    assert bench.brains["job"].names() == ["cost_tables", "sequence", "observe", "step"]
    assert bench.brains["job"].knowledge == "knowledge"


def test_no_brain_where_rank_0_is_not(bench, records):
    for rank in (1, 2, 3):
        bench.hello(rank)
    bench.service.model_ready("fabric", "knowledge")
    report(bench, records, ranks=(1, 2, 3), n=2)
    bench.tick(HELLO_TIMEOUT_S)
    assert bench.brains == {}
    assert len(bench.store.measurements) == 2, "but measured and stored"


def test_a_restarted_daemon_learns_the_epoch_in_force(bench):
    bench.hello(0, epoch=17)
    bench.service.model_ready("fabric", "knowledge")
    assert bench.brains["job"].told == [("adopted", (17, 0))]


def test_steps_tell_the_plan_in_force_if_its_message_was_lost(bench):
    """A queue that is full, as while the daemon is stopped, loses the newest messages."""
    bench.join_all()
    bench.send(0, wire.Adopted("job", 4, 5))
    bench.send(0, steps(3, 4, epoch=0))  # from before; the word goes ahead of the steps
    bench.send(0, steps(5, epoch=4))
    assert bench.brains["job"].names() == ["adopted", "step", "step", "step"]
    bench.send(0, steps(90, 91, epoch=0))  # without a daemon the plan has expired meanwhile
    assert [what for what in bench.brains["job"].told if what[0] == "adopted"] == [
        ("adopted", (4, 5)),
        ("adopted", (0, 90)),
    ]
    bench.send(0, wire.Adopted("job", 0, 90))  # late after all: nothing new
    assert bench.brains["job"].names()[-3:] == ["adopted", "step", "step"]
    assert bench.service.jobs()[0].epoch == 0


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


def test_a_plan_made_while_rank_0_is_away_waits_for_it(bench):
    bench.join_all()
    bench.send(0, wire.Goodbye("job", 0))
    bench.brains["job"].plans = [Plan(1)]
    step = wire.Steps("job", 1, (StepRecord(1, 0, 1.0),))
    assert "PlanOffer" not in [name for _, name in kinds(bench.send(1, step))]
    assert (b"job/0", wire.PlanOffer("job", Plan(1))) in bench.hello(0)


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
