"""A job on several nodes: what the daemon of one node knows of the others. Pure, like the service.

The daemon that rank 0 talks to leads the job: only it has a brain. The other nodes' daemons join what
their own ranks saw and forward one record per call, with the shortest duration of their ranks: the shortest
over all nodes is then the call's. Rank 0's agent publishes in the job's c10d store where its daemon
listens, the agents of other nodes tell their own daemon. See docs/reference/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...store.records.lateness import Lateness
from ...store.wire import MAX_RECORDS_BYTES, OBSERVATION_BYTES, Forwarded

FORWARD_EVERY_S: Final = 1.0
"""While its ranks live, a node's daemon sends a message to the leading one at least this often."""
UPLINK_TIMEOUT_S: Final = 3.5
"""The leading daemon answers about once per second; after this time without an answer a node measures on its own."""
MAX_FORWARDED: Final = MAX_RECORDS_BYTES // OBSERVATION_BYTES // 2
"""Records in one message. Half of what a frame may hold: encryption adds to it, and other senders get their turn."""


class UplinksLike(Protocol):
    """What the service asks of `zerotune.tuner.service.uplinks.Uplinks`; nothing here waits or fails."""

    def send(self, job_id: str, endpoint: str, message: Forwarded, records: Any) -> None:
        """Send to a leading daemon, over a connection that only this job uses.

        Args:
            endpoint: address of the leading daemon, `tcp://`.
            records: bytes of OBSERVATION, `message.n_records` of them.
        """

    def close(self, job_id: str) -> None:
        """Close the job's connection: no rank of it is here any more, or rank 0 is."""


class NodeSession(msgspec.Struct):
    """What the leading daemon knows of another node's daemon."""

    rank: int
    """Lowest rank on that node: the reporter's number for the joiner."""
    n_ranks: int
    heard_at_s: float


class Uplink:
    """What a daemon that does not lead a job knows of the leading one, and its connection to it."""

    def __init__(self, job_id: str, uplinks: UplinksLike) -> None:
        self._job_id = job_id
        self._uplinks = uplinks
        self._told_at_s = float("-inf")
        self._heard_at_s = float("-inf")
        self.endpoint = ""
        """Endpoint of the leading daemon; empty: unknown, or it is this one."""

    def point_to(self, endpoint: str) -> None:
        """Set the leading daemon's address; empty: it is this daemon."""
        if endpoint != self.endpoint:
            self._uplinks.close(self._job_id)
            self._told_at_s = self._heard_at_s = float("-inf")
            self.endpoint = endpoint

    def is_alive(self, now_s: float) -> bool:
        """Whether the leading daemon has answered of late, so that it measures this job."""
        return now_s - self._heard_at_s < UPLINK_TIMEOUT_S

    def heard(self, now_s: float) -> None:
        """A message of the leading daemon has come."""
        self._heard_at_s = now_s

    def greet(self, now_s: float, rank: int, n_ranks: int, news: Callable[[], tuple[str, Lateness]]) -> None:
        """Tell the leading daemon that this node is there, once per FORWARD_EVERY_S.

        Args:
            news: asked then for this node's name, and for who is late on it.
        """
        if self.endpoint and now_s - self._told_at_s >= FORWARD_EVERY_S:
            self._told_at_s = now_s
            node, lateness = news()
            message = Forwarded(self._job_id, rank, n_ranks, 0, node, lateness if lateness.n_steps else None)
            self._uplinks.send(self._job_id, self.endpoint, message, b"")

    def forward(self, rank: int, n_ranks: int, observed: NDArray[np.void]) -> None:
        """Send joined observations to the leading daemon, in as many messages as they take.

        Args:
            observed: OBSERVATION, shape (n,).
        """
        for first in range(0, len(observed), MAX_FORWARDED):
            part = observed[first : first + MAX_FORWARDED]
            self._send(rank, n_ranks, part.tobytes(), len(part))

    def _send(self, rank: int, n_ranks: int, records: bytes = b"", n_records: int = 0) -> None:
        self._uplinks.send(self._job_id, self.endpoint, Forwarded(self._job_id, rank, n_ranks, n_records), records)

    def end(self, rank: int) -> None:
        """The last rank of this node, `rank`, has left."""
        if self.endpoint:
            self._send(rank, 0)
            self._uplinks.close(self._job_id)


class NoUplinks(UplinksLike):
    """For a daemon without keys: it reaches no other, and nothing is sent."""

    def send(self, job_id: str, endpoint: str, message: Forwarded, records: Any) -> None:
        """Send nothing."""

    def close(self, job_id: str) -> None:
        """Do nothing: there is no connection."""
