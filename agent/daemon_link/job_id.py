"""The job's id, the same on all ranks.

Each node's launcher gave its ranks an id; rank 0's counts. Rank 0 writes it into the job's store, below the number of
the job's start, since an earlier start has left an id there, too.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

import torch.distributed as dist

logger = logging.getLogger("zerotune.agent")

KEY: Final = "job_id"


class AgreedJobId:
    """One rank's view of the job's id. Used by the channel's thread, and at exit by the main one.

    The job's store must be on a connection that nobody blocks. `own` is the id in this rank's environment.
    """

    def __init__(self, store: Any, rank: int, own: str) -> None:
        self._store = store
        self._rank = rank
        self._own = own
        self.job_id: str | None = None
        """None until rank 0's is known."""

    def learn(self, incarnation: int | None) -> Any:
        """The store below the number of this start, once that and rank 0's id are known; None until then."""
        if incarnation is None:
            return None
        store = dist.PrefixStore(str(incarnation), self._store)
        try:
            if self._rank == 0:
                self.job_id = self._restarted(max(incarnation - 1, n_restarts()))
                store.set(KEY, self.job_id)
            elif store.check([KEY]):
                self.job_id = bytes(store.get(KEY)).decode()
        except RuntimeError as error:
            logger.debug("the job's store is gone, so is the job: %s", error)
            return None
        return store if self.job_id is not None else None

    def likely(self) -> str:
        """The id; a likely one until rank 0's is known."""
        return self.job_id if self.job_id is not None else self._restarted(n_restarts())

    def _restarted(self, n_times: int) -> str:
        return self._own + (f".{n_times}" if n_times else "")


def n_restarts() -> int:
    """How often torchrun has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
