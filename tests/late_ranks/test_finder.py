"""Who is named for what pattern of durations; `python -m benchmarks late_ranks` judges over drawn jobs."""

import numpy as np
import pytest

from zerotune.store.records import Collective
from zerotune.store.records.lateness import Lateness, LateRank
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.late_ranks import finder
from zerotune.tuner.late_ranks.finder import LateRankFinder
from zerotune.tuner.late_ranks.persistence import OPEN_STEPS, ExcessWindow
from zerotune.tuner.late_ranks.sequential_test import EVENT_STEPS
from zerotune.tuner.late_ranks.waits import behind_the_others

TRANSFER_US = 500.0
STEPS_AT_ONCE = 5
"""Steps that one join of a busy daemon observes."""


class Job:
    """Ranks whose arrivals are set; each call takes `transfer_us` from the last arrival on."""

    def __init__(self):
        self.finder = LateRankFinder()
        self.step = 0

    def play(self, n_steps, *calls):
        """Each call: (communicator, {reporter: arrival_us(step)}, transfer_us, collective)."""
        joined = []
        for n in range(1, n_steps + 1):
            for at, (comm_id, arrivals, transfer_us, collective) in enumerate(calls):
                came = {one: us(self.step) if callable(us) else us for one, us in arrivals.items()}
                rows = np.zeros(len(came), OBSERVATION)
                rows["comm_id"], rows["step"], rows["collective"] = comm_id, self.step, collective
                rows["sequence"] = rows["start_ns"] = self.step * len(calls) + at
                rows["n_ranks"], rows["n_nodes"], rows["message_bytes"] = len(came), 1, 1 << 20
                rows["rank"] = list(came)
                rows["duration_us"] = [max(came.values()) + transfer_us - us for us in came.values()]
                joined.append(rows)
            self.step += 1
            if n % STEPS_AT_ONCE == 0 or n == n_steps:
                records, starts = np.concatenate(joined), np.cumsum([0, *map(len, joined[:-1])])
                self.finder.observe(records, records["rank"].astype(np.uint64), starts)
                joined = []

    def named(self, step_us=10_000.0):
        found = self.finder.lateness(step_us)
        return {one.rank for one in found.late}, found


def call(arrivals, comm_id=1, transfer_us=TRANSFER_US, collective=Collective.all_gather):
    return comm_id, arrivals, transfer_us, collective


def test_a_straggler_is_named_with_what_it_costs():
    job = Job()
    job.play(100, call({0: 0, 1: 5, 2: 1800, 3: 2}))
    job.finder.hosts[2] = "c"
    named, found = job.named()
    assert named == {2}
    (one,) = found.late
    assert (one.late_us, one.share, one.node, one.is_node) == (pytest.approx(1798), 1.0, "c", False)
    assert found.wait_us == pytest.approx(1796.5)
    assert found.transfer_us == pytest.approx(TRANSFER_US)
    assert found.wait_share == pytest.approx(0.782, abs=1e-3)
    assert found.n_steps == 100 - OPEN_STEPS


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_chance_alone_names_nobody(n_ranks):
    rng = np.random.default_rng(n_ranks)
    draws = rng.exponential(1000, (2000, n_ranks))
    job = Job()
    for _ in range(20):
        job.play(100, call({rank: lambda step, rank=rank: draws[step, rank] for rank in range(n_ranks)}))
        assert job.named()[0] == set()


@pytest.mark.parametrize("n_ranks", [2, 8])
@pytest.mark.slow
def test_events_that_last_long_name_nobody_however_often_one_asks(n_ranks):
    """Some jobs have the same rank in five of six events; in others it is late by noise in between, too."""
    rng = np.random.default_rng(n_ranks)
    n_jobs, n_steps = 16, 480
    hit = rng.integers(n_ranks, size=(n_jobs, n_steps // EVENT_STEPS)).repeat(EVENT_STEPS, axis=1)
    noise = rng.normal(0.0, 300.0, (n_jobs, n_steps, n_ranks)) * (np.arange(n_jobs) % 2)[:, None, None]
    for job in range(n_jobs):
        window = ExcessWindow()
        for step in range(n_steps):
            came_us = noise[job, step] + 2000.0 * (np.arange(n_ranks) == hit[job, step])
            late_us = behind_the_others(-came_us, np.zeros(1, np.int64))
            window.add(step, np.arange(n_ranks), late_us)
            if step % 8 == 0:
                assert window.persistent(100.0) == []


def test_small_lateness_is_not_told():
    for step_us, expected in ((10_000.0, set()), (1000.0, {2})):
        job = Job()
        job.play(150, call({0: 0, 1: 0, 2: 80}))
        assert job.named(step_us)[0] == expected


def test_a_straggler_that_moves_is_followed_and_remembered():
    job = Job()
    job.play(200, call({0: 0, 1: 2000, 2: 0}))
    assert job.named()[0] == {1}
    job.play(200, call({0: 0, 1: 0, 2: 3000}))
    named, found = job.named()
    assert named == {2}
    assert 150 <= found.late[0].since_step <= 250
    assert [one.rank for one in found.past] == [1]
    job.play(200, call({0: 0, 1: 0, 2: 0}))
    assert job.named()[0] == set()


def test_few_steps_name_nobody():
    job = Job()
    job.play(40, call({0: 0, 1: 0, 2: 5000}))
    assert job.named()[0] == set()


def test_ranks_that_a_straggler_holds_up_are_not_blamed():
    """Rank 1 is late in its group; the whole group is then late among the groups' partners."""
    job = Job()
    job.play(
        300,
        call({0: 0, 1: 2000}, comm_id=1),
        call({2: 0, 3: 0}, comm_id=2),
        call({0: 2000, 2: 0}, comm_id=3),
        call({1: 2000, 3: 0}, comm_id=4),
    )
    assert job.named()[0] == {1}


def test_a_slow_link_is_told_from_a_late_rank():
    """The pair 1 and 3 takes four times as long as the pair 0 and 2, so both are late afterwards."""
    job = Job()
    job.play(
        300,
        call({0: 0, 2: 0}, comm_id=1, collective=Collective.all_reduce),
        call({1: 0, 3: 0}, comm_id=2, transfer_us=4 * TRANSFER_US, collective=Collective.all_reduce),
        call({0: 0, 1: 1500}, comm_id=3),
        call({2: 0, 3: 1500}, comm_id=4),
    )
    named, found = job.named()
    assert named == set()
    (link,) = found.slow
    assert (link.ranks, link.excess_us) == ((1, 3), pytest.approx(3 * TRANSFER_US))


def test_a_broadcasts_sender_is_not_compared_with_its_receivers():
    job = Job()
    job.play(100, call({0: 0, 1: 2000, 2: 0}, collective=Collective.broadcast))
    assert job.named() == (set(), Lateness())


def test_a_late_node_is_named_or_the_rank_that_its_own_daemon_names():
    job = Job()
    job.finder.node_reported(8, 8, "b")
    job.finder.node_reported(16, 1, "c")
    job.play(300, call({0: 0, 1: 1, 8: 3000, 16: 0}))
    _, found = job.named()
    assert [(one.rank, one.is_node, one.node) for one in found.late] == [(8, True, "b")]
    late = LateRank(11, 2900.0, 0.9, 0, 97, "b")
    job.finder.node_reported(8, 8, "b", Lateness(100, late=(late,)))
    assert job.named()[1].late == (late,)
    job.finder.node_left(8)
    job.play(300, call({0: 0, 1: 1, 16: 3000}))
    assert [(one.rank, one.is_node) for one in job.named()[1].late] == [(16, False)]


def test_many_records_are_sampled_by_step(monkeypatch):
    monkeypatch.setattr(finder, "MANY_RECORDS", 2)
    job = Job()
    job.play(64 * 80, call({rank: 5000 * (rank == 2) for rank in range(8)}))
    named, found = job.named()
    assert named == {2}
    assert found.n_steps < 100
