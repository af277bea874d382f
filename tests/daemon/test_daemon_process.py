"""The real process over real sockets: service, refusals, hostile clients, signals."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket as sockets
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
import zmq
import zmq.auth

from benchmarks.lib.free_port import free_port
from benchmarks.service.many_peers import HANDSHAKE, Peers
from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.agent.daemon_link.receiving import receive_frames
from zerotune.store import wire
from zerotune.store.errors import StoreLockedError, UserError
from zerotune.store.lockfile import named_holder
from zerotune.store.records import Stage, StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.cli.live.launch import launch as launch_command
from zerotune.tuner.cli.live.status import status as status_command
from zerotune.tuner.client.holders import holder_of
from zerotune.tuner.client.status import fetch_status, render_status
from zerotune.tuner.service.daemon import run_daemon
from zerotune.tuner.service.endpoint import make_keys
from zerotune.tuner.service.service import RANK_TIMEOUT_S

WAIT_S = 60
"""Longer than anything takes on a busy machine."""
SERVE = """
import sys
from zerotune.tuner.service import flood_guard, service
from zerotune.tuner.service.daemon import run_daemon
flood_guard.MAX_RESIDENT_BYTES = 400 * 2**20
service.RANK_TIMEOUT_S = float(sys.argv[4])
code = run_daemon(sys.argv[1], sys.argv[2], idle_exit_s=float(sys.argv[3]) if sys.argv[3] else None)
assert not {"sklearn", "torch"} & set(sys.modules)  # fits have a process of their own
sys.exit(code)
"""


class Daemon:
    def __init__(
        self, folder, *, idle_exit_s="", store="store.db", name="d.sock", rank_timeout_s=RANK_TIMEOUT_S
    ) -> None:
        self.endpoint = f"ipc://{folder}/{name}"
        self.path = folder / store
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, self.endpoint, str(self.path), str(idle_exit_s), str(rank_timeout_s)],
            stderr=subprocess.PIPE,
        )
        deadline_s = time.monotonic() + WAIT_S
        while fetch_status(self.endpoint, 0.5) is None:
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def end(self, number=signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, self.words = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("loaded", ["typer", "zerotune.store.sqlite.database", "zerotune.tuner.service.daemon"])
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
    process.send_signal(number)
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


@pytest.fixture
def daemon(private_path) -> Iterator[Daemon]:
    daemon = Daemon(private_path)
    yield daemon
    daemon.end(signal.SIGKILL)


@pytest.fixture
def connect() -> Iterator:
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def make(endpoint: str) -> zmq.Socket:
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.linger = 0
            socket.connect(endpoint)
            return socket

        yield make


def hello(rank=0, n_ranks=1, job="job") -> list:
    return wire.encode(wire.Hello(job, rank, n_ranks, rank, "node", 1, "fabric", {"emulated": "x"}, 22809, 5))


def receive(socket: zmq.Socket):
    assert socket.poll(1000 * WAIT_S), "no answer"
    return wire.decode_daemon(socket.recv_multipart())


def test_a_rank_is_served_and_its_measurements_survive_sigterm(daemon, connect, records):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    assert receive(socket) == wire.Welcome(daemon.process.pid, fetch_status(daemon.endpoint).version)
    block = records(500, n_ranks=1)
    socket.send_multipart(wire.encode(wire.Observations("job", 0, 500), block.tobytes()))
    socket.send_multipart(wire.encode(wire.Steps("job", 0, (StepRecord(1, 0, 5000.0),))))
    assert isinstance(receive(socket), wire.Observe)
    deadline_s = time.monotonic() + WAIT_S
    while fetch_status(daemon.endpoint).jobs[0].n_observations < 500:  # a status request may overtake them
        assert time.monotonic() < deadline_s
    assert daemon.end(signal.SIGTERM) == 0, daemon.words
    with Store.open(daemon.path, read_only=True) as store:
        assert len(store.measurements("fabric", "job")) == 500
        assert store.steps("job") == [StepRecord(1, 0, 5000.0)]
    assert not list(daemon.path.parent.glob("*.sock*")), "no socket or lock is left behind"


def test_a_record_out_of_range_costs_itself_alone_and_is_counted(daemon, connect, records):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    block = records(50, n_ranks=1)
    block["message_bytes"][7] = 2**62 + 1
    socket.send_multipart(wire.encode(wire.Observations("job", 0, 50), block.tobytes()))
    deadline_s = time.monotonic() + WAIT_S
    while fetch_status(daemon.endpoint).n_refused < 1:
        assert time.monotonic() < deadline_s
    assert daemon.end(signal.SIGTERM) == 0, daemon.words
    with Store.open(daemon.path, read_only=True) as store:
        assert len(store.measurements("fabric", "job")) == 49


def test_what_has_arrived_when_sigint_comes_is_written(daemon, connect, records):
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


HOSTILE = {
    "empty": [b""],
    "one frame": [b"hello"],
    "no header": [b"GET / HTTP/1.1", b"Host: localhost"],
    "wrong version": [struct.pack("<2sH", b"ZT", 999), wire.encode(wire.StatusRequest())[1]],
    "truncated": [wire.HEADER, hello()[1][:-3]],
    "garbage": [wire.HEADER, os.urandom(1000)],
    "deep": [wire.HEADER, b"\x91" * 100_000],
    "many frames": [wire.HEADER] * 500,
    "oversized body": [wire.HEADER, bytes(wire.MAX_BODY_BYTES + 1)],
    "records missing": wire.encode(wire.Observations("job", 0, 10)),
    "records short": wire.encode(wire.Observations("job", 0, 10), b"x" * 639),
    "records for ever": wire.encode(wire.Observations("job", 0, 2**62), b"x" * 64),
    "a number that does not fit": wire.encode(wire.Hello("job", 0, 2**62, 0, "node", 1, "f", {}, 1, 5)),
    "an epoch that does not fit": wire.encode(wire.Hello("job", 0, 1, 0, "node", 1, "f", {}, 1, 5, 2**62)),
    "a step that does not fit": wire.encode(wire.Steps("job", 0, (StepRecord(2**62, 0, 1.0),))),
    "a daemon's message": wire.encode(wire.Welcome(1, "x")),
}


def test_hostile_frames_get_a_typed_error_and_others_are_served_on(daemon, connect):
    good, bad = connect(daemon.endpoint), connect(daemon.endpoint)
    for n_before, (name, frames) in enumerate(HOSTILE.items()):
        bad.send_multipart(frames)
        reply = receive(bad)
        assert isinstance(reply, wire.ErrorReply), name
        assert (reply.code, bool(reply.text)) == ("WireError", True)
        good.send_multipart(hello())
        assert isinstance(receive(good), wire.Welcome | wire.Observe), name
        status = fetch_status(daemon.endpoint)
        assert (status.n_errors, status.n_refused) == (0, n_before + 1)
    assert b"Traceback" not in (daemon.end(), daemon.words)[1]


def test_a_frame_over_the_transport_limit_costs_its_sender_the_connection(daemon, connect):
    bad, good = connect(daemon.endpoint), connect(daemon.endpoint)
    bad.send_multipart([wire.HEADER, hello()[1], bytes(2 * wire.MAX_RECORDS_BYTES)])
    good.send_multipart(hello())
    assert isinstance(receive(good), wire.Welcome)
    assert bad.poll(200) == 0
    assert fetch_status(daemon.endpoint).resident_bytes < 200 * 2**20


def test_a_message_that_never_ends_costs_connections_and_not_the_memory_of_the_machine(daemon, connect):
    good = connect(daemon.endpoint)
    good.send_multipart(hello())
    receive(good)
    frame = b"\x03" + struct.pack(">Q", wire.MAX_RECORDS_BYTES) + bytes(wire.MAX_RECORDS_BYTES)  # more will follow
    with sockets.socket(sockets.AF_UNIX) as raw:
        raw.connect(daemon.endpoint.removeprefix("ipc://"))
        raw.sendall(HANDSHAKE)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deque((raw.sendall(frame) for _ in range(500)), maxlen=0)
    # All connections are ended, one after the other: a greeting may be lost on one that is next. Ranks greet again.
    while good.poll(0):
        good.recv_multipart()
    deadline_s = time.monotonic() + WAIT_S
    is_served = False
    while not is_served and time.monotonic() < deadline_s:
        good.send_multipart(hello())
        is_served = bool(good.poll(1000)) and isinstance(receive(good), wire.Welcome)
    assert is_served
    assert fetch_status(daemon.endpoint, WAIT_S).resident_bytes < 200 * 2**20
    assert daemon.end() == 0


def test_what_jobs_took_is_given_back_when_they_end(daemon, connect):
    first = connect(daemon.endpoint)  # what any job needs is loaded now
    first.send_multipart(hello())
    first.send_multipart(wire.encode(wire.Steps("job", 0, (StepRecord(1, 0, 5000.0),))))
    while not isinstance(receive(first), wire.Observe):
        pass
    before_bytes = fetch_status(daemon.endpoint).resident_bytes
    n_jobs = 200
    ranks = [connect(daemon.endpoint) for _ in range(n_jobs)]
    for at, socket in enumerate(ranks):
        socket.send_multipart(hello(job=f"job{at}"))
    for socket in ranks:
        assert isinstance(receive(socket), wire.Welcome)
    status = fetch_status(daemon.endpoint)
    assert len(status.jobs) == n_jobs + 1
    assert (status.resident_bytes - before_bytes) / n_jobs < 0.4 * 2**20
    for at, socket in enumerate(ranks):
        socket.send_multipart(wire.encode(wire.Goodbye(f"job{at}", 0)))
    deadline_s = time.monotonic() + WAIT_S
    while fetch_status(daemon.endpoint).resident_bytes > before_bytes + 20 * 2**20:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_daemon_without_memory_for_a_message_drops_it_and_serves_on(private_path, connect, monkeypatch):
    refused = []

    def receive_or_fail(socket, n_addresses):
        frames = receive_frames(socket, n_addresses)
        if len(frames) == 4 and not refused:
            refused.append(frames[0])
            raise MemoryError
        return frames

    monkeypatch.setattr("zerotune.tuner.service.daemon.receive_frames", receive_or_fail)
    endpoint = f"ipc://{private_path}/d.sock"
    thread = threading.Thread(target=run_daemon, args=(endpoint, private_path / "s.db"), kwargs={"idle_exit_s": 1.0})
    thread.start()
    while fetch_status(endpoint, 0.5) is None:
        time.sleep(0.02)
    socket = connect(endpoint)
    socket.send_multipart(hello())
    receive(socket)
    socket.send_multipart(wire.encode(wire.Observations("job", 0, 1), bytes(wire.OBSERVATION_BYTES)))
    socket.send_multipart(hello())
    while not isinstance(receive(socket), wire.Welcome):
        pass
    assert refused
    assert fetch_status(endpoint).n_errors == 1
    socket.send_multipart(wire.encode(wire.Goodbye("job", 0)))
    thread.join(timeout=WAIT_S)
    assert not thread.is_alive()


def test_an_answer_that_cannot_be_written_ends_no_daemon(private_path, connect, monkeypatch):
    encode = wire.encode
    refused = []

    def encode_or_fail(message, *payload):
        if isinstance(message, wire.Welcome) and not refused:
            refused.append(message)
            raise TypeError(message)
        return encode(message, *payload)

    monkeypatch.setattr("zerotune.tuner.service.daemon.wire.encode", encode_or_fail)
    endpoint = f"ipc://{private_path}/d.sock"
    thread = threading.Thread(target=run_daemon, args=(endpoint, private_path / "s.db"), kwargs={"idle_exit_s": 1.0})
    thread.start()
    while fetch_status(endpoint, 0.5) is None:
        time.sleep(0.02)
    socket = connect(endpoint)
    socket.send_multipart(hello())
    while not refused:
        time.sleep(0.02)
    socket.send_multipart(hello())
    while not isinstance(receive(socket), wire.Welcome):
        pass
    assert fetch_status(endpoint).n_errors == 1
    socket.send_multipart(encode(wire.Goodbye("job", 0)))
    thread.join(timeout=WAIT_S)
    assert not thread.is_alive()


def test_bytes_that_are_not_zeromq_are_ignored(daemon, connect):
    with sockets.socket(sockets.AF_UNIX) as raw:
        raw.connect(daemon.endpoint.removeprefix("ipc://"))
        raw.sendall(os.urandom(4096))
        socket = connect(daemon.endpoint)
        socket.send_multipart(hello())
        assert isinstance(receive(socket), wire.Welcome)


def test_random_records_of_a_greeted_rank_are_survived(daemon, connect):
    socket = connect(daemon.endpoint)
    socket.send_multipart(hello())
    receive(socket)
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = 100
        observations = np.frombuffer(rng.bytes(n * wire.OBSERVATION_BYTES), wire.OBSERVATION_FIELDS).copy()
        costs = np.frombuffer(rng.bytes(n * wire.COST_BYTES), wire.COST_FIELDS).copy()
        for block in (observations, costs):  # within their ranges: others are refused
            block["n_ranks"] %= 2**16
            block["n_nodes"] %= 2**16
            block["message_bytes"] %= 2**62
        observations["duration_us"] = observations["memory_pressure"] = rng.uniform(-1, 2, n)
        costs["n_algorithms"], costs["n_protocols"], costs["n_pipe_ops"] = 7, 3, 1
        socket.send_multipart(wire.encode(wire.Observations("job", 0, n), observations.tobytes()))
        socket.send_multipart(wire.encode(wire.CostTables("job", 0, n), costs.tobytes()))
    socket.send_multipart(hello())
    while not isinstance(receive(socket), wire.Welcome):
        pass
    deadline_s = time.monotonic() + WAIT_S
    while fetch_status(daemon.endpoint).jobs[0].n_observations < 2000:
        assert time.monotonic() < deadline_s
    assert daemon.end() == 0


def test_its_first_line_names_all_addresses_and_its_lock_the_command_that_people_type(private_path):
    make_keys(private_path / "keys")
    endpoint, metrics = f"ipc://{private_path}/d.sock", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--endpoint", endpoint, "--metrics", metrics]
    command += ["--listen", "tcp://127.0.0.1:*", "--curve-keys", str(private_path / "keys")]
    command += ["--store", str(private_path / "store.db")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            assert endpoint in line
            assert f"http://{metrics}/metrics" in line
            listening = re.search(r"tcp://127\.0\.0\.1:\d+", line)[0]
            assert fetch_status(listening, curve_dir=private_path / "keys").daemon_pid == process.pid
            assert named_holder(private_path / "store.db.lock")[1].startswith("zerotune daemon --endpoint")
        finally:
            process.terminate()


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
    time.sleep(0.5)  # what the job took is given back once
    process = psutil.Process(daemon.process.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - before <= 0.02


def test_more_ranks_than_the_soft_limit_of_open_files_are_served(private_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        daemon = Daemon(private_path)  # inherits it
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    peers = Peers(f"{private_path}/d.sock", 400, 4)
    deadline_s = time.monotonic() + WAIT_S
    while sum(job.n_ranks_seen for job in fetch_status(daemon.endpoint, WAIT_S).jobs) < 400:
        assert time.monotonic() < deadline_s
    peers.leave()
    assert daemon.end() == 0


def test_status_says_where_and_who(daemon, capsys):
    from rich.console import Console

    status = fetch_status(daemon.endpoint)
    assert (status.daemon_pid, status.endpoint, status.store_path) == (
        daemon.process.pid, daemon.endpoint, str(daemon.path),
    )  # fmt: skip
    fabric = "emulated-a_fabric_with_a_long_name-45020b92a6bb"
    job = wire.JobStatus("job", fabric, Stage.zero3, 4, 4, 1, 9, 0, 0, 0, 0.0, 0.0, 0.0)
    render_status(msgspec.structs.replace(status, n_refused=3, jobs=(job,)), Console(width=250))
    shown = capsys.readouterr().out
    assert fabric in shown
    assert re.search(r"\b0 .*\b3 .*", shown), "failures and refused messages"


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
    with pytest.raises(UserError, match=rf"pid {pid}\).*`kill -CONT {pid}`"):
        launch_command(["true"], endpoint=daemon.endpoint, start_daemon=True)
    monkeypatch.setattr(os, "execvpe", lambda *_: None)
    launch_command(["true"], endpoint=daemon.endpoint)
    told = capsys.readouterr().err
    assert f"`kill -CONT {pid}`" in told
    assert "--start-daemon" not in told
    daemon.process.send_signal(signal.SIGCONT)
    daemon.end(signal.SIGKILL)
    with pytest.raises(UserError, match=r"d\.sock") as missing:
        status_command(daemon.endpoint)
    assert "kill" not in str(missing.value)
    (private_path / "d.sock.lock").write_text('{"pid": 1, "command": "another process has this number by now"}')
    os.utime(private_path / "d.sock.lock", (0, 0))
    assert holder_of(daemon.endpoint) is None


def test_no_status_without_a_daemon(private_path):
    start_s = time.monotonic()
    assert fetch_status(f"ipc://{private_path}/nobody.sock", 5.0) is None
    assert time.monotonic() - start_s < 1, "known at once"
    (private_path / "stale.sock").touch()
    assert fetch_status(f"ipc://{private_path}/stale.sock", 0.1) is None


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [
        ("tcp://127.0.0.1:5555", "--curve-keys"),
        ("udp://127.0.0.1:5555", "ipc:// .*tcp://"),
        ("tcp://127.0.0.1:99999", "'99999'.* 65535.*tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:x", "'x'.*tcp://HOST:PORT"),
        ("nonsense", "'nonsense'.*ipc:// .*tcp://"),
        ("ipc://", "ipc:// .*tcp://"),
        ("ipc:///proc/zerotune/d.sock", "/proc/zerotune"),
        ("ipc:///tmp/" + "x" * 120, " 107 "),
        ("ipc:///t/" + "x" * 95, " 85 "),
        ("ipc://@zerotune", "@zerotune"),
    ],
)
def test_unsafe_and_impossible_endpoints_are_refused(private_path, endpoint, named):
    with pytest.raises(UserError, match=named):
        run_daemon(endpoint, private_path / "store.db")
    assert not (private_path / "store.db").exists()


def test_folders_that_others_can_enter_or_change_are_refused(private_path, monkeypatch):
    shared = private_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UserError, match=str(shared)):
        run_daemon(f"ipc://{shared}/d.sock", private_path / "store.db")
    shared.chmod(0o755)
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(shared))
    with pytest.raises(UserError, match="chmod 700"):
        run_daemon(f"ipc://{shared}/d.sock", private_path / "store.db")


def test_only_the_owner_may_connect(daemon, private_path):
    assert (private_path / "d.sock").stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_taken_away_lets_nobody_in_any_more(private_path, connect):
    make_keys(private_path / "keys")
    clients = private_path / "keys" / "clients"
    zmq.auth.create_certificates(private_path, "other")
    shutil.copy(private_path / "other.key", clients)
    endpoint, known = f"tcp://127.0.0.1:{free_port()}", private_path / "keys"
    revoked = private_path / "revoked"
    shutil.copytree(known, revoked)
    for suffix in ("key", "key_secret"):
        shutil.copy(private_path / f"other.{suffix}", revoked / f"client.{suffix}")
    (revoked / "client.key_secret").chmod(0o600)
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--endpoint", endpoint]
    command += ["--curve-keys", str(known), "--store", str(private_path / "s.db")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process, zmq.Context() as context:
        try:
            stays, leaves = (context.socket(zmq.DEALER) for _ in range(2))
            for socket, keys in ((stays, known), (leaves, revoked)):
                socket.linger = 0
                use_client_keys(socket, keys)
                socket.connect(endpoint)
                socket.send_multipart(wire.encode(wire.StatusRequest()))
                assert isinstance(receive(socket), wire.StatusReply)
            (clients / "other.key").unlink()
            assert fetch_status(endpoint, 0.3, curve_dir=revoked) is None, "no new connection, at once"
            deadline_s = time.monotonic() + WAIT_S
            while True:  # the connection that there was
                leaves.send_multipart(wire.encode(wire.StatusRequest()))
                if not leaves.poll(500):
                    break
                leaves.recv_multipart()
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            stays.send_multipart(wire.encode(wire.StatusRequest()))
            assert isinstance(receive(stays), wire.StatusReply)
            shutil.copy(private_path / "other.key", clients)
            assert fetch_status(endpoint, curve_dir=revoked) is not None, "a key put back lets in again"
            for socket in (stays, leaves):
                socket.close()
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture
def curve_dir(private_path):
    folder = private_path / "keys"
    make_keys(folder)
    with pytest.raises(UserError, match="already"):
        make_keys(folder)
    return folder


def test_tcp_serves_known_keys_only(curve_dir, private_path, connect):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    code = f"""
import sys; from pathlib import Path; from zerotune.tuner.service.daemon import run_daemon
sys.exit(run_daemon({endpoint!r}, {str(private_path / "s.db")!r}, curve_dir=Path({str(curve_dir)!r})))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline_s = time.monotonic() + WAIT_S
        while (status := fetch_status(endpoint, 0.5, curve_dir=curve_dir)) is None:
            assert time.monotonic() < deadline_s
        assert status.daemon_pid == process.pid
        with pytest.raises(UserError, match="wants keys"):
            fetch_status(endpoint, 0.3)
        keyless = connect(endpoint)
        keyless.send_multipart(hello())
        assert not keyless.poll(300)
        zmq.auth.create_certificates(curve_dir, "client")  # keys that the daemon does not know
        assert fetch_status(endpoint, 0.3, curve_dir=curve_dir) is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_clients_secret_that_others_can_read_is_refused(curve_dir, mode):
    (curve_dir / "client.key_secret").chmod(mode)
    with pytest.raises(UserError, match=r"client\.key_secret.*chmod 600"):
        fetch_status("tcp://127.0.0.1:5555", 0.1, curve_dir=curve_dir)


@pytest.mark.parametrize("folder", [".", "clients"])
def test_folders_that_others_may_put_keys_into_are_refused(curve_dir, private_path, folder):
    (curve_dir / folder).chmod(0o777)
    with pytest.raises(UserError, match="chmod go-w"):
        run_daemon("tcp://127.0.0.1:5555", private_path / "store.db", curve_dir=curve_dir)


@pytest.mark.parametrize("folders", [[], ["keys", "keys/clients"]])
def test_whatever_the_umask_keys_are_closed_to_others(private_path, folders):
    umask = os.umask(0)
    try:
        for folder in folders:
            (private_path / folder).mkdir()
        make_keys(private_path / "keys")
    finally:
        os.umask(umask)
    made = [private_path / "keys", *private_path.rglob("keys/**/*")]
    assert len(made) == 7
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("spoiled", ["server.key_secret", "clients", "readable"])
def test_incomplete_or_exposed_keys_are_refused(curve_dir, private_path, spoiled):
    if spoiled == "readable":
        (curve_dir / "server.key_secret").chmod(0o644)
    elif spoiled == "clients":
        shutil.rmtree(curve_dir / "clients")
    else:
        (curve_dir / spoiled).write_text("nonsense")
    with pytest.raises(UserError, match=r"key|client"):
        run_daemon("tcp://127.0.0.1:5555", private_path / "store.db", curve_dir=curve_dir)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        use_client_keys(socket, curve_dir)
        (curve_dir / "server.key").unlink()
        with pytest.raises(UserError, match=r"server\.key"):
            use_client_keys(socket, curve_dir)


def test_what_a_daemon_measures_is_shared_below_a_url(tmp_path, records):
    pytest.importorskip("pyarrow")
    endpoint, url = f"ipc://{tmp_path}/d.sock", tmp_path / "fleet"
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--fleet", str(url)]
    environment = os.environ | {"ZEROTUNE_ENDPOINT": endpoint, "ZEROTUNE_STORE": str(tmp_path / "store.db")}
    with subprocess.Popen(command, env=environment) as process:
        try:
            deadline_s = time.monotonic() + WAIT_S
            while (reply := fetch_status(endpoint, 0.5)) is None:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
            assert reply.fleet.url == str(url)
            with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
                rank.connect(endpoint)
                rank.send_multipart(
                    wire.encode(wire.Hello("job", 0, 1, 0, "node", 1, "fabric", {"nccl_version": 22809}, 22809, 5))
                )
                block = records(16, n_ranks=1)
                rank.send_multipart(wire.encode(wire.Observations("job", 0, len(block)), block.tobytes()))
                while (reply := fetch_status(endpoint, 0.5)) is None or reply.fleet.n_waiting < len(block):
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
        finally:
            process.terminate()
            assert process.wait(WAIT_S) == 0
    (found,) = url.rglob("*.parquet")
    assert found.stat().st_size > 0
