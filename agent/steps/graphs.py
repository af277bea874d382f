"""Counts calls in replayed graphs: NCCL asked the tuner when they were captured, and does not ask again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary


class GraphCalls:
    """Counts calls that ran in replayed graphs. Used by the training thread.

    `n_calls` returns for how many collectives NCCL has asked the tuner.
    """

    def __init__(self, n_calls: Callable[[], int]) -> None:
        self._n_calls = n_calls
        self._n_before = 0
        self._held: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Number of calls in each graph."""
        self.n_captured = 0
        self.n_replayed = 0

    def capture(self, graph: Any, is_capturing: bool) -> None:
        """The capture of `graph` begins or has ended."""
        if is_capturing:
            self._n_before = self._n_calls()
            return
        held = self._n_calls() - self._n_before
        self._held[graph] = self._held.get(graph, 0) + held
        self.n_captured += held

    def replay(self, graph: Any) -> None:
        """`graph` runs."""
        self.n_replayed += self._held.get(graph, 0)

    @property
    def share(self) -> float:
        """Share of the calls that ran in replayed graphs, 0 to 1."""
        n_ran = self._n_calls() - self.n_captured + self.n_replayed
        return self.n_replayed / n_ran if n_ran else 0.0
