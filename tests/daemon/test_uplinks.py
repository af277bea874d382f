"""The encrypted line from one node's daemon to the leading one, over real sockets."""

from __future__ import annotations

import socket as sockets
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from zerotune.agent.daemon_link.receiving import receive_frames
from zerotune.store import wire
from zerotune.store.records.lateness import Lateness
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.service.endpoint import BoundEndpoint, make_keys
from zerotune.tuner.service.nodes import MAX_FORWARDED, Uplink
from zerotune.tuner.service.uplinks import MAX_RECEIVED, Uplinks


def test_records_too_many_for_a_frame_arrive_in_several(tmp_path: Path):
    make_keys(tmp_path / "keys")
    observed = np.zeros(2 * MAX_FORWARDED + 7, OBSERVATION)
    observed["sequence"] = np.arange(len(observed))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_RECORDS_BYTES)
        bound = BoundEndpoint(socket, "tcp://127.0.0.1:*", tmp_path / "keys")
        uplinks = Uplinks(context, tmp_path / "keys")
        uplink = Uplink("job", uplinks)
        uplink.point_to(bound.address)
        now_s = 0.0
        while not socket.poll(50):  # until the line stands
            uplink.hello(now_s, 4, 2, lambda: ("node", Lateness()))
            now_s += 1.0
            assert now_s < 200
        while socket.poll(100):
            receive_frames(socket, 1)
        uplink.forward(4, 2, observed)
        received = []
        while sum(map(len, received)) < len(observed):
            assert socket.poll(10_000), "nothing is lost"
            message, records = wire.decode_agent(receive_frames(socket, 1)[1:])
            assert (message.rank, message.n_ranks) == (4, 2)
            received.append(np.frombuffer(records, OBSERVATION))
        assert len(received) == 3
        assert np.concatenate(received).tobytes() == observed.tobytes()
        uplinks.close()
        bound.refuse_clients()
    bound.release()


def test_nonsense_is_logged_a_few_times_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_keys(tmp_path / "keys")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        bound = BoundEndpoint(socket, "tcp://127.0.0.1:*", tmp_path / "keys")
        uplinks = Uplinks(context, tmp_path / "keys")
        deadline_s = time.monotonic() + 20
        while not socket.poll(50):
            uplinks.send("a\x1b[2Jb", bound.address, wire.Forwarded("job", 1, 1, 0), b"")
            assert time.monotonic() < deadline_s
        sender = socket.recv_multipart()[0]
        for _ in range(200):
            socket.send_multipart([sender, b"junk", b"junk"])
        socket.send_multipart([sender, *wire.encode(wire.Observe("job", 3))])
        heard: list[tuple[str, wire.DaemonMessage]] = []
        while not heard:
            heard += uplinks.receive()
            assert time.monotonic() < deadline_s
        told = [record for record in caplog.records if record.name == "zerotune.daemon"]
        assert [record.args[0] for record in told if record.args] == [1, 2, 3, 4, 8, 16, 32, 64, 128]
        assert all(record.getMessage().isprintable() for record in told)
        uplinks.close()
        bound.refuse_clients()
    bound.release()


def test_a_name_that_nobody_answers_for_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also that of an honest leader, whose name server is slow."""
    make_keys(tmp_path / "keys")
    ends, look_up = threading.Event(), sockets.getaddrinfo

    def getaddrinfo(host: str, *others: Any, **named: Any) -> Any:
        if host.startswith("silent") and not named.get("flags"):
            ends.wait(60)
        return look_up("127.0.0.1" if host == "leader.example" and not named.get("flags") else host, *others, **named)

    monkeypatch.setattr(sockets, "getaddrinfo", getaddrinfo)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        bound = BoundEndpoint(socket, "tcp://127.0.0.1:*", tmp_path / "keys")
        port = bound.address.rpartition(":")[2]
        with closing(Uplinks(context, tmp_path / "keys")) as uplinks:
            deadline_s = time.monotonic() + 20
            while not socket.poll(50):
                began_s = time.monotonic()
                for at in range(3):
                    uplinks.send(f"job{at}", f"tcp://silent{at}.example:{port}", wire.Forwarded("job", 1, 1, 0), b"")
                uplinks.send("job", f"tcp://leader.example:{port}", wire.Forwarded("job", 1, 1, 0), b"")
                assert time.monotonic() - began_s < 1.0
                assert time.monotonic() < deadline_s
        ends.set()
        bound.refuse_clients()
    bound.release()


def test_a_leader_that_sends_without_end_is_not_listened_to_without_end(tmp_path: Path):
    make_keys(tmp_path / "keys")
    is_over = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        bound = BoundEndpoint(socket, "tcp://127.0.0.1:*", tmp_path / "keys")
        with closing(Uplinks(context, tmp_path / "keys")) as uplinks:
            deadline_s = time.monotonic() + 20
            while not socket.poll(50):
                uplinks.send("job", bound.address, wire.Forwarded("job", 1, 1, 0), b"")
                assert time.monotonic() < deadline_s
            sender = socket.recv_multipart()[0]

            def flood() -> None:
                while not is_over.is_set():
                    socket.send_multipart([sender, *wire.encode(wire.Observe("job", 3))])

            flooding = threading.Thread(target=flood)
            flooding.start()
            try:
                time.sleep(0.5)
                assert 0 < len(uplinks.receive()) <= MAX_RECEIVED
            finally:
                is_over.set()
                flooding.join()
        bound.refuse_clients()
    bound.release()
