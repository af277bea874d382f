"""The daemon or rank 0 stands still (SIGSTOP) at each message of the protocol; training goes on as if it had not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import pytest
import zmq
from node_world import losses_of

from zerotune.agent.daemon_link.channel import DAEMON_TIMEOUT_S
from zerotune.store import wire
from zerotune.store.errors import WireError

MOMENTS = {
    "hello": wire.Hello,
    "report": wire.Steps,
    "plan": wire.PlanOffer,
    "adopt": wire.Adopted,
    "welcome": wire.Welcome,
    "costs": wire.CostTables,
    "observations": wire.Observations,
    "window": wire.Observe,
}
"""All that rank 0 says or hears but its goodbye, and what comes through the relay when it does."""


class Relay(threading.Thread):
    """Between ranks and daemon: stops a process just before a message of a kind is handed on."""

    def __init__(self, endpoint: str, daemon: str) -> None:
        super().__init__()
        self.endpoint, self._daemon = endpoint, daemon
        self.rank0_pid = 0
        self._awaited: type | None = None
        self._victim = 0
        self.has_stopped = threading.Event()
        self._is_closing = False

    def stop_at(self, moment: str, pid: int) -> None:
        self.has_stopped.clear()
        self._victim, self._awaited = pid, MOMENTS[moment]

    def close(self) -> None:
        self._is_closing = True
        self.join()

    def run(self) -> None:
        lines: dict[bytes, zmq.Socket[bytes]] = {}
        poller = zmq.Poller()
        with zmq.Context() as context:
            ranks = context.socket(zmq.ROUTER)
            ranks.bind(self.endpoint)
            os.chmod(self.endpoint.removeprefix("ipc://"), 0o600)
            poller.register(ranks, zmq.POLLIN)
            while not self._is_closing:
                for ready, _ in poller.poll(50):
                    sender, *frames = ready.recv_multipart()
                    if ready is ranks:
                        if sender not in lines:
                            line = lines[sender] = context.socket(zmq.DEALER)
                            line.connect(self._daemon)
                            poller.register(line, zmq.POLLIN)
                        self._look_at(frames, wire.decode_agent)
                        lines[sender].send_multipart(frames, zmq.NOBLOCK)
                    else:
                        frames.insert(0, sender)
                        self._look_at(frames, wire.decode_daemon)
                        rank = next(rank for rank, line in lines.items() if line is ready)
                        ranks.send_multipart([rank, *frames], zmq.NOBLOCK)
            for socket in (ranks, *lines.values()):
                socket.close(linger=0)

    def _look_at(self, frames: Sequence[bytes], decode) -> None:
        try:
            message = decode(frames)
        except WireError:
            return
        message = message[0] if isinstance(message, tuple) else message
        is_of_rank0 = getattr(message, "rank", 0) == 0
        if isinstance(message, wire.Hello) and is_of_rank0:
            self.rank0_pid = message.pid
        if self._awaited is not None and isinstance(message, self._awaited) and is_of_rank0:
            self._awaited = None
            os.kill(self._victim, signal.SIGSTOP)
            self.has_stopped.set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_daemon_and_rank_0_may_stand_still_at_any_message(world):
    daemon = world.start_daemon()
    relay = Relay(f"ipc://{world.runtime}/relay.sock", world.endpoint)
    relay.start()
    world.endpoint = relay.endpoint
    try:
        training, losses = world.train("--steps", 100_000)
        world.wait_for(lambda: relay.rank0_pid, "rank 0's greeting", training)
        for victim, held_s in ((daemon.pid, DAEMON_TIMEOUT_S + 0.5), (relay.rank0_pid, 1.5)):
            for moment in MOMENTS:
                relay.stop_at(moment, victim)
                world.wait_for(relay.has_stopped.is_set, f"the moment of {moment}", training)
                before = len(losses_of(losses))
                time.sleep(held_s)
                went_on = len(losses_of(losses)) > before + 5
                os.kill(victim, signal.SIGCONT)
                assert went_on == (victim == daemon.pid), moment
                world.wait_for(lambda n=before + 10: len(losses_of(losses)) > n, "training to go on", training)
        world.wait_for(lambda: any(job.epoch > 0 for job in world.jobs()), "a plan at the end", training)
        n_steps = len(losses_of(losses))
        training.terminate()
        assert "RankDisagreement" not in world.finish(training)[1]
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        relay.close()

    untuned, reference = world.train("--steps", n_steps, agent=False, losses="reference.jsonl")
    assert world.finish(untuned, timeout_s=200)[0] == 0
    assert losses_of(losses)[:n_steps] == losses_of(reference)
