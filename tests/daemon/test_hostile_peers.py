"""What a real daemon is sent that makes no sense or takes too much: it refuses, counts and serves on."""

from __future__ import annotations

import os
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from daemon_process import WAIT_S, hello, receive
from peers import HANDSHAKE

from benchmarks.lib.waiting import wait_until
from zerotune.agent.daemon_link.receiving import receive_frames
from zerotune.store import wire
from zerotune.store.records import StepRecord
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.daemon import Daemon
from zerotune.tuner.service.serving import run_daemon

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
    "a fact that no file's name can be": wire.encode(
        wire.Hello("job", 0, 1, 0, "node", 1, "f", {"emulated": "x\0.toml"}, 1, 5)
    ),
    "a fabric that no program can be given": wire.encode(wire.Hello("job", 0, 1, 0, "node", 1, "f\0", {}, 1, 5)),
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


def test_news_of_another_thread_that_cannot_be_taken_ends_no_daemon(bench):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        daemon = Daemon(socket, bench.service, time.monotonic, lambda *_: None, SimpleNamespace(receive=list))
        daemon.call_soon(lambda: bench.service.model_ready(*()))
        daemon.call_soon(daemon.stop)
        daemon.run()
        daemon.close()
    assert daemon.n_errors == 1


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


def test_memory_of_ended_jobs_is_given_back(daemon, connect):
    first = connect(daemon.endpoint)  # most of what any job needs is loaded now, and scipy (18 MiB) soon
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
    wait_until(lambda: fetch_status(daemon.endpoint).resident_bytes <= before_bytes + 40 * 2**20, WAIT_S)


@pytest.fixture
def serving(private_path) -> Iterator[str]:
    """The address of a daemon in this process, which ends with its job."""
    endpoint = f"ipc://{private_path}/d.sock"
    thread = threading.Thread(target=run_daemon, args=(endpoint, private_path / "s.db"), kwargs={"idle_exit_s": 1.0})
    thread.start()
    wait_until(lambda: fetch_status(endpoint, 0.5), WAIT_S)
    yield endpoint
    thread.join(timeout=WAIT_S)
    assert not thread.is_alive()


def ends_with_one_error(socket, endpoint: str) -> None:
    """The rank is welcome once more, and leaves."""
    socket.send_multipart(hello())
    while not isinstance(receive(socket), wire.Welcome):
        pass
    assert fetch_status(endpoint).n_errors == 1
    socket.send_multipart(wire.encode(wire.Goodbye("job", 0)))


def test_a_daemon_without_memory_for_a_message_drops_it_and_serves_on(serving, connect, monkeypatch):
    refused = []

    def receive_or_fail(socket, n_addresses):
        frames = receive_frames(socket, n_addresses)
        if len(frames) == 4 and not refused:
            refused.append(frames[0])
            raise MemoryError
        return frames

    monkeypatch.setattr("zerotune.tuner.service.daemon.receive_frames", receive_or_fail)
    socket = connect(serving)
    socket.send_multipart(hello())
    receive(socket)
    socket.send_multipart(wire.encode(wire.Observations("job", 0, 1), bytes(wire.OBSERVATION_BYTES)))
    ends_with_one_error(socket, serving)
    assert refused


def test_an_answer_that_cannot_be_written_ends_no_daemon(serving, connect, monkeypatch):
    encode = wire.encode
    refused = []

    def encode_or_fail(message, *payload):
        if isinstance(message, wire.Welcome) and not refused:
            refused.append(message)
            raise TypeError(message)
        return encode(message, *payload)

    monkeypatch.setattr("zerotune.tuner.service.daemon.wire.encode", encode_or_fail)
    socket = connect(serving)
    socket.send_multipart(hello())
    wait_until(lambda: refused, WAIT_S)
    ends_with_one_error(socket, serving)


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
        observations["chunk_bytes"] %= 2**20
        costs["n_algorithms"], costs["n_protocols"], costs["n_pipe_ops"] = 7, 3, 1
        socket.send_multipart(wire.encode(wire.Observations("job", 0, n), observations.tobytes()))
        socket.send_multipart(wire.encode(wire.CostTables("job", 0, n), costs.tobytes()))
    socket.send_multipart(hello())
    while not isinstance(receive(socket), wire.Welcome):
        pass
    wait_until(lambda: fetch_status(daemon.endpoint).jobs[0].n_observations >= 2000, WAIT_S)
    assert daemon.end() == 0
