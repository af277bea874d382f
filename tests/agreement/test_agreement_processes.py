"""Real processes on a real TCPStore: every rank must have run every step under the same epoch."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch.distributed as dist
from job_stubs import connect, run_rank, serve

Job = list[tuple[BaseProcess, Connection]]


@pytest.fixture
def server() -> dist.TCPStore:
    return serve()


@pytest.fixture
def port(server: dist.TCPStore) -> int:
    return server.port


def start(port: int, n_ranks: int, n_steps: int, seed: int = 0, **options: object) -> Job:
    # Not "fork": a thread of some earlier test may hold a lock of torch's in the forked copy.
    context = mp.get_context("forkserver")
    job: Job = []
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        args = (rank, n_ranks, port, n_steps, seed, theirs)
        process = context.Process(target=run_rank, args=args, kwargs=options, daemon=True)
        process.start()
        job.append((process, ours))
    for _, pipe in job:
        assert pipe.poll(60), "a rank did not start"
        pipe.recv()
    for _, pipe in job:
        pipe.send("go")
    return job


def finish(job: Job) -> list[tuple[list[int], int, str]]:
    logs = []
    for _, pipe in job:
        assert pipe.poll(60), "a rank did not finish"
        logs.append(pipe.recv())
    for process, pipe in job:
        pipe.send("close")
        process.join(20)
        assert process.exitcode == 0
    return logs


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_log_equal_epochs(port: int, n_ranks: int) -> None:
    logs = finish(start(port, n_ranks, n_steps=400, seed=n_ranks))
    epochs = logs[0][0]
    assert all(log[0] == epochs for log in logs)
    assert all(log[1:] == (0, "agreeing") for log in logs)
    assert len(set(epochs)) > 50, "plans hardly changed: this shows nothing"


def test_baseline_returns_by_agreement_when_the_daemon_dies(port: int) -> None:
    logs = finish(start(port, 3, n_steps=400, offers_until=20))
    epochs = logs[0][0]
    assert all(log[0] == epochs for log in logs)
    last = max(epochs)
    assert last >= 20
    assert epochs[-1] == 0
    # withdrawn before its last boundary at the earliest, so at least expires_after steps of it
    assert epochs.count(last) >= 10


def test_two_jobs_on_one_store_keep_apart(port: int) -> None:
    first = start(port, 2, n_steps=150, seed=1, prefix="zerotune/a/0")
    second = start(port, 2, n_steps=150, seed=2, prefix="zerotune/b/0")
    for logs in (finish(first), finish(second)):
        assert logs[0] == logs[1]
        assert logs[0][1:] == (0, "agreeing")


def test_killed_job_restarts_from_nothing(port: int) -> None:
    killed = start(port, 2, n_steps=10**9)
    # Let it come far enough to leave messages and counters behind.
    connect(port).get("1/lockstep/all")
    for process, _ in killed:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    logs = finish(start(port, 2, n_steps=150))
    assert logs[0] == logs[1]
    assert logs[0][0][0] == 0
    assert len(set(logs[0][0])) > 10
