"""What a daemon hears of a job that was there before it: a stand-in for one listens in."""

import os
import time

import numpy as np
import pytest
import zmq

from zerotune.store import wire


class Listener:
    """Answers greetings as the daemon of process `pid`, and keeps what rank 0 says."""

    def __init__(self, endpoint, pid):
        self._welcome = wire.Welcome(pid, "0")
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    def hear(self, is_enough, timeout_s=30):
        """Messages of rank 0 after its first greeting, until one `is_enough`: [(message, records)]."""
        heard, is_greeted, deadline = [], False, time.monotonic() + timeout_s
        while not heard or not is_enough(heard[-1][0]):
            assert self._socket.poll(max(0, 1000 * (deadline - time.monotonic()))), f"only {heard} came"
            sender, *frames = self._socket.recv_multipart()
            message, records = wire.decode_agent(frames)
            if isinstance(message, wire.Hello):
                self._socket.send_multipart([sender, *wire.encode(self._welcome)])
                is_greeted |= message.rank == 0
            elif is_greeted and getattr(message, "rank", 0) == 0:
                heard.append((message, records))
        return heard

    def close(self, endpoint):
        self._socket.close()
        os.unlink(endpoint.removeprefix("ipc://"))


def asked(records):
    """The collectives and sizes that tables are about."""
    block = np.frombuffer(records, wire.COST_FIELDS)
    return {(int(row["collective"]), int(row["message_bytes"])) for row in block}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_daemon_hears_at_once_what_nccl_offers(world):
    training, losses = world.train("--steps", 100_000)
    world.wait_for(lambda: losses.exists() and losses.read_text().count("\n") > 100, "training to run", training)
    time.sleep(2)  # tables and greetings have come and gone
    listener = Listener(world.endpoint, pid=1)
    (first, records), *_ = listener.hear(lambda message: True)
    assert isinstance(first, wire.CostTables), "before anything that settings could be tried for"
    assert {collective for collective, _ in asked(records)} >= {2, 3}, "all_gather and reduce_scatter"
    listener.close(world.endpoint)

    # Another one takes its place before its silence could be noticed.
    listener = Listener(world.endpoint, pid=2)
    (_, again) = listener.hear(lambda message: isinstance(message, wire.CostTables))[-1]
    assert asked(again) == asked(records)
    listener.close(world.endpoint)
    training.terminate()
    world.finish(training)
