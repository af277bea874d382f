"""Turns the plugin's rings into messages for the daemon, in blocks; runs on the channel's thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store import wire
from ...store.records.passages import Passages
from ...store.wire import FLAG_TIMED
from ..daemon_link.cost_table_cache import CostTableCache
from ..nccl.library import COST_RING_RECORDS, RING_RECORDS
from ..steps.step_queue import StepQueue

if TYPE_CHECKING:
    from ..nccl.library import Plugin
    from .trace_log import TraceLog

UNKNOWN_RANK = 0xFFFFFFFF

Message = tuple[wire.AgentMessage, Any]


class RecordDrain:
    """Collects one rank's reports.

    Rank 0 sends every record, since the daemon derives the stage fingerprint from its sequence of calls. Other ranks
    send timed records only. `log`, if given, gets every record and step.
    """

    def __init__(
        self,
        rings: Plugin,
        job_id: str,
        rank: int,
        queue: StepQueue,
        log: TraceLog | None = None,
        costs: CostTableCache | None = None,
    ) -> None:
        self._rings = rings
        self._job_id = job_id
        self._rank = rank
        self._log = log
        self._queue = queue
        # One array for all blocks: numpy caches freed arrays of each size below 1 KiB, and blocks have all these sizes.
        self._mask = np.empty(RING_RECORDS, np.bool_)
        self._passages = Passages()
        self._collecting = threading.Lock()
        self.costs = costs or CostTableCache()
        self.cached_share = 0.0
        """Share of device memory that torch has reserved and does not use."""

    def collect(self, patience_s: float = 0.0) -> list[Message]:
        """Everything new since the last call, oldest first; nothing if another thread collects for `patience_s`."""
        if not self._collecting.acquire(timeout=patience_s):  # at exit the channel's thread may still collect
            return []
        try:
            return self._collect()
        finally:
            self._collecting.release()

    def _collect(self) -> list[Message]:
        messages: list[Message] = []
        block = self._rings.drain(RING_RECORDS)
        n_dropped = self._rings.n_dropped() + self._queue.n_lost
        if len(block):
            mask = self._mask[: len(block)]
            np.equal(block["rank"], UNKNOWN_RANK, out=mask)
            np.copyto(block["rank"], self._rank, where=mask)
            if self._log is not None:
                self._log.record(block, n_dropped=n_dropped)
            if self._rank != 0:
                np.not_equal(np.bitwise_and(block["flags"], FLAG_TIMED, out=mask.view(np.uint8)), 0, out=mask)
                block = block[mask]
        # The plugin writes a call's cost table before its record, so reading in this order gets every call's table.
        # Tables are sent first, so that the daemon never tries a cell that NCCL does not offer.
        new_costs = self._rings.drain_costs(COST_RING_RECORDS)
        if self._rank == 0:
            self.costs.add(new_costs)
            costs = self.costs.unsent()
            if len(costs):
                messages.append((wire.CostTables(self._job_id, self._rank, len(costs)), costs.tobytes()))
        passages = self._rings.passages()
        news, self._passages = None if passages == self._passages else passages, passages
        if len(block) or news is not None:
            head = wire.Observations(self._job_id, self._rank, len(block), n_dropped, news)
            messages.append((head, block.tobytes()))
        # The daemon learns of an epoch before it reads of the steps that ran under it.
        for epoch, step in self._queue.take_adopted():
            messages.append((wire.Adopted(self._job_id, epoch, step), None))
        steps = self._queue.take_steps()
        if steps:
            if self._log is not None:
                self._log.steps(steps)
            messages.append((wire.Steps(self._job_id, self._rank, tuple(steps), self.cached_share), None))
        return messages
