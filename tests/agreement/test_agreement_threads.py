"""The agreement's threads on a store in memory, each rank with a copy of the real plugin."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from nccl_side import NO_PLAN, Side, channels, own_plugin, plan, row

from benchmarks.lib.waiting import wait_until
from zerotune.agent.agreement import Agreement
from zerotune.agent.agreement.news import NewCommunicator, Notified, Offered, PollFor, Withdrawn
from zerotune.agent.nccl.library import Plugin
from zerotune.store.records import NextStage, Phase, Plan

WORLD = 0xABC


class Rank:
    def __init__(self, plugin: Plugin, agreement: Agreement) -> None:
        self.plugin, self.agreement = plugin, agreement
        self.sides: dict[int, Side] = {}
        self.ran: dict[int, list[int]] = {}

    def join(self, comm_id: int, n_ranks: int) -> None:
        self.sides[comm_id] = Side(self.plugin, comm_id, n_ranks)
        self.ran[comm_id] = []

    def call(self, n_calls: int = 1, comm_id: int = WORLD) -> None:
        for _ in range(n_calls):
            self.ran[comm_id].append(self.sides[comm_id].call())


def _nothing() -> None:
    """Neither fails nor loses anything."""


class UnsteadyStore(dist.PrefixStore):
    """Calls `fail` before each request, and `lose` before its answer is handed on."""

    def __init__(self, store: dist.Store, fail: Callable[[], None], lose: Callable[[], None]) -> None:
        super().__init__("", store)
        self.fail, self.lose = fail, lose

    def clone(self) -> UnsteadyStore:
        return self

    def ask(self, request: Callable[..., Any], *args: Any) -> Any:
        self.fail()
        answer = request(*args)
        self.lose()
        return answer

    def compare_set(self, *args):
        return self.ask(super().compare_set, *args)

    def set(self, *args):
        self.ask(super().set, *args)

    def append(self, *args):
        self.ask(super().append, *args)

    def add(self, *args):
        return self.ask(super().add, *args)


class Job:
    """Ranks of one process. `bells`: whether a bell reaches the other ranks."""

    def __init__(self, folder, n_ranks: int, fail: Callable[[], None] = _nothing, lose: Callable[[], None] = _nothing):
        self.store, self.bells = dist.HashStore(), True
        self.fails: dict[int, Callable[[], None]] = dict.fromkeys(range(n_ranks), fail)
        self.ranks: list[Rank] = []
        self.went: dict[int, threading.Event] = {rank: threading.Event() for rank in range(n_ranks)}
        for rank in range(n_ranks):
            plugin = own_plugin(folder, f"rank{rank}")
            self.went[rank].set()
            store = UnsteadyStore(self.store, lambda rank=rank: self.fails[rank](), lose)
            agreement = Agreement(store, rank, n_ranks, plugin, self.ring)
            name = "prepare" if rank else "communicators"  # rank 0 prepares before it writes the change, too
            setattr(plugin, name, functools.partial(self.when_it_may, rank, getattr(plugin, name)))
            self.ranks.append(Rank(plugin, agreement))
        for each in self.ranks:
            each.join(WORLD, n_ranks)
        wait_until(lambda: all(each.agreement.state == "agreeing" for each in self.ranks))

    def when_it_may(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        self.went[rank].wait(30)
        return function(*args)

    def ring(self, number: int) -> None:
        for each in self.ranks[1:] if self.bells else ():
            each.agreement.post(Notified(number))

    def offer(self, wanted: Plan) -> None:
        self.ranks[0].agreement.post(Offered(wanted))

    def call_until(self, wanted: int, comm_id: int = WORLD) -> None:
        """All members of a communicator call it until it runs `wanted`: how soon depends on the machine's pace."""
        members = [each for each in self.ranks if comm_id in each.sides]
        for _ in range(200):
            for each in members:
                each.call(500, comm_id)
            if all(each.ran[comm_id][-1] == wanted for each in members):
                break
        assert [each.ran[comm_id][-1] for each in members] == [wanted] * len(members)
        assert all(each.ran[comm_id] == members[0].ran[comm_id] for each in members)

    def n_changes(self) -> list[int]:
        return [each.agreement.counters().n_changes for each in self.ranks]


@pytest.fixture
def make_job(tmp_path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(n_ranks: int, **faults: Callable[[], None]) -> Job:
        jobs.append(Job(tmp_path, n_ranks, **faults))
        return jobs[-1]

    yield make
    for job in jobs:
        for each in job.ranks:
            each.agreement.close()
            for side in each.sides.values():
                side.close()


def test_at_rest_nothing_is_asked_of_the_store(make_job) -> None:
    job = make_job(3)
    for each in job.ranks:
        each.call(16)
    job.offer(plan(1, 3))
    wait_until(lambda: min(job.n_changes()) == 1)
    time.sleep(0.1)  # rank 0 deletes answers
    before = [each.agreement.counters() for each in job.ranks]
    for each in job.ranks:
        each.call(2000)
        each.agreement.post(Notified(1))  # a bell twice
    time.sleep(0.3)
    after = [each.agreement.counters() for each in job.ranks]
    assert [each.n_store_requests for each in after] == [each.n_store_requests for each in before]
    assert [each.n_requests_at_rest for each in after] == [0, 0, 0]


def test_a_promised_call_waits_and_lets_go_of_the_interpreter(make_job) -> None:
    job = make_job(2)
    for each in job.ranks:
        each.call(16)
    job.went[0].clear()  # rank 0 has written the change, and does not answer yet
    job.offer(plan(1, 2))
    first = job.ranks[1]
    time.sleep(0.1)
    thread = threading.Thread(target=first.call, args=(900,), daemon=True)
    thread.start()
    wait_until(lambda: first.plugin.waits()[2] == 1)  # this thread runs: the lock was let go of
    n_before = len(first.ran[WORLD])
    time.sleep(0.05)
    assert len(first.ran[WORLD]) == n_before
    job.went[0].set()
    thread.join(30)
    assert not thread.is_alive()
    assert first.ran[WORLD][-1] == channels(1)
    job.ranks[0].call(900)
    assert job.ranks[0].ran == first.ran


def test_background_threads_alone_end_the_waiting_of_a_call(make_job) -> None:
    """Rank 0's background thread never comes back, and no other rank trains: the change is given up."""
    job = make_job(3)
    for each in job.ranks:
        each.call(16)
    job.went[0].clear()
    job.offer(plan(1, 3))
    time.sleep(0.1)
    began_s = time.monotonic()
    job.ranks[1].call(900)
    assert time.monotonic() - began_s < 8.0
    assert set(job.ranks[1].ran[WORLD]) == {NO_PLAN}
    job.went[0].set()
    wait_until(lambda: job.n_changes()[0] >= 1)
    # What was given up is asked for again, and comes.
    wait_until(lambda: min(each.agreement.counters().n_adopted for each in job.ranks) == 1)
    for each in job.ranks:
        each.call(1_000 - len(each.ran[WORLD]))
    job.call_until(channels(1))


def test_a_paused_background_thread_costs_its_communicators_one_change(make_job) -> None:
    job = make_job(3)
    for each in job.ranks:
        each.call(16)
    for each in job.ranks[:2]:
        each.join(7, 2)
        each.call(16, 7)
    job.went[2].clear()
    job.offer(plan(1, 2, 3))
    wait_until(lambda: job.n_changes()[0] == 1)
    job.call_until(channels(1), 7)
    for each in job.ranks[:2]:
        each.call(500)
        assert each.ran[WORLD][-1] == NO_PLAN
    assert dict(job.ranks[0].agreement.counters().left_out) == {f"{WORLD:016x}": "ranks_missing"}
    job.went[2].set()
    wait_until(lambda: job.ranks[2].agreement.counters().n_adopted == 1)
    for each in job.ranks:
        each.call(600 - len(each.ran[WORLD]))
    job.call_until(channels(1))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("n_failures", [1, 5])
def test_a_store_that_fails_for_a_while_costs_nothing_but_time(make_job, failing: int, n_failures: int) -> None:
    """Five in a row are more than one request is repeated for: it fails, and the promises hold."""
    job = make_job(3)
    for each in job.ranks:
        each.call(16)
    left = [n_failures]

    def fail() -> None:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("connection reset by peer")

    job.fails[failing] = fail
    job.offer(plan(1, 3))
    wait_until(lambda: min(each.agreement.counters().n_adopted for each in job.ranks) == 1)
    job.call_until(channels(1))
    assert [each.agreement.counters().state for each in job.ranks] == ["agreeing"] * 3


class EverySecond:
    """Raises at every second call of each thread."""

    def __init__(self) -> None:
        self.seen = threading.local()

    def __call__(self) -> None:
        self.seen.odd = not getattr(self.seen, "odd", False)
        if self.seen.odd:
            raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("fault", ["fail", "lose"])
def test_requests_that_have_to_be_repeated_cost_nothing_but_time_from_a_jobs_start_on(make_job, fault: str) -> None:
    """If an answer is lost, the store has carried the request out twice."""
    job = make_job(3, **{fault: EverySecond()})
    for each in job.ranks:
        each.call(16)
    job.offer(plan(1, 3))
    wait_until(lambda: min(each.agreement.counters().n_adopted for each in job.ranks) == 1)
    job.call_until(channels(1))


def test_closing_while_a_change_is_under_way_lets_calls_pass(make_job) -> None:
    job = make_job(2)
    for each in job.ranks:
        each.call(16)
    job.went[0].clear()
    job.offer(plan(1, 2))
    time.sleep(0.1)
    job.ranks[1].agreement.close()
    began_s = time.monotonic()
    job.ranks[1].call(10_000)
    assert time.monotonic() - began_s < 20.0
    job.went[0].set()
    wait_until(lambda: job.n_changes()[0] == 1)
    job.ranks[0].call(10_000)
    assert job.ranks[0].ran == job.ranks[1].ran
    assert set(job.ranks[0].ran[WORLD]) == {NO_PLAN}


def test_ranks_whose_histories_differ_are_left_alone_for_good(make_job) -> None:
    job = make_job(2)
    for each in job.ranks:
        each.call(16)
    job.offer(plan(1, 2))
    wait_until(lambda: min(job.n_changes()) == 1)
    job.call_until(channels(1))
    job.ranks[1].sides[WORLD].call(4096)
    job.ranks[0].sides[WORLD].call(8192)
    for each in job.ranks:
        each.call(9000)
    for epoch in (2, 3):
        job.offer(plan(epoch, 2))
        wait_until(lambda: min(job.n_changes()) == epoch)  # noqa: B023
        job.call_until(NO_PLAN)


def test_stages_follow_by_themselves_and_phases_by_the_history_of_calls(make_job) -> None:
    """Rank 1 says the wrong phases, and ends half as many steps: what runs is what rank 0's steps were."""
    job = make_job(2)
    forward, backward = int(Phase.forward_gather), int(Phase.backward_gather)
    for rank, each in enumerate(job.ranks):
        for step in range(12):
            each.plugin.set_phase(backward if rank else forward)
            each.ran[WORLD] += [each.sides[WORLD].call(size) for size in (1 << 20, 1 << 21)]
            each.plugin.set_phase(forward if rank else backward)
            each.ran[WORLD].append(each.sides[WORLD].call(1 << 20))
            each.plugin.set_step((step + 1) // (1 + rank))
    rows = (row(2, 5, Phase.forward_gather), row(2, 7, Phase.backward_gather))
    wanted = Plan(1, rows, then=(NextStage(n_steps=3, n_rows=2, rows=(row(2, 9),)),))
    job.offer(wanted)
    wait_until(lambda: min(job.n_changes()) == 1)
    for each in job.ranks:
        for size in (1 << 20, 1 << 21, 1 << 20) * 100:
            each.ran[WORLD].append(each.sides[WORLD].call(size))
    ran = job.ranks[0].ran[WORLD]
    assert ran == job.ranks[1].ran[WORLD]
    at = ran.index(5)
    assert at % 3 == 0
    assert ran[at : at + 9] == [5, 5, 7] * 3
    assert set(ran[at + 9 :]) == {9}
    job.ranks[0].agreement.post(Withdrawn())
    wait_until(lambda: min(job.n_changes()) == 2)
    job.call_until(NO_PLAN)


def test_a_control_window_is_two_steps_of_nccls_own_choice_on_all_ranks(make_job) -> None:
    """Rows that tell phases apart go on by themselves after it, and each rank knows its epoch."""
    job, n_steps = make_job(2), itertools.count(1)

    def train(is_enough: Callable[[], bool]) -> None:
        for step in itertools.takewhile(lambda step: step % 1000 or not is_enough(), n_steps):
            for each in job.ranks:
                for phase in (Phase.forward_gather, Phase.backward_gather):
                    each.plugin.set_phase(int(phase))
                    each.ran[WORLD].append(each.sides[WORLD].call(1 << 20))
                each.plugin.set_step(step)

    rows = (row(2, 5, Phase.forward_gather), row(2, 7, Phase.backward_gather))
    plans = Plan(1, rows), Plan(2, rows, then=(NextStage(4, n_rows=2), NextStage(2, n_rows=0, rows=rows)))
    assert [each.control_epochs for each in plans] == [(), (3,)]
    train(lambda: True)
    ran = job.ranks[0].ran[WORLD]
    for n_changes, wanted in enumerate(plans, 1):
        job.offer(wanted)
        wait_until(lambda: min(job.n_changes()) == n_changes)  # noqa: B023
        n_before = len(ran)
        train(lambda: ran[-1] == 7 and (not wanted.then or NO_PLAN in ran[n_before:]))  # noqa: B023
    assert ran == job.ranks[1].ran[WORLD]
    began = ran.index(5)
    at = ran.index(NO_PLAN, began)
    assert at % 2 == 0, "where a step begins"
    assert ran[began:at] == [5, 7] * ((at - began) // 2)
    assert ran[at : at + 4] == [NO_PLAN] * 4
    assert ran[at + 4 :] == [5, 7] * (len(ran[at + 4 :]) // 2)
    assert [each.agreement.controls for each in job.ranks] == [(3,)] * 2


def test_without_bells_ranks_find_a_change_soon_after_the_start(make_job) -> None:
    job = make_job(2)
    job.bells = False
    for each in job.ranks:
        each.call(16)
    job.ranks[1].agreement.post(PollFor(10.0))
    job.offer(plan(1, 2))
    wait_until(lambda: min(each.agreement.counters().n_adopted for each in job.ranks) == 1)
    job.call_until(channels(1))


def test_a_plan_that_cannot_be_loaded_reaches_nobody(make_job) -> None:
    job = make_job(2)
    for each in job.ranks:
        each.call(16)
    job.offer(Plan(1, (row(2, 5), row(2, 6))))
    wait_until(lambda: job.ranks[0].agreement.n_refused_plans == 1)
    job.offer(plan(2, 2))
    wait_until(lambda: min(job.n_changes()) == 1)
    job.ranks[0].agreement.post(NewCommunicator())  # asks for the plan in force, not for the refused one
    job.call_until(channels(2))
    assert job.ranks[0].agreement.n_refused_plans == 1
