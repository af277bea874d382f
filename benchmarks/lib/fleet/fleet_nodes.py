"""A job on a thousand nodes, as its leading daemon sees it: ranks of the first node, and the other nodes' daemons.

Frames are those of real agents and daemons. The code of daemons sends theirs, over encrypted connections of their own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq

from zerotune.agent.nccl import fabric
from zerotune.store import wire
from zerotune.store.records import Collective, Phase, Plan, StepRecord, TimingSource
from zerotune.store.records.lateness import Lateness
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.service.nodes import Uplink
from zerotune.tuner.service.uplinks import Uplinks

JOB: Final = "fleet"
RANKS_PER_NODE: Final = 8
CALLS_PER_S: Final = 40
"""Collectives of a step of five seconds that gathers and scatters 66 layers."""
STEP_S: Final = 5
REPORT_S: Final = 1
"""Agents report once a second, and so do daemons to the leading one."""
N_WAITS: Final = 16
"""Different patterns of waiting, which nodes use in turn."""
SIZES_BYTES: Final = (1 << 24, 5 << 24, 1 << 28, 5 << 28)
CALLS: Final = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.all_gather, Phase.backward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)


class FirstNode:
    """The ranks that the leading daemon serves itself."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._facts = {**fabric.load("h100_ib_16").describe(), "n_nodes": n_ranks // RANKS_PER_NODE}
        self._sockets = [context.socket(zmq.DEALER) for _ in range(RANKS_PER_NODE)]
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
        self.plan, self._adopted_at = Plan(0), 0
        """The plan that all ranks follow."""
        self._offered: Plan | None = None

    def greet(self) -> None:
        """All ranks send Hello, and rank 0 receives its offer."""
        for rank, socket in enumerate(self._sockets):
            hello = wire.Hello(
                JOB, rank, self._n_ranks, rank, "node0", os.getpid(), "fleet", self._facts, 22809, 5, self.plan.epoch
            )
            socket.send_multipart(wire.encode(hello))
            while socket.poll(0):
                message = wire.decode_daemon(socket.recv_multipart())
                if isinstance(message, wire.PlanOffer):
                    self._offered = message.plan

    def report(self, calls: npt.NDArray[np.void], waits: npt.NDArray[np.float64]) -> None:
        """Report some calls of these ranks: OBSERVATION, shape (n,), and each rank's wait, shape (N_WAITS, n)."""
        for rank, socket in enumerate(self._sockets):
            seen = calls.copy()
            seen["duration_us"] += waits[rank]
            seen["rank"] = rank
            socket.send_multipart(wire.encode(wire.Observations(JOB, rank, len(seen)), seen.tobytes()))

    def finish(self, step: int) -> None:
        """Rank 0 has finished a step; all adopt the offer from the next step on."""
        record = StepRecord(step, self.plan.epoch, STEP_S * 1e6, STEP_S * 2e5, 0.5)
        self._sockets[0].send_multipart(wire.encode(wire.Steps(JOB, 0, (record,))))
        later = self._offered or self.plan.at(step - self._adopted_at)
        if later is not self.plan:
            self.plan, self._adopted_at, self._offered = later, step + 1, None
            self._sockets[0].send_multipart(wire.encode(wire.Adopted(JOB, later.epoch, step + 1)))

    def leave(self) -> None:
        for rank, socket in enumerate(self._sockets):
            socket.send_multipart(wire.encode(wire.Goodbye(JOB, rank)))
            socket.close(linger=500)


class OtherNode:
    """Another node's daemon, as far as the leading one sees it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Path, endpoint: str, number: int) -> None:
        self._rank, self._number = number * RANKS_PER_NODE, number
        self._uplinks = Uplinks(context, keys)
        self.uplink = Uplink(JOB, self._uplinks)
        self.uplink.point_to(endpoint)

    @property
    def n_unsent(self) -> int:
        """Messages that found no room."""
        return self._uplinks.n_unsent

    def greet(self) -> None:
        """To be called once a second; receives the leading daemon's messages."""
        if self._uplinks.receive():
            self.uplink.received(time.monotonic())
        self.uplink.hello(time.monotonic(), self._rank, RANKS_PER_NODE, lambda: (f"node{self._number}", Lateness()))

    def report(self, calls: npt.NDArray[np.void], waits: npt.NDArray[np.float64]) -> None:
        """Forward the reports of this node's ranks; arguments as for `FirstNode.report`."""
        seen = calls.copy()
        seen["duration_us"] += waits[self._number % N_WAITS]
        seen["rank"] = self._rank
        self.uplink.forward(self._rank, RANKS_PER_NODE, seen)

    def leave(self) -> None:
        self.uplink.end(self._rank)


class Job:
    """The calls of one job, second by second."""

    def __init__(self, n_nodes: int) -> None:
        self._random = np.random.default_rng(0)
        self._n_nodes = n_nodes
        self.n_calls = 0

    def calls(self, n: int, step: int, plan: Plan) -> tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]:
        at = np.arange(self.n_calls, self.n_calls + n)
        self.n_calls += n
        block = np.zeros(n, OBSERVATION)
        block["comm_id"], block["sequence"], block["step"], block["epoch"] = 1, at, step, plan.epoch
        block["n_ranks"], block["n_nodes"] = self._n_nodes * RANKS_PER_NODE, self._n_nodes
        block["message_bytes"] = np.array(SIZES_BYTES)[at // len(CALLS) % len(SIZES_BYTES)]
        named = np.array(CALLS, np.int64)[at % len(CALLS)]
        block["collective"], block["phase"] = named.T
        block["start_ns"] = at * (10**9 // CALLS_PER_S)
        block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 16
        block["timing_source"], block["flags"], block["memory_pressure"] = TimingSource.gpu_kernel, wire.FLAG_TIMED, 0.5
        for row in reversed(plan.rows):
            asked = (block["collective"] == row.collective) & (block["phase"] == row.phase)
            asked &= (block["message_bytes"] >= row.min_bytes) & (block["message_bytes"] <= row.max_bytes)
            if row.candidate.algorithm is not None and row.candidate.protocol is not None:
                block["algorithm"][asked] = row.candidate.algorithm
                block["protocol"][asked] = row.candidate.protocol
                block["n_channels"][asked] = row.candidate.n_channels or 16
                block["flags"][asked] |= wire.FLAG_MATCHED
        block["duration_us"] = block["message_bytes"] / 4e4 * self._random.lognormal(0.0, 0.03, n)
        return block, self._random.exponential(20.0, (N_WAITS, n))
