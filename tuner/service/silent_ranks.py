"""A job's ranks that stopped sending without a goodbye, and the text about them in `zerotune status`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SILENT_AFTER_S: Final = 2.0
"""A rank sends at least once a second; after this time without a message it is reported as silent."""


class SilentRanks:
    """Ranks that count as gone, and other nodes' daemons that do, each by its node's leading rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, float] = {}
        self._nodes: dict[int, float] = {}

    def rank_gone(self, rank: int, last_message_at_s: float) -> None:
        """The rank counts as gone; it sent its last message at `last_message_at_s`."""
        self._ranks[rank] = last_message_at_s

    def node_gone(self, rank: int, last_message_at_s: float) -> None:
        """The daemon of that rank's node counts as gone; it sent its last message at `last_message_at_s`."""
        self._nodes[rank] = last_message_at_s

    def rank_is_here(self, rank: int) -> None:
        """The rank has greeted (again)."""
        self._ranks.pop(rank, None)

    def node_is_here(self, rank: int) -> None:
        """The daemon of that rank's node forwards again, or has said goodbye."""
        self._nodes.pop(rank, None)

    @property
    def last_message_at_s(self) -> float | None:
        """The earliest time of a last message among gone ranks of this node; None: none is gone."""
        return min(self._ranks.values(), default=None)

    def oldest_s(self, now_s: float) -> float:
        """How long the first gone rank or daemon has been silent; 0: none is gone."""
        return max((now_s - at_s for at_s in (*self._ranks.values(), *self._nodes.values())), default=0.0)

    def describe(self, last_messages: Iterable[tuple[int, float]], now_s: float) -> str:
        """The silent ranks in words, or empty. `last_messages`: (rank, its last message's time) of connected ranks."""
        silent = sorted(rank for rank, at_s in last_messages if now_s - at_s > SILENT_AFTER_S)
        if self._ranks:
            gone = sorted(self._ranks)
            who = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone[:4]))}"
            more = f" and {len(gone) - 4} more" if len(gone) > 4 else ""
            return f"{who}{more} fell silent: stopped, or dead"
        if silent:
            return f"rank {silent[0]} is silent" if len(silent) == 1 else f"{len(silent)} ranks are silent"
        if self._nodes:
            return f"the daemon of rank {min(self._nodes)}'s node fell silent"
        return ""
