"""The encrypted line from one node's daemon to the leading one, over real sockets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
