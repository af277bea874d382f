"""The cost tables that NCCL has shown to this rank, kept for every daemon that may come to lead the job.

NCCL shows a table once per question, and a daemon without a table assumes that NCCL offers every cell. So the newest
table of each question is kept, for a limited number of questions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...store.wire import COST_FIELDS

MAX_QUESTIONS: Final = 512
"""60 kB. When there are more, the least recently asked one is dropped."""

Question = tuple[int, ...]
"""(ranks, nodes, collective, message bytes): what a daemon files a table under."""


class CostBook:
    """Used by the channel's thread alone."""

    def __init__(self) -> None:
        self._tables: dict[Question, NDArray[np.void]] = {}
        self._unsent: dict[Question, None] = {}

    @property
    def questions(self) -> tuple[Question, ...]:
        """All that NCCL has asked for, as far as they are kept."""
        return tuple(self._tables)

    def add(self, tables: NDArray[np.void]) -> None:
        """NCCL has shown these, an array of COST_FIELDS."""
        for table in tables:
            question = tuple(int(table[name]) for name in ("n_ranks", "n_nodes", "collective", "message_bytes"))
            self._tables.pop(question, None)  # so that the newest stand last
            self._tables[question] = table.copy()
            self._unsent[question] = None
            if len(self._tables) > MAX_QUESTIONS:
                oldest = next(iter(self._tables))
                del self._tables[oldest]
                self._unsent.pop(oldest, None)

    def resend_all(self) -> None:
        """All tables are to be sent again: the daemon that listens now may know none."""
        self._unsent = dict.fromkeys(self._tables)

    def unsent(self) -> NDArray[np.void]:
        """Tables not sent yet, as an array of COST_FIELDS; from now on they count as sent."""
        block = np.array([self._tables[question] for question in self._unsent], COST_FIELDS)
        self._unsent = {}
        return block
