"""Training of which no step is seen to end is told of once, in the log and to the daemon; other training is not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from zerotune.agent.settings import AgentSettings
from zerotune.agent.steps import boundary_watch
from zerotune.agent.steps.boundary_watch import BoundaryWatch
from zerotune.store import wire


class Counter:
    calls = 5000

    def n_calls(self) -> int:
        return self.calls


class Job:
    """One rank of a job of two, and the socket of its daemon."""

    def __init__(self, folder: Path) -> None:
        self.plugin = Counter()
        self.endpoint = f"ipc://{folder}/d.sock"
        self.settings = AgentSettings(self.endpoint, "job")
        self.watch = BoundaryWatch(self.settings, self.plugin)

    def told(self, socket: zmq.Socket[bytes], timeout_s: float = 5.0) -> wire.NoSteps | None:
        if not socket.poll(int(1000 * timeout_s)):
            return None
        message, _ = wire.decode_agent(socket.recv_multipart()[1:])
        assert isinstance(message, wire.NoSteps)
        return message


@pytest.fixture
def job(tmp_path_factory, monkeypatch):
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(boundary_watch, "dist", group)
    monkeypatch.setattr(boundary_watch, "LEAST_S", 0.05)
    monkeypatch.setattr(boundary_watch, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(boundary_watch, "TELL_EVERY_S", 0.05)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    made = Job(tmp_path_factory.mktemp("b"))
    yield made
    made.watch.close()


@pytest.fixture
def daemon(job):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(job.endpoint)
        yield socket


def wait_for_lines(caplog, n: int) -> list[str]:
    deadline_s = time.monotonic() + 5
    while len(caplog.records) < n:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return [record.getMessage() for record in caplog.records]


def test_many_collectives_without_a_step_are_told_of_in_one_line_and_to_the_daemon_until_one_ends(job, daemon, caplog):
    for _ in range(3):
        job.watch.begin()
    for _ in range(3):
        said = job.told(daemon)
        assert (said.job_id, said.n_ranks, said.n_calls) == ("job", 2, 5000)
    (line,) = wait_for_lines(caplog, 1)
    assert " 5,000 " in line
    assert "zerotune.step_ended()" in line
    job.watch.boundary()
    while job.told(daemon, 0.2) is not None:
        pass
    assert "zerotune.step_ended()" not in wait_for_lines(caplog, 2)[1]
    job.watch.close()
    assert len(caplog.records) == 2


def test_few_collectives_or_a_step_are_nothing_to_tell(job, caplog):
    job.plugin.calls = boundary_watch.LEAST_CALLS - 1
    job.watch.begin()
    time.sleep(0.2)
    job.watch.boundary()
    job.plugin.calls = 5000
    job.watch.close()
    assert not caplog.records


@pytest.mark.parametrize(("rank", "n_lines"), [("0", 1), ("1", 0)])
def test_training_that_ends_before_it_is_told_of_says_so_at_its_end(job, caplog, monkeypatch, rank, n_lines):
    monkeypatch.setattr(boundary_watch, "LEAST_S", 60.0)
    monkeypatch.setenv("LOCAL_RANK", rank)
    job.watch.begin()
    job.watch.close()
    assert len(caplog.records) == n_lines


def test_one_rank_alone_and_a_script_without_ranks_have_no_watch(job, caplog, monkeypatch):
    n_threads = threading.active_count()
    monkeypatch.setattr(boundary_watch.dist, "get_world_size", lambda: 1)
    job.watch.begin()
    job.watch.close()
    assert not caplog.records
    monkeypatch.setattr(boundary_watch.dist, "is_initialized", lambda: False)
    watch = BoundaryWatch(job.settings, job.plugin)
    watch.begin()
    watch.close()
    assert threading.active_count() == n_threads
