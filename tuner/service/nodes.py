"""A job on several nodes, as one node's daemon knows the others. Pure, like the service.

The daemon of rank 0 leads the job: only it has a brain. The other nodes' daemons join their own ranks' records and
forward one record per call, with the shortest duration of their ranks. The shortest over all nodes is then the call's.
Rank 0's agent publishes its daemon's address in the job's c10d store, and the other nodes' agents pass it to their own
daemons. See docs/reference/protocol.md.
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
"""While it has ranks of the job, a node's daemon sends a message to the leading one at least this often."""
UPLINK_TIMEOUT_S: Final = 3.5
"""The leading daemon answers about once per second. After this time without an answer a node measures on its own."""
MAX_FORWARDED: Final = MAX_RECORDS_BYTES // OBSERVATION_BYTES // 2
"""Most records in one message: half a frame, since encryption adds bytes and other senders must not wait long."""


class UplinksLike(Protocol):
    """The methods of `zerotune.tuner.service.uplinks.Uplinks` that the service needs; no call waits or fails."""

    def send(self, job_id: str, endpoint: str, message: Forwarded, records: Any) -> None:
        """Send to a leading daemon at `tcp://`, over a connection that only this job uses.

        `records` are bytes of OBSERVATION, `message.n_records` of them.
        """

    def close(self, job_id: str) -> None:
        """Close the job's connection: it has no rank here any more, or rank 0 is here."""


class RankSession(msgspec.Struct):
    """A connected rank."""

    last_message_at_s: float
    n_dropped: int = 0


class NodeSession(msgspec.Struct):
    """Another node's daemon, as the leading daemon knows it."""

    rank: int
    """Lowest rank on that node; the joiner knows the reporter by it."""
    n_ranks: int
    last_message_at_s: float


class Uplink:
    """A job's leading daemon on another node, and the connection to it."""

    def __init__(self, job_id: str, uplinks: UplinksLike) -> None:
        self._job_id = job_id
        self._uplinks = uplinks
        self._sent_at_s = float("-inf")
        self._last_message_at_s = float("-inf")
        self.endpoint = ""
        """Endpoint of the leading daemon; empty: it is unknown, or this daemon leads."""

    def point_to(self, endpoint: str) -> None:
        """Set the leading daemon's address; empty: this daemon leads."""
        if endpoint != self.endpoint:
            self._uplinks.close(self._job_id)
            self._sent_at_s = self._last_message_at_s = float("-inf")
            self.endpoint = endpoint

    def is_alive(self, now_s: float) -> bool:
        """Whether the leading daemon has answered lately, so that it measures this job."""
        return now_s - self._last_message_at_s < UPLINK_TIMEOUT_S

    def received(self, now_s: float) -> None:
        """A message of the leading daemon has come."""
        self._last_message_at_s = now_s

    def hello(self, now_s: float, rank: int, n_ranks: int, news: Callable[[], tuple[str, Lateness]]) -> None:
        """Greet the leading daemon with this node's name and late ranks, at most once per FORWARD_EVERY_S."""
        if self.endpoint and now_s - self._sent_at_s >= FORWARD_EVERY_S:
            self._sent_at_s = now_s
            node, lateness = news()
            message = Forwarded(self._job_id, rank, n_ranks, 0, node, lateness if lateness.n_steps else None)
            self._uplinks.send(self._job_id, self.endpoint, message, b"")

    def forward(self, rank: int, n_ranks: int, observed: NDArray[np.void]) -> None:
        """Send joined observations (OBSERVATION, shape (n,)) to the leading daemon, in as many messages as needed."""
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
    """For a daemon without keys, which reaches no other: it sends nothing."""

    def send(self, job_id: str, endpoint: str, message: Forwarded, records: Any) -> None:
        """Send nothing."""

    def close(self, job_id: str) -> None:
        """Do nothing, as there is no connection."""
