"""Finds a job's misaligned collectives in its ranks' reports, and logs each once."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from ...store.misaligned import ALIGNMENT_BYTES, MAX_MISALIGNED, SHARED_OUT, Misaligned, misaligned
from ...store.wire import FLAG_PASSED_BY

_log = logging.getLogger("zerotune.service")


class MisalignedSizes:
    """The misaligned collectives of one job so far."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._found: set[Misaligned] = set()

    @property
    def found(self) -> tuple[Misaligned, ...]:
        """The misaligned collectives, the largest first."""
        return tuple(sorted(self._found, reverse=True))

    def observe(self, records: NDArray[np.void]) -> None:
        """Look at records (OBSERVATION, shape [n]) of one rank; the job's other ranks have the same sizes."""
        n_ranks = records["n_ranks"].astype(np.uint64)
        odd = (records["message_bytes"] % (np.maximum(n_ranks, 1) * np.uint64(ALIGNMENT_BYTES))) != 0
        odd &= np.isin(records["collective"], SHARED_OUT) & ((records["flags"] & FLAG_PASSED_BY) == 0)
        if not odd.any() or len(self._found) >= MAX_MISALIGNED:
            return
        names = ("collective", "n_ranks", "message_bytes", "protocol")
        kinds = np.unique(np.stack([records[odd][name].astype(np.int64) for name in names], axis=1), axis=0)
        new = set(misaligned((kind[0], kind[1], kind[2], kind[3]) for kind in kinds.tolist())) - self._found
        if new and not self._found:
            worst = max(new)
            _log.warning(
                "job %s: %s of %d bytes on %d ranks is slow: a share of %d bytes is no multiple of %d; pad it to %d",
                self._job_id, worst.collective.name, worst.message_bytes, worst.n_ranks, worst.share_bytes,
                ALIGNMENT_BYTES, worst.fast_share_bytes,
            )  # fmt: skip
        self._found |= new
