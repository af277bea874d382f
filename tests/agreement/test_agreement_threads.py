"""`Agreement` with its ranks as threads of one process, stepped in lockstep by the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from job_stubs import StubPlugin

from zerotune.agent.agreement import Agreement, Pacing, job_start, pacing_for
from zerotune.agent.agreement.exchange import Closed, Exchange
from zerotune.agent.agreement.plan_table import PlanTable
from zerotune.agent.agreement.protocol import BoundaryMessage, decode_message, encode_message
from zerotune.store.errors import RankDisagreement, WireError
from zerotune.store.records import BASELINE, Collective, CommunicatorClass, FirstLook, Phase, Plan, PlanRow

EVERY = Pacing(base=1, limit=1)


class Job:
    """`n_ranks` agreements over one in-process store."""

    def __init__(
        self,
        n_ranks: int,
        *,
        refuses: dict[int, frozenset[int]] | None = None,
        store: dist.Store | None = None,
        **options: Any,
    ) -> None:
        self.store = store or dist.HashStore()
        self.plugins = [StubPlugin((refuses or {}).get(rank, frozenset())) for rank in range(n_ranks)]
        self.calls = [0] * n_ranks
        self._pool = ThreadPoolExecutor(n_ranks)
        options = {"pacing": EVERY, "timeout_s": 20.0} | options
        self.ranks = [
            Agreement(self.store, rank, n_ranks, PlanTable(self.plugins[rank]), self._counter(rank), **options)
            for rank in range(n_ranks)
        ]

    def _counter(self, rank: int) -> Callable[[], int]:
        return lambda: self.calls[rank]

    def step(self, extra_calls: int = 0) -> list[int]:
        """One step on all ranks; `extra_calls` more on the last."""
        for rank in range(len(self.ranks)):
            self.calls[rank] += 2
        self.calls[-1] += extra_calls
        return list(self._pool.map(Agreement.boundary, self.ranks))

    def until_agreeing(self) -> None:
        """Past job start and probation, so that offers are taken."""
        deadline = time.monotonic() + 20
        while min(rank.n_agreed for rank in self.ranks) < 5:
            assert time.monotonic() < deadline
            self.step()

    def close(self) -> None:
        self._pool.map(Agreement.close, self.ranks)
        self._pool.shutdown()


@pytest.fixture
def job() -> Any:
    jobs = []

    def start(*args: Any, **options: Any) -> Job:
        jobs.append(Job(*args, **options))
        return jobs[-1]

    yield start
    for started in jobs:
        started.close()


def test_an_offer_is_adopted_within_two_boundaries(job: Any) -> None:
    ranks = job(3)
    ranks.until_agreeing()
    for epoch in range(1, 20):
        ranks.ranks[0].offer(Plan(epoch))
        ranks.step()
        assert ranks.step() == [epoch] * 3


def test_a_first_look_ends_on_all_ranks_without_the_daemon(job: Any) -> None:
    ranks = job(3)
    ranks.until_agreeing()
    ranks.ranks[0].offer(Plan(1, first_look=FirstLook(2, 0)))
    ranks.ranks[0].withdraw()
    assert [ranks.step() for _ in range(3)][-1] == [0] * 3, "a daemon that is gone offers nothing"
    ranks.ranks[0].offer(Plan(1, first_look=FirstLook(2, 0)))
    seen = [ranks.step() for _ in range(8)]
    assert all(len(set(epochs)) == 1 for epochs in seen)
    epochs = [epochs[0] for epochs in seen]
    assert epochs.count(1) == 2
    assert epochs[-1] == 2


def test_a_newer_plan_overtakes_a_first_look(job: Any) -> None:
    ranks = job(2)
    ranks.until_agreeing()
    ranks.ranks[0].offer(Plan(1, first_look=FirstLook(5, 0)))
    while ranks.step() != [1, 1]:
        pass
    ranks.ranks[0].offer(Plan(3))
    assert [ranks.step() for _ in range(8)][-1] == [3, 3]


def test_what_could_not_end_does_not_begin(job: Any) -> None:
    ranks = job(2, refuses={0: frozenset({2})})
    ranks.until_agreeing()
    ranks.ranks[0].offer(Plan(1, first_look=FirstLook(2, 0)))
    assert [ranks.step() for _ in range(6)][-1] == [0, 0]
    assert ranks.ranks[0].n_refused_plans == 1


def test_only_rank_0_offers(job: Any) -> None:
    ranks = job(2)
    ranks.until_agreeing()
    ranks.ranks[1].offer(Plan(7))
    assert [ranks.step() for _ in range(4)][-1] == [0, 0]


def test_epochs_that_do_not_rise_are_refused(job: Any) -> None:
    ranks = job(2)
    ranks.until_agreeing()
    leader = ranks.ranks[0]
    leader.offer(Plan(5))
    ranks.step(), ranks.step()
    leader.offer(Plan(4))
    leader.offer(Plan(0))
    leader.offer(Plan(5, expires_after=3))
    assert [ranks.step() for _ in range(3)][-1] == [5, 5]
    assert leader.n_refused_plans == 3


def test_a_plan_that_rank_0_cannot_load_is_never_published(job: Any) -> None:
    ranks = job(2, refuses={0: frozenset({1})})
    ranks.until_agreeing()
    ranks.ranks[0].offer(Plan(1))
    assert [ranks.step() for _ in range(3)][-1] == [0, 0]
    assert ranks.ranks[0].n_refused_plans == 1
    ranks.ranks[0].offer(Plan(2))
    assert [ranks.step() for _ in range(2)][-1] == [2, 2]


def test_a_rank_that_cannot_follow_says_so_instead_of_diverging(job: Any) -> None:
    ranks = job(2, refuses={1: frozenset({1})})
    ranks.until_agreeing()
    ranks.ranks[0].offer(Plan(1))
    with pytest.raises(RankDisagreement, match=r"rank 1 .*epoch 1"):
        ranks.step(), ranks.step(), ranks.step()


def test_ranks_out_of_step_freeze_the_plan(job: Any) -> None:
    ranks = job(2)
    ranks.until_agreeing()
    leader = ranks.ranks[0]
    leader.offer(Plan(1))
    ranks.step(), ranks.step()
    ranks.step(extra_calls=1)
    for _ in range(4):
        ranks.step()
    leader.offer(Plan(2))
    assert [ranks.step() for _ in range(4)][-1] == [1, 1]
    assert leader.state == "frozen"
    assert ranks.ranks[1].n_mismatches > 0


def test_ranks_of_different_versions_train_on_untuned() -> None:
    store = dist.HashStore()
    pair = [Agreement(store, r, 2, PlanTable(StubPlugin()), lambda: 0, fingerprint=f"layout {r}") for r in range(2)]
    deadline = time.monotonic() + 20
    while any(rank.state == "starting" for rank in pair):
        assert time.monotonic() < deadline
        assert [rank.boundary() for rank in pair] == [0, 0]
    pair[0].offer(Plan(1))
    assert [rank.boundary() for _ in range(5) for rank in pair] == [0] * 10
    assert [rank.state for rank in pair] == ["off", "off"]
    for rank in pair:
        rank.close()


def test_a_missing_rank_is_never_waited_for() -> None:
    alone = Agreement(dist.HashStore(), 1, 2, PlanTable(StubPlugin()), lambda: 0)
    assert [alone.boundary() for _ in range(1000)] == [0] * 1000
    assert (alone.state, alone.n_waits) == ("starting", 0)
    alone.close()


@pytest.mark.parametrize(("n_before", "n_came", "n_after"), [(2, 2, 2), (2, 1, 2), (4, 3, 3), (2, 2, 3), (3, 3, 2)])
def test_a_restarted_job_takes_nothing_from_what_the_store_still_holds(
    job: Any, n_before: int, n_came: int, n_after: int
) -> None:
    """`n_came` of `n_before` ranks had started before; the new rank 0 comes last."""
    store = dist.HashStore()
    if n_came == n_before:
        first = job(n_before, store=store)
        first.until_agreeing()
        first.ranks[0].offer(Plan(7))
        assert [first.step() for _ in range(3)][-1] == [7] * n_before
        for rank in first.ranks:
            rank.close()
    else:
        for number in range(n_came):
            dead = Agreement(store, number, n_before, PlanTable(StubPlugin()), lambda: 0)
            while store.add(f"1/{job_start.all_key(n_before)}", 0) <= number:
                time.sleep(0.001)
            dead.close()
    early = [Agreement(store, r, n_after, PlanTable(StubPlugin()), lambda: 0) for r in range(1, n_after)]
    for rank in early:
        assert [rank.boundary() for _ in range(500)] == [0] * 500
    time.sleep(0.05)
    assert {(rank.state, rank.n_waits, rank.incarnation) for rank in early} == {("starting", 0, None)}
    late = Agreement(store, 0, n_after, PlanTable(StubPlugin()), lambda: 0, pacing=EVERY)
    deadline = time.monotonic() + 20
    while any(rank.state == "starting" for rank in [late, *early]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert {(rank.state, rank.incarnation) for rank in [late, *early]} == {("agreeing", 2)}
    for rank in [late, *early]:
        rank.close()


def test_silence_of_rank_0_ends_in_the_plan_in_force(job: Any) -> None:
    ranks = job(2)
    ranks.until_agreeing()
    follower = ranks.ranks[1]
    follower.patience_s = 0.2
    follower.boundary()
    follower.boundary()
    assert follower.boundary() == 0
    assert (follower.state, follower.n_waits > 0) == ("lost", True)
    assert follower.boundary() == 0


def test_quiet_boundaries_lie_further_apart(job: Any) -> None:
    ranks = job(2, pacing=Pacing(base=1, limit=4, n_quiet=2))
    ranks.until_agreeing()
    for _ in range(10):
        ranks.step()
    before = ranks.ranks[1].n_agreed
    for _ in range(40):
        ranks.step()
    assert ranks.ranks[1].n_agreed - before == 10
    ranks.ranks[0].offer(Plan(1))
    assert [ranks.step() for _ in range(8)][-1] == [1, 1]


def test_read_messages_are_deleted(job: Any) -> None:
    ranks = job(2)
    for _ in range(700):
        ranks.step()
    assert ranks.store.num_keys() < 300


def test_interval_grows_with_the_world() -> None:
    assert pacing_for(8).base == 1
    assert pacing_for(4096).base > pacing_for(1024).base >= 1


def test_a_message_survives_the_wire() -> None:
    row = PlanRow(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, 1, 2, BASELINE)
    message = BoundaryMessage(5, 6, 3, 17, Plan(3, (row,)))
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        encode_message(BoundaryMessage(5, 6, 3, 0))[:-1],
        encode_message(BoundaryMessage(5, 5, 3, 0)),
        encode_message(BoundaryMessage(5, 6, 3, 0, Plan(4))),
    ],
)
def test_a_broken_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_message(data)


def test_a_blocking_read_can_be_called_off() -> None:
    exchange = Exchange(dist.HashStore())
    exchange.close()
    start = time.monotonic()
    with pytest.raises(Closed):
        exchange.get("never")
    assert time.monotonic() - start < 0.5
