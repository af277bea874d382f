"""The learned correction of NCCL's cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from store.records import Candidate, Collective, CommunicatorClass
from tuner.features import Floats


class Correction(Protocol):
    """What to add to the log of NCCL's cost, and how sure that is."""

    def predict(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        size_class: int,
    ) -> tuple[Floats, Floats]:
        """Shift and standard deviation (log) for every candidate, shapes [n_candidates]."""
        ...
