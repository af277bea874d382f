"""Real processes on a real TCPStore, each with the real plugin: every call ran under one plan on all ranks."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch.distributed as dist
from nccl_side import NO_PLAN, Side, channels, plan

from zerotune.agent.agreement import Agreement
from zerotune.agent.agreement.news import Notified, Offered
from zerotune.agent.nccl import library

Job = list[tuple[BaseProcess, Connection]]
LOOPBACK = "127.0.0.1"


def serve() -> dist.TCPStore:
    """A store on 127.0.0.1 alone: a dual-stack one would ask the name server who each peer is."""
    listener = socket.create_server((LOOPBACK, 0), backlog=64)
    port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(LOOPBACK, port, None, True, timedelta(seconds=20), wait_for_workers=False, master_listen_fd=fd)


def run_rank(rank: int, n_ranks: int, port: int, pipe: Connection) -> None:
    """One rank: calls two communicators at a pace of its own, as it is told: "calls", "offer", "close"."""
    client = dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=20), wait_for_workers=False)
    plugin = library.load()
    agreement = Agreement(dist.PrefixStore("zerotune", client), rank, n_ranks, plugin, lambda _: None)
    world = Side(plugin, 1, n_ranks)
    part = Side(plugin, 2 + rank // 2, 2)
    ran: list[tuple[int, int]] = []
    while agreement.state == "starting":
        time.sleep(0.001)
    pipe.send((agreement.state, agreement.incarnation))
    while (order := pipe.recv())[0] != "close":
        if order[0] == "calls":
            agreement.post(Notified(1 << 20))  # a bell of a daemon that does not know
            for _ in range(order[1]):
                ran.append((world.call(), part.call()))
                time.sleep(0.0005 * (rank + 1))
        elif order[0] == "offer":
            agreement.post(Offered(plan(order[1], 2, n_ranks)))
        pipe.send((ran, agreement.counters()))
    agreement.close()


@pytest.fixture
def server() -> dist.TCPStore:
    return serve()


def start(port: int, n_ranks: int) -> Job:
    context = mp.get_context("forkserver")  # a thread of some earlier test may hold a lock of torch's in a fork
    job: Job = []
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, n_ranks, port, theirs), daemon=True)
        process.start()
        job.append((process, ours))
    assert {receive(pipe)[0] for _, pipe in job} == {"agreeing"}
    return job


def receive(pipe: Connection):
    assert pipe.poll(90), "a rank did not answer"
    return pipe.recv()


def ask(job: Job, *order):
    for _, pipe in job:
        pipe.send(order)
    return [receive(pipe) for _, pipe in job]


def finish(job: Job) -> None:
    for _, pipe in job:
        pipe.send(("close",))
    for process, _ in job:
        process.join(20)
        assert process.exitcode == 0


def check(answers, epoch: int) -> None:
    logs = [tuple(ran) for ran, _ in answers]
    assert len({tuple(world for world, _ in log) for log in logs}) == 1
    assert logs[0] == logs[1]
    assert logs[2] == logs[3]
    assert logs[0][0] == (NO_PLAN, NO_PLAN)
    assert logs[0][-1] == (channels(epoch), channels(epoch))
    assert all(counters.state == "agreeing" for _, counters in answers)


def adopt(job: Job, epoch: int, n_ranks: int):
    ask(job[:1], "offer", epoch)
    for _ in range(20):
        answers = ask(job, "calls", 100)
        if answers[0][0][-1] == (channels(epoch), channels(epoch)) and all(c.n_adopted for _, c in answers[:n_ranks]):
            return answers
    raise AssertionError("no plan came into force")


def test_four_ranks_adopt_at_one_call_while_their_paces_differ_and_a_restart_begins_anew(server) -> None:
    job = start(server.port, 4)
    ask(job, "calls", 20)
    check(adopt(job, 1, 4), 1)
    for process, _ in job:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    again = start(server.port, 4)
    ask(again, "calls", 20)
    check(adopt(again, 2, 4), 2)
    finish(again)


def test_a_rank_that_dies_costs_only_its_own_communicators(server) -> None:
    job = start(server.port, 4)
    ask(job, "calls", 20)
    process, _ = job.pop()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    ask(job[:1], "offer", 1)
    for _ in range(20):
        answers = ask(job, "calls", 100)
        if answers[0][0][-1][1] == channels(1):
            break
    assert [ran[-1] for ran, _ in answers[:2]] == [(NO_PLAN, channels(1))] * 2
    assert answers[0][0] == answers[1][0]
    assert set(answers[2][0]) == {(NO_PLAN, NO_PLAN)}
    assert max(counters.longest_wait_us for _, counters in answers) < 8e6
    finish(job)
