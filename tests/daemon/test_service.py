"""The service as a state machine, under a fake clock."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from zerotune.store import wire
from zerotune.store.passages import OtherPlugin, Passage, PassageKind, Passages
from zerotune.store.records import Plan, Stage, StepRecord
from zerotune.tuner.modeling.requests import TRAIN_EVERY_MEASUREMENTS, TRAIN_PAUSE_S, Request, RequestKind
from zerotune.tuner.service import service as service_module
from zerotune.tuner.service.job import GREETED_S, NEWS_EVERY_S
from zerotune.tuner.service.service import RANK_TIMEOUT_S

COST = np.dtype(wire.COST_FIELDS)


def report(bench, records, ranks=range(4), **fields):
    block = records(**fields)
    for rank in ranks:
        bench.send(rank, wire.Observations("job", rank, len(block)), block)


def steps(*numbers, epoch=0):
    return wire.Steps("job", 0, tuple(StepRecord(n, epoch, 1000.0 * n) for n in numbers))


def numbers(words):
    return [int(one) for one in re.findall(r"\d+", words)]


def kinds(replies):
    return [(sender.decode(), type(message).__name__) for sender, message in replies]


def test_every_hello_is_answered(bench):
    for _ in range(2):
        assert bench.hello(3)[0] == (b"job/3", wire.Welcome(1, "test"))
    assert bench.store.jobs["job"]["fabric"] == {"emulated": "one_node"}
    (status,) = bench.service.jobs()
    assert (status.n_ranks, status.n_ranks_seen, status.health) == (4, 1, "ok")


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


def test_what_passed_the_tuner_by_is_summed_over_ranks_and_kept(bench, records):
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


def test_others_plugins_are_named_once_with_the_faults_of_all_ranks(bench, records):
    bench.join_all()
    for rank in range(4):
        others = (OtherPlugin("tuner", "ofi", rank), OtherPlugin("profiler", "inspector"))
        bench.send(rank, wire.Observations("job", rank, 0, passages=Passages(others=others)), records(n=0))
    expected = (OtherPlugin("tuner", "ofi", 6), OtherPlugin("profiler", "inspector"))
    assert bench.service.jobs()[0].passages.others == expected
    bench.tick(NEWS_EVERY_S)
    assert bench.store.jobs["job"]["passages"].others == expected


def test_observations_gather_before_they_are_joined(bench, records):
    bench.join_all()
    bench.tick()
    report(bench, records)
    assert 0 < bench.service.next_tick_s - bench.now_s <= service_module.JOIN_EVERY_S


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
    bench.tick(GREETED_S)
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
    for _ in range(int(2 * GREETED_S) + 1):
        bench.tick(0.5)
    assert len(bench.store.measurements) == 10, "what rank 1 may have taken part in"
    report(bench, records, ranks=(0,), n=5, n_ranks=2, sequence=np.arange(15, 20))
    bench.tick(0.5)
    assert len(bench.store.measurements) == 15


def test_a_job_over_before_its_other_rank_has_greeted_measures_nothing(bench, records):
    bench.hello(0, n_ranks=2)
    report(bench, records, ranks=(0,), n=10, n_ranks=2, duration_us=700.0)
    bench.send(0, wire.Goodbye("job", 0))
    assert bench.store.blocks == []


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


def test_only_the_leading_ranks_steps_and_adoptions_count(bench):
    bench.join_all()
    bench.send(1, wire.Steps("job", 1, (StepRecord(5, 0, 1.0),)))
    bench.send(1, wire.Adopted("job", 4, 5))
    assert bench.brains["job"].told == []
    bench.send(0, wire.Adopted("job", 4, 5))
    assert bench.brains["job"].told == [("adopted", (4, 5))]
    assert bench.service.jobs()[0].epoch == 4


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


def test_windows_open_without_the_ranks_of_other_nodes(bench):
    for rank in range(2):
        bench.hello(rank)
    replies = bench.tick(0.5) + bench.tick(service_module.SETTLE_S)
    assert sorted(kinds(replies)) == [("job/0", "Observe"), ("job/1", "Observe")]
    assert kinds(bench.hello(2)) == [("job/2", "Welcome"), ("job/2", "Observe")], "joins the open window"


def test_what_happens_before_the_knowledge_is_there_is_not_lost(bench, records):
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


def test_new_knowledge_replaces_the_old(bench):
    bench.join_all()
    bench.join_all(job="other", fabric="elsewhere")
    bench.service.model_ready("fabric", "better")
    assert bench.brains["job"].knowledge == "better"
    assert bench.brains["other"].knowledge == "knowledge"


def test_no_brain_where_rank_0_is_not(bench, records):
    for rank in (1, 2, 3):
        bench.hello(rank)
    bench.service.model_ready("fabric", "knowledge")
    report(bench, records, ranks=(1, 2, 3), n=2)
    bench.tick(GREETED_S)
    assert bench.brains == {}
    assert len(bench.store.measurements) == 2, "but measured and stored"


def test_a_restarted_daemon_learns_the_epoch_in_force(bench):
    bench.hello(0, epoch=17)
    bench.service.model_ready("fabric", "knowledge")
    assert bench.brains["job"].told == [("adopted", (17, 0))]


def test_a_brain_that_comes_late_numbers_above_what_was_offered_though_no_plan_is_in_force(bench):
    bench.hello(0, epoch=17)
    bench.send(0, wire.Adopted("job", 0, 3))  # the other daemon's plan has expired
    bench.service.model_ready("fabric", "knowledge")
    assert bench.brains["job"].told == [("adopted", (17, 0)), ("adopted", (0, 3))]


def test_steps_tell_what_is_in_force_where_the_word_of_it_was_lost(bench):
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


def test_a_node_without_rank_0_shows_the_epoch_in_force(bench):
    bench.hello(1)
    bench.send(1, wire.Steps("job", 1, (StepRecord(1, 0, 1.0), StepRecord(2, 6, 1.0))))
    assert bench.service.jobs()[0].epoch == 6


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


def test_silent_ranks_are_gone_and_greeting_ones_are_not(bench):
    bench.join_all()
    for _ in range(int(RANK_TIMEOUT_S) + 2):
        bench.hello(0)
        bench.tick(1.0)
    (status,) = bench.service.jobs()
    assert status.n_ranks_seen == 1
    bench.tick(RANK_TIMEOUT_S + 1)
    assert bench.service.jobs() == ()
    assert bench.store.jobs["job"]["ended_at_s"] == bench.now_s
    assert bench.store.jobs["job"]["is_lost"]


def test_a_job_that_says_goodbye_is_not_lost(bench):
    bench.join_all(2)
    for rank in range(2):
        bench.send(rank, wire.Goodbye("job", rank))
    assert bench.store.jobs["job"]["is_lost"] is False


def test_a_job_has_the_first_name_that_a_rank_gives_it(bench):
    bench.hello(1, name="\x1b[31m")
    assert bench.store.jobs["job"]["name"] == ""
    for name in ("gpt", "other", ""):
        bench.hello(0, name=name, pid=2)
        bench.send(0, wire.Goodbye("job", 0))
    (status,) = bench.service.jobs()
    assert status.name == bench.store.jobs["job"]["name"] == "gpt"
    bench.send(1, wire.Goodbye("job", 1))
    assert [one.name for one in bench.service.absent_jobs.ended(())] == ["gpt"]


def test_time_in_which_the_daemon_stood_still_is_no_silence(bench):
    bench.join_all()
    bench.now_s += RANK_TIMEOUT_S + 1
    bench.service.stood_still(RANK_TIMEOUT_S + 1)
    bench.tick(0.5)
    (status,) = bench.service.jobs()
    assert (status.n_ranks_seen, status.health) == (4, "ok")
    bench.tick(RANK_TIMEOUT_S)
    assert bench.service.jobs() == (), "after that it counts as ever"


def test_ranks_that_never_greet_are_told_of_unless_a_plan_shows_that_they_follow(bench):
    bench.hello(0, n_ranks=2)

    def health_after(seconds):
        for _ in range(seconds):
            bench.hello(0, n_ranks=2)
            bench.tick(1.0)
        return bench.service.jobs()[0].health

    assert health_after(5) == "ok", "it may be on its way"
    assert health_after(6).startswith("1 of 2 ranks ")
    bench.send(0, wire.Adopted("job", 1, 5))
    assert health_after(1) == "ok", "the other has its daemon on its own node"
    bench.send(0, wire.Adopted("job", 0, 50))
    assert health_after(1).startswith("1 of 2 ranks ")
    bench.hello(1, n_ranks=2)
    assert health_after(1) == "ok"


def test_silence_is_told_before_a_rank_is_taken_as_gone(bench):
    bench.join_all()
    for _ in range(3):
        for rank in (0, 2, 3):
            bench.hello(rank)
        bench.tick(1.0)
    (status,) = bench.service.jobs()
    assert (status.n_ranks_seen, numbers(status.health), status.heard_s_ago) == (4, [1], 3.0)
    bench.hello(1)
    assert bench.service.jobs()[0].health == "ok"
    bench.tick(2.5)
    assert bench.service.jobs()[0].health.startswith("4 ranks ")


def test_ranks_taken_as_gone_are_told_of_until_they_are_back(bench):
    """Training stands still without them, plan or not."""
    bench.join_all()
    bench.send(0, wire.Adopted("job", 1, 5))

    def after(n_seconds, *ranks):
        for _ in range(n_seconds):
            for rank in ranks:
                bench.hello(rank)
            bench.tick(1.0)
        status = bench.service.jobs()[0]
        return status.n_ranks_seen, status.health, status.heard_s_ago

    n_seen, health, heard_s_ago = after(15, 0, 2, 3)
    assert (n_seen, numbers(health), heard_s_ago) == (3, [1], 15.0)
    n_seen, health, heard_s_ago = after(11, 0, 2)
    assert (n_seen, numbers(health), heard_s_ago) == (2, [1, 3], 26.0)
    assert after(1, 0, 1, 2, 3)[1] == "ok"
    bench.send(1, wire.Goodbye("job", 1))
    assert after(5, 0, 2, 3)[1] == "ok", "it has ended as it should"


def test_the_last_goodbye_ends_the_job_and_records_what_is_left(bench, records):
    bench.join_all()
    report(bench, records, ranks=(0, 1, 2, 3), n=5)
    for rank in range(4):
        bench.send(rank, wire.Goodbye("job", rank))
    assert len(bench.store.measurements) == 5
    assert bench.store.jobs["job"]["ended_at_s"] == bench.now_s
    assert bench.service.jobs() == ()
    assert Request(RequestKind.train, "fabric") in bench.requests, "what it measured is learned from"
    assert bench.service.next_tick_s == float("inf"), "nothing to do: the daemon can sleep"


def test_training_is_asked_for_after_enough_news_but_not_all_the_time(bench, records):
    bench.join_all(1)
    sequence = 0
    for expected in (0, 0, 1, 1, 2):
        n = TRAIN_EVERY_MEASUREMENTS
        report(bench, records, ranks=(0,), n=n, n_ranks=1, sequence=np.arange(sequence, sequence + n))
        sequence += n
        bench.hello(0, n_ranks=1)
        bench.tick()
        assert bench.requests.count(Request(RequestKind.train, "fabric")) == expected
        for _ in range(int(TRAIN_PAUSE_S * 0.7)):  # two of these rounds are longer than the pause
            bench.hello(0, n_ranks=1)
            bench.tick(1.0)


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


def test_the_stage_is_recorded_when_it_becomes_known(bench):
    bench.join_all()
    bench.brains["job"].stage = Stage.zero3
    bench.send(0, steps(1))
    assert bench.store.jobs["job"]["stage"] == Stage.zero3
    assert bench.service.jobs()[0].stage == Stage.zero3


def test_status_counts(bench, records):
    bench.join_all()
    bench.tick(0.01)
    for rank in range(4):
        block = records(100)
        bench.send(rank, wire.Observations("job", rank, 100, n_dropped=5), block)
    bench.tick(2.5)
    bench.send(0, steps(1, 2, 3))
    (status,) = bench.service.jobs()
    assert (status.n_observations, status.n_dropped, status.step, status.step_us) == (400, 20, 3, 2000.0)
    assert status.observations_per_s == pytest.approx(400 / 2.5, rel=0.01)


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


def test_what_waits_for_a_brain_is_bounded_in_bytes(bench, records, monkeypatch):
    monkeypatch.setattr("zerotune.tuner.service.job.MAX_BACKLOG_BYTES", 100 * wire.OBSERVATION_BYTES)
    bench.hello(0, n_ranks=1)
    for _ in range(5):
        bench.send(0, wire.Observations("job", 0, 30), records(30, n_ranks=1))
    bench.service.model_ready("fabric", "knowledge")
    assert sum(len(block) for what, block in bench.brains["job"].told if what == "sequence") == 90


def test_a_connection_that_greets_as_another_rank_has_changed(bench):
    bench.hello(0)
    bench.send(0, wire.Hello("second", 1, 2, 1, "node", 1, "fabric", {}, 1, 5))
    (status,) = bench.service.jobs()
    assert (status.job_id, status.n_ranks_seen) == ("second", 1)


def test_closing_records_what_waits(bench, records):
    bench.join_all()
    report(bench, records, ranks=(0, 1), n=3)
    bench.service.close()
    assert len(bench.store.measurements) == 3


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


def test_jobs_without_steps_are_told_of_until_they_are_silent_or_greet(bench, monkeypatch):
    monkeypatch.setattr("zerotune.tuner.service.absent_jobs.MAX_SENDERS", 3)

    def without_steps():
        return bench.service.absent_jobs.without_steps(bench.service.job_ids)

    for rank, job in enumerate(("a", "a", "b", "too many")):
        assert bench.send(rank, wire.NoSteps(job, 8, 1000 + rank, 61.0), job=job) == []
    assert [(one.job_id, one.n_calls) for one in without_steps()] == [
        ("a", 1001),
        ("b", 1002),
    ]
    assert (bench.service.n_sessions, bench.service.jobs(), bench.service.n_refused) == (0, (), 0)
    bench.hello(0, job="a")
    assert [one.job_id for one in without_steps()] == ["b"]
    bench.now_s += 11
    assert without_steps() == ()


def test_jobs_that_ended_are_told_of_until_they_are_back(bench):
    def ended():
        return [
            (one.job_id, one.step, one.fell_silent, round(one.ended_s_ago))
            for one in bench.service.absent_jobs.ended(bench.service.job_ids)
        ]

    bench.hello(0, n_ranks=1, job="a")
    bench.hello(1, n_ranks=2, job="b")
    bench.send(0, wire.Steps("a", 0, (StepRecord(7, 0, 1.0),)), job="a")
    bench.send(0, wire.Goodbye("a", 0), job="a")
    assert ended() == [("a", 7, False, 0)]
    bench.tick(RANK_TIMEOUT_S + 1)
    assert ended() == [("b", 0, True, 11), ("a", 7, False, 11)], "silence counts from the last sign of life"
    bench.hello(0, n_ranks=1, job="a")
    assert [one[0] for one in ended()] == ["b"]
    for number in range(5):
        bench.hello(0, n_ranks=1, job=f"c{number}")
        bench.send(0, wire.Goodbye(f"c{number}", 0), job=f"c{number}")
    assert [one[0] for one in ended()] == ["c4", "c3", "c2"]


@pytest.mark.parametrize("others_are_killed", [False, True])
def test_a_job_of_which_one_rank_raised_has_failed(bench, others_are_killed):
    bench.join_all(3)
    bench.send(0, steps(7))
    bench.send(1, wire.Goodbye("job", 1, "RuntimeError"))
    bench.tick(0.5)
    (status,) = bench.service.jobs()
    assert "RuntimeError" in status.health
    if others_are_killed:  # by torchrun, as a rule
        bench.tick(RANK_TIMEOUT_S + 1)
    else:
        for rank in (0, 2):
            bench.send(rank, wire.Goodbye("job", rank, "DistBackendError" if rank else ""))
    (ended,) = bench.service.absent_jobs.ended(())
    assert (ended.step, ended.failure, ended.fell_silent) == (7, "rank 1: RuntimeError", others_are_killed)
    assert bench.store.jobs["job"]["failure"] == ended.failure


def test_a_job_of_which_one_rank_was_killed_is_lost_though_the_others_left_in_good_order(bench):
    bench.join_all(2)
    for _ in range(int(RANK_TIMEOUT_S) + 2):
        bench.hello(0, n_ranks=2)
        bench.tick(1.0)
    bench.send(0, wire.Goodbye("job", 0))
    (ended,) = bench.service.absent_jobs.ended(())
    assert (ended.failure, ended.fell_silent, bench.store.jobs["job"]["is_lost"]) == ("", True, True)


def test_a_rank_that_greets_when_the_others_have_left_makes_no_job_of_its_own(bench):
    bench.hello(0, n_ranks=2)
    bench.send(0, steps(39))
    bench.send(0, wire.Goodbye("job", 0))
    bench.now_s += 4
    bench.hello(1, n_ranks=2)
    bench.send(1, wire.Goodbye("job", 1, "no type's name"))
    (ended,) = bench.service.absent_jobs.ended(())
    assert (ended.job_id, ended.step, ended.ended_s_ago) == ("job", 39, 4.0)
    assert "no type" not in ended.failure
    assert bench.store.jobs["job"]["failure"] == ended.failure.strip() != ""


def test_a_late_rank_is_in_the_status_and_in_the_store(bench, records):
    bench.join_all()
    n_steps, step_us = 80, 4000.0
    for rank in range(4):
        duration_us = 100.0 if rank == 2 else 1900.0
        block = records(n_steps, duration_us=duration_us, step=np.arange(n_steps), rank=rank)
        bench.send(rank, wire.Observations("job", rank, n_steps), block)
    bench.send(0, wire.Steps("job", 0, tuple(StepRecord(step, 0, step_us) for step in range(n_steps))))
    for _ in range(12):
        for rank in range(4):
            bench.hello(rank)
        bench.tick()
    (status,) = bench.service.jobs()
    (late,) = status.lateness.late
    assert (late.rank, late.node, late.late_us) == (2, "node", pytest.approx(1800.0))
    assert bench.store.jobs["job"]["lateness"] == status.lateness
    reply = wire.StatusReply(1, "0", "ipc://x", "s.db", 1.0, 1, 0, (status,))
    assert wire.decode_daemon(wire.encode(reply)) == reply


def test_a_failure_of_looking_for_late_ranks_costs_no_measurement(bench, records, monkeypatch):
    bench.join_all()
    monkeypatch.setattr("zerotune.tuner.late_ranks.finder.LateRankFinder.observe", lambda *_: 1 / 0)
    for first in (0, 5):
        for rank in range(4):
            block = records(5, sequence=np.arange(first, first + 5))
            bench.send(rank, wire.Observations("job", rank, 5), block)
        bench.tick()
    assert len(bench.store.measurements) == 10
