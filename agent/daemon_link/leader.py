"""How the daemons of a job's nodes find the one that leads it.

Rank 0's daemon sends it the address where it listens, and rank 0 writes that into the job's store. One rank of each
other node reads it there, now and then and without waiting, and sends it to its own daemon with its Hello.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

logger = logging.getLogger("zerotune.agent")

KEY: Final = "leader"
READ_EVERY_HELLOS: Final = 32
"""Hellos between two reads of the store, after reads at Hello 1, 2, 4, 8 and 16."""
_ANY_HOST: Final = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")


class LeaderAddress:
    """One rank's part. Used by the channel's thread alone.

    The job's store must be on a connection that nobody blocks. The first rank of a node reads the address for its node.
    """

    def __init__(self, store: Any, rank: int, *, is_first_of_node: bool) -> None:
        self._store = store
        self._is_leader = rank == 0
        self._reads = is_first_of_node and rank != 0
        self._published: str | None = None
        self._n_hellos = 0
        self._found = ""

    def publish(self, listen: str) -> None:
        """Write the address `listen` of rank 0's daemon; empty: other nodes cannot reach it."""
        if self._is_leader and listen != self._published:
            self._published = listen
            try:
                self._store.set(KEY, listen)
            except RuntimeError as error:
                logger.debug("the job's store is gone, so is the job: %s", error)

    def look_up(self) -> str:
        """The leading daemon's address as seen from this node; empty while it is unknown."""
        if not self._reads:
            return ""
        self._n_hellos += 1
        n = self._n_hellos
        if n % READ_EVERY_HELLOS == 0 or (n < READ_EVERY_HELLOS and n & (n - 1) == 0):
            try:
                if self._store.check([KEY]):
                    self._found = from_here(bytes(self._store.get(KEY)).decode(), os.environ.get("MASTER_ADDR", ""))
            except RuntimeError as error:
                logger.debug("the job's store is gone, so is the job: %s", error)
        return self._found


def from_here(listen: str, master: str) -> str:
    """`listen`; if its host is a wildcard, with `master` (this node's name for rank 0's node) as the host."""
    for prefix in _ANY_HOST:
        if listen.startswith(prefix):
            host = f"[{master}]" if ":" in master else master
            return f"tcp://{host}:{listen[len(prefix) :]}" if master else ""
    return listen
