"""A job on several nodes: what the daemon of one node knows of the others. Pure, like the service.

The daemon that rank 0 talks to leads the job: only it has a brain. The other nodes' daemons join what
their own ranks saw and forward it, one record per call, since the shortest of the shortest durations is
what the last rank of all to arrive saw. Rank 0's agent publishes in the job's store where its daemon
listens, the agents of other nodes tell their own daemon. See docs/reference/protocol.md.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from zerotune.store.wire import Forwarded

FORWARD_EVERY_S: Final = 1.0
"""A node's daemon speaks at least so often while its ranks live."""
UPLINK_TIMEOUT_S: Final = 3.5
"""The leading daemon answers at least once per second; without, a node measures on its own."""


class UplinksLike(Protocol):
    """What the service asks of `zerotune.tuner.service.uplinks.Uplinks`; nothing here waits or fails."""

    def send(self, job_id: str, endpoint: str, message: Forwarded, records: Any) -> None:
        """To the daemon at `endpoint`, over a connection of this job's."""

    def close(self, job_id: str) -> None:
        """The job has no ranks here any more, or rank 0 is here."""


class NodeSession(msgspec.Struct):
    """At the leading daemon: the daemon of another node."""

    rank: int
    """Its lowest rank, under which the joiner knows it."""
    n_ranks: int
    heard_at_s: float


class Uplink:
    """At another node's daemon: one job's connection to the leading daemon."""

    def __init__(self, job_id: str, uplinks: UplinksLike) -> None:
        self._job_id = job_id
        self._uplinks = uplinks
        self._told_at_s = float("-inf")
        self._heard_at_s = float("-inf")
        self.endpoint = ""
        """Endpoint of the leading daemon; empty: unknown, or it is this one."""

    def point_to(self, endpoint: str) -> None:
        """The leading daemon is there; empty: it is this one."""
        if endpoint != self.endpoint:
            self._uplinks.close(self._job_id)
            self._told_at_s = self._heard_at_s = float("-inf")
            self.endpoint = endpoint

    def is_alive(self, now_s: float) -> bool:
        """Whether the leading daemon collects this job."""
        return now_s - self._heard_at_s < UPLINK_TIMEOUT_S

    def heard(self, now_s: float) -> None:
        """The leading daemon has spoken."""
        self._heard_at_s = now_s

    def greet(self, now_s: float, rank: int, n_ranks: int) -> None:
        """Tell the leading daemon that this node is there, if it is time."""
        if self.endpoint and now_s - self._told_at_s >= FORWARD_EVERY_S:
            self._told_at_s = now_s
            self.forward(rank, n_ranks, b"", 0)

    def forward(self, rank: int, n_ranks: int, records: Any, n_records: int) -> None:
        """Joined observations, in the bytes of `records`."""
        self._uplinks.send(self._job_id, self.endpoint, Forwarded(self._job_id, rank, n_ranks, n_records), records)

    def end(self, rank: int) -> None:
        """The last rank of this node has left."""
        if self.endpoint:
            self.forward(rank, 0, b"", 0)
            self._uplinks.close(self._job_id)


class NoUplinks:
    """For a daemon without keys: it may not reach any other."""

    def send(self, job_id: str, endpoint: str, message: Forwarded, records: Any) -> None:
        """Nothing."""

    def close(self, job_id: str) -> None:
        """Nothing."""
