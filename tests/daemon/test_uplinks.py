"""The encrypted line from one node's daemon to the leading one, over real sockets."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from zerotune.agent.daemon_link.receiving import receive_frames
from zerotune.store import wire
from zerotune.store.lateness import Lateness
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.service.endpoint import BoundEndpoint, make_keys
from zerotune.tuner.service.nodes import MAX_FORWARDED, Uplink
from zerotune.tuner.service.uplinks import Uplinks


def test_what_a_frame_cannot_hold_arrives_in_several(tmp_path: Path):
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
            uplink.greet(now_s, 4, 2, lambda: ("node", Lateness()))
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


def test_what_makes_no_sense_is_told_of_a_few_times(tmp_path: Path, caplog: pytest.LogCaptureFixture):
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
