"""Jobs and their ranks come, fall silent and leave, as status and store tell it."""

from __future__ import annotations

import pytest
from service_stubs import report, steps

from zerotune.store import wire
from zerotune.tuner.modeling.requests import Request, RequestKind
from zerotune.tuner.service.service import RANK_TIMEOUT_S


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


def test_time_in_which_the_daemon_stood_still_is_no_silence(bench):
    bench.join_all()
    bench.now_s += RANK_TIMEOUT_S + 1
    bench.service.stood_still(RANK_TIMEOUT_S + 1)
    bench.tick(0.5)
    (status,) = bench.service.jobs()
    assert (status.n_ranks_seen, status.health) == (4, "ok")
    bench.tick(RANK_TIMEOUT_S)
    assert bench.service.jobs() == (), "after that it counts as ever"


@pytest.mark.parametrize("failure", ["", "RuntimeError"])
def test_a_goodbye_to_a_daemon_that_came_too_late_for_a_greeting_tells_how_the_job_ended(bench, failure):
    bench.store.record_job("job", "fabric", {}, 2)
    bench.store.update_job("job", is_lost=True, failure="")
    for rank in range(2):
        assert bench.send(rank, wire.Goodbye("job", rank, failure if rank else "")) == []
    job = bench.store.jobs["job"]
    assert (job["is_lost"], job["ended_at_s"]) == (False, bench.now_s)
    assert job["failure"] == (f"rank 1: {failure}" if failure else "")


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


def test_rank_0_rings_for_all_others_and_they_for_it(bench):
    for rank in range(4):
        bench.hello(rank)
    others = [(b"job/%d" % rank, wire.Bell("job", 7)) for rank in (1, 2, 3)]
    assert bench.send(0, wire.Bell("job", 7)) == others
    assert bench.send(2, wire.Bell("job", 0)) == [(b"job/0", wire.Bell("job", 0))]


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
