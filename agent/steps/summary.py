"""The run summary: a JSON file with every step's time, which rank 0 writes for before-and-after reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...store.atomic_file import atomic_write
from ...store.records import StepRecord


class SummaryWriter:
    """Collects steps in memory and writes `path` once, at the end of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: list[StepRecord] = []
        self._fabric: str | None = None
        self._n_ranks = 0
        self._rank = 0

    def describe(self, fabric: str | None, n_ranks: int, rank: int = 0) -> None:
        """Describe the run; without a fabric it runs on the real NCCL.

        `rank` is that of the process group; processes of `mp.spawn` do not have it in their environment.
        """
        self._fabric = fabric
        self._n_ranks = n_ranks
        self._rank = rank

    def add(self, step: StepRecord) -> None:
        """One finished step."""
        self._steps.append(step)

    def write(self, job_id: str = "") -> None:
        """Write the file, on rank 0 only; a process that never joined a job (torchrun itself) writes no file.

        `job_id` is the daemon's name for the run; empty: no daemon knows the run. A path that cannot be written raises
        `OSError`.
        """
        if self._n_ranks == 0 or self._rank != 0:
            return
        summary: dict[str, Any] = {
            "job_id": job_id,
            "emulated": self._fabric is not None,
            "fabric": self._fabric,
            "n_ranks": self._n_ranks,
            "n_disagreements": _n_disagreements() if self._fabric is not None else None,
            "steps": [
                {"step": s.step, "epoch": s.epoch, "duration_us": s.duration_us, "exposed_us": s.exposed_us}
                for s in self._steps
            ],
        }
        with atomic_write(self._path) as partial:
            partial.write_text(json.dumps(summary))


def _n_disagreements() -> int:
    from ..nccl.emulated import journal

    return int(journal().n_disagreements)
