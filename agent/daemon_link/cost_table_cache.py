"""The cost tables that NCCL has passed to this rank's tuner, kept for a daemon that starts later.

NCCL's cost model gives a cost to each cell (algorithm and protocol) of a question. A daemon without a question's table
assumes that NCCL offers every cell. So the newest table of each question is kept, for a limited number of questions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...store.wire import COST_FIELDS

MAX_QUESTIONS: Final = 512
"""60 kB. If there are more, the least recently asked question is dropped."""

Question = tuple[int, ...]
"""(ranks, nodes, collective, message bytes) of a collective for which NCCL asked the tuner."""


class CostTableCache:
    """Used by the channel's thread alone."""

    def __init__(self) -> None:
        self._tables: dict[Question, NDArray[np.void]] = {}
        self._unsent: dict[Question, None] = {}

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions whose tables are kept."""
        return tuple(self._tables)

    def add(self, tables: NDArray[np.void]) -> None:
        """Keep new tables, an array of COST_FIELDS."""
        for table in tables:
            question = tuple(int(table[name]) for name in ("n_ranks", "n_nodes", "collective", "message_bytes"))
            self._tables.pop(question, None)  # so that the newest is last
            self._tables[question] = table.copy()
            self._unsent[question] = None
            if len(self._tables) > MAX_QUESTIONS:
                oldest = next(iter(self._tables))
                del self._tables[oldest]
                self._unsent.pop(oldest, None)

    def resend_all(self) -> None:
        """Mark all tables as unsent: a new daemon knows none."""
        self._unsent = dict.fromkeys(self._tables)

    def unsent(self) -> NDArray[np.void]:
        """Tables not sent yet, as an array of COST_FIELDS; they count as sent from now on."""
        block = np.array([self._tables[question] for question in self._unsent], COST_FIELDS)
        self._unsent = {}
        return block
