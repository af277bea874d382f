"""The real process over real sockets: service, signals, memory, full disks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from daemon_process import WAIT_S, Daemon, hello, receive
from peers import Peers

from benchmarks.lib.waiting import wait_until
from zerotune.store import wire
from zerotune.store.errors import StoreLockedError, UserError
from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.cli.live.launch import launch as launch_command
from zerotune.tuner.cli.live.status import status as status_command
from zerotune.tuner.client.holders import holder_of
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.offline.jobs.listing import JobEnd, end_of
from zerotune.tuner.service.serving import run_daemon

MEANT_FOR_THE_TRAINING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""What batch systems send to every process of a job, and training handles."""


@pytest.mark.parametrize(
    ("loaded", "number"), [("typer", signal.SIGTERM), ("zerotune.tuner.service.daemon", signal.SIGINT)]
)
def test_a_daemon_that_is_told_to_end_while_it_begins_ends_in_good_order(private_path, number, loaded):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "zerotune.tuner.cli", "daemon",
         "--store", str(private_path / "store.db"), "--endpoint", f"ipc://{private_path}/d.sock"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:  # each module is told of when it has been loaded
        if line.startswith("import time:") and line.rpartition("|")[2].strip() == loaded:
            break
    for one in (*MEANT_FOR_THE_TRAINING, number):
        process.send_signal(one)
    words = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.wait(timeout=WAIT_S) == 0
    assert not words
    process.stderr.close()
    Store.open(private_path / "store.db").close()


def test_a_daemon_that_begins_on_a_full_disk_ends_in_one_line_and_leaves_the_store_alone(private_path, records):
    path = private_path / "store.db"
    with Store.open(path) as store:
        store.record_job("job", "fabric", {}, 4)
    before = path.read_bytes()
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--store", str(path)]
    done = subprocess.run(
        [*command, "--endpoint", f"ipc://{private_path}/d.sock"],
        capture_output=True, text=True, timeout=WAIT_S,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # else it leaves compiled modules cut short
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY)),
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert path.read_bytes() == before
    daemon = Daemon(private_path)
    assert daemon.end() == 0


def test_a_rank_is_served_and_its_measurements_survive_sigterm(daemon, connect, records):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    assert receive(socket) == wire.Welcome(daemon.process.pid, fetch_status(daemon.endpoint).version)
    block = records(500, n_ranks=1)
    socket.send_multipart(wire.encode(wire.Observations("job", 0, 500), block.tobytes()))
    socket.send_multipart(wire.encode(wire.Steps("job", 0, (StepRecord(1, 0, 5000.0),))))
    assert isinstance(receive(socket), wire.Observe)
    # A status request may overtake them.
    wait_until(lambda: fetch_status(daemon.endpoint).jobs[0].n_observations >= 500, WAIT_S)
    assert daemon.end(signal.SIGTERM) == 0, daemon.words
    with Store.open(daemon.path, read_only=True) as store:
        assert len(store.measurements("fabric", "job")) == 500
        assert store.steps("job") == [StepRecord(1, 0, 5000.0)]
    assert not list(daemon.path.parent.glob("*.sock*")), "no socket or lock is left behind"


def test_signals_for_the_training_leave_the_daemon_alone(private_path, connect):
    store, endpoint = private_path / "store.db", f"ipc://{private_path}/d.sock"
    words = ["-m", "zerotune.tuner.cli", "daemon", "--store", str(store), "--endpoint", endpoint]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: fetch_status(endpoint, 0.5))
            rank = connect(endpoint)
            rank.send_multipart(hello())
            receive(rank)
            for number in MEANT_FOR_THE_TRAINING:
                process.send_signal(number)
            rank.send_multipart(wire.encode(wire.Goodbye("job", 0)))
            wait_until(lambda: (reply := fetch_status(endpoint, 0.5)) and not reply.jobs)
        finally:
            process.terminate()
    assert process.returncode == 0
    with Store.open(store, read_only=True) as read:
        (job,) = read.jobs()
    assert end_of(job, is_written=False) is JobEnd.ended


def test_a_record_out_of_range_costs_itself_alone_and_is_counted(daemon, connect, records):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    block = records(50, n_ranks=1)
    block["message_bytes"][7] = 2**62 + 1
    socket.send_multipart(wire.encode(wire.Observations("job", 0, 50), block.tobytes()))
    wait_until(lambda: fetch_status(daemon.endpoint).n_refused >= 1, WAIT_S)
    assert daemon.end(signal.SIGTERM) == 0, daemon.words
    with Store.open(daemon.path, read_only=True) as store:
        assert len(store.measurements("fabric", "job")) == 49


def test_messages_that_arrived_before_sigint_are_written(daemon, connect, records):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    daemon.process.send_signal(signal.SIGSTOP)
    for first in range(0, 1000, 100):
        block = records(100, n_ranks=1, sequence=np.arange(first, first + 100))
        socket.send_multipart(wire.encode(wire.Observations("job", 0, 100), block.tobytes()))
    time.sleep(0.2)
    daemon.process.send_signal(signal.SIGINT)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.end(signal.SIGINT) == 0
    with Store.open(daemon.path, read_only=True) as store:
        assert len(store.measurements()) == 1000


def test_a_job_that_ends_while_the_daemon_stands_still_ends_once_and_not_by_silence(private_path, connect):
    daemon = Daemon(private_path, rank_timeout_s=1.5)
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    time.sleep(0.1)  # for the daemon to be waiting when it is stopped
    daemon.process.send_signal(signal.SIGSTOP)
    for _ in range(3):
        socket.send_multipart(hello())
    socket.send_multipart(wire.encode(wire.Steps("job", 0, (StepRecord(7, 0, 1.0),))))
    socket.send_multipart(wire.encode(wire.Goodbye("job", 0)))
    time.sleep(2.0)
    daemon.process.send_signal(signal.SIGCONT)
    deadline_s = time.monotonic() + WAIT_S
    while (reply := fetch_status(daemon.endpoint)) is None or reply.jobs:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert daemon.end() == 0
    assert [(one.job_id, one.step, one.fell_silent) for one in reply.ended] == [("job", 7, False)]


def test_a_second_daemon_is_refused_by_name_and_pid(daemon, private_path):
    with pytest.raises(UserError, match=rf"pid {daemon.process.pid}\).*--endpoint"):
        run_daemon(daemon.endpoint, private_path / "another.db")
    with pytest.raises(StoreLockedError, match=rf"pid {daemon.process.pid}\).*ZEROTUNE_STORE"):
        run_daemon(f"ipc://{private_path}/another.sock", daemon.path)
    assert not (private_path / "another.sock").exists()
    assert fetch_status(daemon.endpoint).n_errors == 0


def test_a_killed_daemons_socket_and_store_are_taken_over(daemon, private_path, connect):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    daemon.end(signal.SIGKILL)
    assert (private_path / "d.sock").exists()
    successor = Daemon(private_path)
    try:
        deadline_s, greeted_by = time.monotonic() + WAIT_S, 0  # the same connection finds the successor
        while greeted_by != successor.process.pid:
            assert time.monotonic() < deadline_s
            socket.send_multipart(hello())
            greeted_by = getattr(receive(socket), "daemon_pid", 0)
    finally:
        assert successor.end() == 0


def test_idle_exit_waits_for_the_last_rank(private_path, connect):
    daemon = Daemon(private_path, idle_exit_s=0.5)
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    time.sleep(0.8)
    assert daemon.process.poll() is None
    socket.send_multipart(wire.encode(wire.Goodbye("job", 0)))
    assert daemon.process.wait(timeout=WAIT_S) == 0
    daemon.end()


def test_64_ranks_fit_in_memory_and_an_idle_daemon_uses_no_cpu(daemon, connect):
    ranks = [connect(daemon.endpoint) for _ in range(64)]
    for rank, socket in enumerate(ranks):
        socket.send_multipart(hello(rank, 64))
    for socket in ranks:
        assert isinstance(receive(socket), wire.Welcome)
    status = fetch_status(daemon.endpoint)
    assert status.jobs[0].n_ranks_seen == 64
    assert status.resident_bytes < 300 * 2**20
    for rank, socket in enumerate(ranks):
        socket.send_multipart(wire.encode(wire.Goodbye("job", rank)))
    while fetch_status(daemon.endpoint).jobs:
        pass
    process = psutil.Process(daemon.process.pid)

    def used_s() -> float:
        before = sum(process.cpu_times()[:2])  # told in steps of 0.01 s
        time.sleep(1.0)
        return sum(process.cpu_times()[:2]) - before

    # What the job took is given back once, and what its decisions need is loaded once.
    assert any(used_s() < 0.05 for _ in range(10))


def test_more_ranks_than_the_soft_limit_of_open_files_are_served(private_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        daemon = Daemon(private_path)  # inherits it
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    before_bytes = fetch_status(daemon.endpoint).resident_bytes
    queue = int(Path("/proc/sys/net/core/somaxconn").read_text())
    if queue > 400:  # as when all ranks of a node begin at once, before the daemon gets to them
        daemon.process.send_signal(signal.SIGSTOP)
    peers = Peers(f"{private_path}/d.sock", 400, 4)
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(
        lambda: sum(job.n_ranks_seen for job in fetch_status(daemon.endpoint, WAIT_S).jobs) == 400, WAIT_S
    )
    asked_s = time.monotonic()
    status = fetch_status(daemon.endpoint, WAIT_S)
    assert time.monotonic() - asked_s < 1.0
    assert (status.resident_bytes - before_bytes) / 400 < 100 * 2**10, "10,000 must fit into a GiB"
    peers.leave()
    assert daemon.end() == 0


def test_a_full_disk_is_told_and_nothing_of_the_job_is_lost(daemon, connect):
    unlimited = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    socket.send_multipart(wire.encode(wire.Steps("job", 0, tuple(StepRecord(n, 0, 5000.0) for n in range(1, 100)))))

    def wait_for(health: str) -> wire.StatusReply:
        deadline_s = time.monotonic() + WAIT_S
        while (status := fetch_status(daemon.endpoint)).health != health:
            assert time.monotonic() < deadline_s
        return status

    status = wait_for("degraded")
    assert (status.store.is_out, status.store.error, status.n_errors) == (True, "disk I/O error", 0)
    assert status.store.n_waiting > 0
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)
    assert wait_for("ok").store.n_lost == 0
    assert daemon.end() == 0
    with Store.open(daemon.path, read_only=True) as store:
        (job,) = store.jobs()
        assert (job.n_ranks, len(store.steps("job"))) == (1, 99)
        assert job.started_at_s > 0
        assert store.fabrics() == {"fabric": {"emulated": "x"}}


def test_a_daemon_that_cannot_answer_is_not_said_to_be_missing(daemon, private_path, monkeypatch, capsys):
    monkeypatch.setattr("zerotune.tuner.cli.live.status.PATIENCE_S", 0.1)
    daemon.process.send_signal(signal.SIGSTOP)
    pid = daemon.process.pid
    with pytest.raises(UserError, match=rf"pid {pid}\).*`kill -CONT {pid}`"):
        status_command(daemon.endpoint)
    monkeypatch.setattr(os, "execvpe", lambda *_: None)
    for starts in (False, True):
        launch_command(["true"], endpoint=daemon.endpoint, daemon=starts)
        told = capsys.readouterr().err
        assert f"`kill -CONT {pid}`" in told
        assert "--daemon" not in told
    daemon.process.send_signal(signal.SIGCONT)
    daemon.end(signal.SIGKILL)
    with pytest.raises(UserError, match=r"d\.sock") as missing:
        status_command(daemon.endpoint)
    assert "kill" not in str(missing.value)
    (private_path / "d.sock.lock").write_text('{"pid": 1, "command": "another process has this number by now"}')
    os.utime(private_path / "d.sock.lock", (0, 0))
    assert holder_of(daemon.endpoint) is None
