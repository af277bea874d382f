"""A job on two nodes: two services and the line between them, under one fake clock."""

from __future__ import annotations

import numpy as np
import pytest
from service_stubs import FABRIC, FakeStore, ScriptedBrain

from zerotune.agent.daemon_link.leader import LeaderAddress, from_here
from zerotune.store import wire
from zerotune.store.records import Plan, StepRecord
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.service.job import HELLO_TIMEOUT_S
from zerotune.tuner.service.nodes import UPLINK_TIMEOUT_S
from zerotune.tuner.service.service import RANK_TIMEOUT_S, Service

LEADER = "tcp://first:5577"


class Line:
    """The second daemon's uplinks: carries messages to the first unless it is cut."""

    def __init__(self, job: TwoNodes) -> None:
        self.job = job
        self.is_cut = False
        self.closed: list[str] = []

    def send(self, job_id, endpoint, message, records):
        assert endpoint == LEADER
        if not self.is_cut:
            message, received = wire.decode_agent(wire.encode(message, records))
            self.job.deliver(self.job.first.handle(b"second", message, np.frombuffer(received, OBSERVATION)))

    def close(self, job_id):
        self.closed.append(job_id)


class TwoNodes:
    """Ranks 0 and 1 with the first daemon, 2 and 3 with the second."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.brain = ScriptedBrain()
        self.stores = FakeStore(), FakeStore()
        self.line = Line(self)
        self.told: list[tuple[str, wire.DaemonMessage]] = []
        self._sequence = 0
        self.first = self.make_service(0, None)
        self.second = self.make_service(1, self.line)
        self.greet()
        self.first.model_ready("fabric", "knowledge")

    def make_service(self, node, uplinks):
        welcome = wire.Welcome(node, "test", LEADER if node == 0 else "tcp://second:5577")
        return Service(self.stores[node], lambda *_: self.brain, lambda: self.now_s, welcome, uplinks)

    def deliver(self, replies) -> None:
        for receiver, message in replies:
            if receiver == b"second":
                if not self.line.is_cut:
                    self.deliver(self.second.handle_uplink("job", message))
            else:
                self.told.append((receiver.decode(), message))

    def send(self, rank, message, records=None):
        self.deliver((self.first if rank < 2 else self.second).handle(f"rank {rank}".encode(), message, records))

    def greet(self) -> None:
        for rank in range(4):
            leader = LEADER if rank == 2 else ""
            self.send(rank, wire.Hello("job", rank, 4, rank % 2, "node", 1, "fabric", FABRIC, 0, 5, leader=leader))

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.now_s += 0.1
            self.greet()
            for service in (self.first, self.second):
                while service.next_tick_s <= self.now_s:
                    self.deliver(service.tick())

    def report(self, records, *durations_us, n=10, **fields):
        block = records(n, sequence=self._sequence + np.arange(n), n_nodes=2, **fields)
        self._sequence += n
        for rank, duration_us in enumerate(durations_us):
            block["duration_us"] = duration_us
            self.send(rank, wire.Observations("job", rank, n), block.copy())

    def heard_at(self, node: int) -> list[float]:
        blocks = [block["duration_us"] for _, _, block in self.stores[node].blocks]
        return np.concatenate(blocks).tolist() if blocks else []


@pytest.fixture
def job() -> TwoNodes:
    made = TwoNodes()
    made.pass_time(2.0)
    return made


def test_a_call_over_two_nodes_took_what_the_last_rank_of_all_saw(job, records):
    job.report(records, 90.0, 80.0, 50.0, 70.0)
    job.pass_time(0.5)
    assert job.heard_at(0) == [50.0] * 10
    assert job.heard_at(1) == [], "what still contains waiting for the other node is no measurement"
    assert [len(block) for what, block in job.brain.told if what == "observe"] == [10]
    (status,) = job.first.jobs()
    assert (status.n_ranks_seen, status.health) == (4, "ok")
    assert job.second.jobs()[0].health == f"forwards to {LEADER}"


def test_calls_among_the_ranks_of_one_node_are_measured_too(job, records):
    job.report(records, comm_id=8, n_ranks=2)  # of no rank: only the sequence moves on
    for ranks, comm_id, duration_us in (((0, 1), 8, 20.0), ((2, 3), 9, 30.0)):
        for rank in ranks:
            job.send(rank, wire.Observations("job", rank, 5), records(5, comm_id=comm_id, n_ranks=2, n_nodes=1,
                                                                      duration_us=duration_us + rank))  # fmt: skip
    job.pass_time(3.0)
    assert sorted(job.heard_at(0)) == [20.0] * 5 + [32.0] * 5
    assert job.heard_at(1) == []


def test_windows_of_the_leading_daemon_open_on_all_nodes(job):
    job.told.clear()
    job.brain.plans = [Plan(1)]
    job.send(0, wire.Steps("job", 0, (StepRecord(150, 0, 1.0),)))
    observed = sorted(receiver for receiver, message in job.told if isinstance(message, wire.Observe))
    assert observed == ["rank 0", "rank 1", "rank 2", "rank 3"]
    job.told.clear()
    job.send(2, wire.Steps("job", 2, (StepRecord(500, 0, 1.0),)))
    assert not [message for _, message in job.told if isinstance(message, wire.Observe)], "it opens none of its own"


def test_a_cut_line_leaves_each_node_to_itself_until_it_is_mended(job, records):
    job.line.is_cut = True
    job.pass_time(max(RANK_TIMEOUT_S, UPLINK_TIMEOUT_S) + HELLO_TIMEOUT_S + 1)
    (status,) = job.first.jobs()
    assert (status.n_ranks_seen, status.heard_s_ago > RANK_TIMEOUT_S) == (2, True)
    assert "rank 2's node" in status.health
    assert LEADER in job.second.jobs()[0].health
    job.report(records, 90.0, 80.0, 50.0, 70.0)
    job.pass_time(3.0)
    assert (job.heard_at(0), job.heard_at(1)) == ([80.0] * 10, [50.0] * 10)
    job.line.is_cut = False
    job.pass_time(2.0)
    assert (job.first.jobs()[0].n_ranks_seen, job.first.jobs()[0].health) == (4, "ok")
    job.report(records, 95.0, 85.0, 55.0, 75.0)
    job.pass_time(0.5)
    assert job.heard_at(0)[10:] == [55.0] * 10
    assert len(job.heard_at(1)) == 10


def test_a_leading_daemon_that_was_restarted_collects_again(job, records):
    job.first = job.make_service(0, None)
    job.pass_time(2.0)
    job.first.model_ready("fabric", "knowledge")
    job.report(records, 90.0, 80.0, 50.0, 70.0)
    job.pass_time(0.5)
    assert job.heard_at(0) == [50.0] * 10


def test_nodes_leave_with_their_last_rank(job):
    for rank in (3, 2):
        job.send(rank, wire.Goodbye("job", rank))
    assert job.second.jobs() == ()
    assert job.line.closed[-1] == "job"
    assert job.first.jobs()[0].n_ranks_seen == 2, "known at once"


def test_nobody_forwards_for_rank_0_or_for_ranks_that_do_not_exist(job):
    for rank in (0, 4, -1):
        ((_, reply),) = job.first.handle(b"stranger", wire.Forwarded("job", rank, 1, 0), np.empty(0, OBSERVATION))
        assert reply.code == "BadHello"
    assert job.first.handle(b"stranger", wire.Forwarded("unknown", 2, 1, 0), np.empty(0, OBSERVATION)) == []


class Dict(dict):
    n_checks = 0

    def check(self, keys):
        self.n_checks += 1
        return all(key in self for key in keys)

    def set(self, key, value):
        self[key] = value.encode()


def test_the_leaders_address_travels_through_the_jobs_store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    store = Dict()
    zero = LeaderAddress(store, 0, is_first_of_node=True)
    other, second = (LeaderAddress(store, 8 + i, is_first_of_node=i == 0) for i in range(2))
    assert other.look_up() == ""
    zero.publish("tcp://0.0.0.0:5577")
    assert [other.look_up(), second.look_up(), zero.look_up()] == ["tcp://node-0:5577", "", ""]
    zero.publish("tcp://10.0.0.1:5578")
    for _ in range(100):
        found = other.look_up()
    assert (found, store.n_checks) == ("tcp://10.0.0.1:5578", 8), "the store is asked seldom"


@pytest.mark.parametrize(
    ("listen", "master", "expected"),
    [
        ("tcp://10.0.0.1:7", "other", "tcp://10.0.0.1:7"),
        ("tcp://[::]:7", "fe80::1", "tcp://[fe80::1]:7"),
        ("tcp://0.0.0.0:7", "", ""),
        ("", "other", ""),
    ],
)
def test_a_wildcard_host_is_the_one_that_this_node_knows(listen, master, expected):
    assert from_here(listen, master) == expected
