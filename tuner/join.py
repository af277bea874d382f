"""Joins the ranks' records of a collective into one measurement.

A collective's duration on one rank includes waiting for the slowest rank. So the measurement is the shortest duration
among the ranks, that of the last rank to arrive. All of it is numpy over whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..store.records import LEAST_US, Collective, TimingSource
from ..store.sqlite.rows.measurements import MEASUREMENT, well_formed
from ..store.wire import FLAG_CAPTURED, FLAG_MATCHED, FLAG_OFF_CYCLE, FLAG_PASSED_BY, FLAG_TIMED, OBSERVATION_FIELDS

OBSERVATION: Final = np.dtype(OBSERVATION_FIELDS)
UNKNOWN_EPOCH: Final = 2**32 - 1
"""Epoch of calls whose plan is unknown: a replayed CUDA graph runs the settings of the time when it was captured."""
NO_ALGORITHM: Final = 255

JOIN_TIMEOUT_S: Final = 2.0
"""How long the first rank's record waits for the others'."""
MAX_PENDING: Final = 400_000
MOST_KEPT: Final = 2 * MAX_PENDING
"""If so many records wait, new ones are given up: they come faster than they are joined."""
MAX_COMMUNICATORS: Final = 4096
MAX_REPORTERS: Final = 65536

_MAX_COLLECTIVE: Final = max(Collective)
_RAW: Final = np.dtype(f"V{OBSERVATION.itemsize}")
_SAME_FIELDS: Final = ("n_ranks", "n_nodes", "message_bytes", "epoch", "step", "collective", "phase", "algorithm",
                       "protocol", "n_channels", "timing_source", "chunk_bytes")  # fmt: skip


Witness = Callable[[NDArray[np.void], NDArray[np.uint64], NDArray[np.intp]], None]
"""Takes records (OBSERVATION, shape (n,)) call by call, their reporters (n,), and the beginning of each call (m,)."""


class Joiner:
    """Joins one job's observations.

    A call is complete when all its reporters have sent a record: the ranks of its communicator that are on this node,
    and one daemon for each other node. The number of a communicator's reporters is learned from its first timeout after
    the set of reporters has settled. Calls with fewer records are discarded: their shortest duration would include
    waiting for the last rank.
    """

    def __init__(self, witness: Witness | None = None) -> None:
        """`witness` gets the records of the calls that are joined, before only the shortest is kept."""
        self.witness = witness
        self.n_partial = 0
        """Records given up because not all ranks reported that collective."""
        self.n_late = 0
        """Records that came twice, or after their collective had been joined."""
        self._chunks: list[tuple[int, NDArray[np.void]]] = []
        self._n_new = 0
        self._communicators: dict[int, int] = {}
        self._forget()

    def _forget(self) -> None:
        self._forget_waiting()
        self._communicators.clear()
        self._joined_up_to = np.empty(0, np.int64)
        self._n_members = np.empty(0, np.int64)

    def _forget_waiting(self) -> None:
        # Waiting records, sorted by code: the calls of all ranks side by side.
        self._records = np.empty(0, OBSERVATION)
        self._codes = np.empty(0, np.uint64)
        self._arrived_s = np.empty(0, np.float64)

    def members_changed(self) -> None:
        """Ranks came or went: the number of reporters of each communicator has to be learned anew."""
        self._n_members[:] = 0

    def member_is_gone(self) -> None:
        """A rank left and does not come back: calls that still wait for its record are dropped."""
        self.n_partial += len(self._codes)
        self._forget_waiting()
        self.members_changed()

    @property
    def n_pending(self) -> int:
        """Records that wait for those of other ranks, or for the next join."""
        return len(self._codes) + self._n_new

    def add(self, rank: int, records: NDArray[np.void]) -> None:
        """Take in records (OBSERVATION, shape (n,)) that `rank` sent; only timed ones count."""
        if self.n_pending > MOST_KEPT:
            self.n_partial += len(records)
            return
        self._chunks.append((rank, records))
        self._n_new += len(records)

    def join(
        self, now_s: float, n_reporters: int, *, is_settled: bool = True, give_up: bool = False
    ) -> tuple[NDArray[np.void], int]:
        """Join the complete calls: one observation per call, by start, and the number of joined records.

        Args:
            now_s: seconds on a clock that never goes back, the same for all calls.
            n_reporters: ranks, and daemons of other nodes, that report to this one or may yet come.
            is_settled: whether the reporters are known; until then a timeout teaches nothing about a communicator.
        """
        self._take_in(now_s)
        if not len(self._codes):
            return np.empty(0, OBSERVATION), 0
        calls = self._codes >> np.uint64(16)
        starts = np.flatnonzero(np.concatenate([[True], calls[1:] != calls[:-1]]))
        counts = np.diff(np.append(starts, len(calls)))
        places = (calls[starts] >> np.uint64(32)).astype(np.int64)
        members = self._n_members[places >> 4]
        expected = np.where(members > 0, members, np.minimum(self._records["n_ranks"][starts], n_reporters))
        complete = counts >= expected
        overdue = (self._arrived_s[starts] < now_s - JOIN_TIMEOUT_S) & (is_settled | (members > 0))
        expired = ~complete & (overdue | give_up | (len(self._codes) > MAX_PENDING))
        ended = complete | expired
        if not ended.any():
            return np.empty(0, OBSERVATION), 0
        teaches = ended if is_settled else complete
        np.maximum.at(self._n_members, places[teaches] >> 4, counts[teaches])
        joined = complete | (expired & teaches & (counts >= self._n_members[places >> 4]))
        self.n_partial += int(counts[expired & ~joined].sum())
        observed = self._shortest(places, starts, joined)
        if self.witness is not None and joined.any():
            whole = np.repeat(joined, counts)
            first = np.cumsum(counts[joined]) - counts[joined]
            self.witness(_select(self._records, whole), self._codes[whole] & np.uint64(MAX_REPORTERS - 1), first)
        waiting = np.repeat(~ended, counts)
        self._records, self._codes = _select(self._records, waiting), self._codes[waiting]
        self._arrived_s = self._arrived_s[waiting]
        return observed, int(counts[joined].sum())

    def _take_in(self, now_s: float) -> None:
        """Merge the records that have arrived into those that wait, sorted by code."""
        if not self._chunks:
            return
        records = _concatenate([records for _, records in self._chunks])
        reporters = np.repeat(
            np.array([rank for rank, _ in self._chunks], np.uint64) % np.uint64(MAX_REPORTERS),
            [len(records) for _, records in self._chunks],
        )
        self._chunks.clear()
        self._n_new = 0
        timed = (
            (records["flags"] & FLAG_TIMED != 0)
            & (records["duration_us"] >= 0)
            & (records["timing_source"] != TimingSource.cpu_collective)  # how long the host took to enqueue it
            & (records["collective"] <= _MAX_COLLECTIVE)
            & (records["n_ranks"] > 0)
            # symmetric kernels: nothing of the tuner's table ran
            & ((records["flags"] & FLAG_PASSED_BY == 0) | (records["algorithm"] != NO_ALGORITHM))
        )
        if not timed.all():
            records, reporters = _select(records, timed), reporters[timed]
        codes = self._encode(records, reporters)
        late = records["sequence"] <= self._joined_up_to[(codes >> np.uint64(48)).astype(np.int64)]
        if late.any():
            self.n_late += int(late.sum())
            self._n_members[(codes[late] >> np.uint64(52)).astype(np.int64)] = 0  # more ranks report than expected
            records, codes = _select(records, ~late), codes[~late]
        codes = np.concatenate([self._codes, codes])
        arrived_s = np.full(len(codes), now_s)
        arrived_s[: len(self._arrived_s)] = self._arrived_s
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        once = np.concatenate([[True], codes[1:] != codes[:-1]])[: len(codes)]
        if not once.all():
            self.n_late += int(len(once) - once.sum())
            order, codes = order[once], codes[once]
        self._records = _select(_concatenate([self._records, records]), order)
        self._codes, self._arrived_s = codes, arrived_s[order]

    def _encode(self, records: NDArray[np.void], reporters: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One integer per record that sorts by collective call, then rank.

        12 bits communicator, 4 collective, 32 sequence, 16 rank.
        """
        unique, inverse = np.unique(records["comm_id"], return_inverse=True)
        if len(self._communicators) + len(unique) > MAX_COMMUNICATORS:
            self.n_partial += len(self._codes)
            self._forget()
        indices = [self._communicators.setdefault(comm_id, len(self._communicators)) for comm_id in unique.tolist()]
        self._make_room(len(self._communicators))
        communicator = np.array(indices, np.uint64)[inverse] % np.uint64(MAX_COMMUNICATORS)
        place = communicator << np.uint64(4) | records["collective"].astype(np.uint64)
        codes: NDArray[np.uint64] = (
            place << np.uint64(48) | records["sequence"].astype(np.uint64) << np.uint64(16) | reporters
        )
        return codes

    def _make_room(self, n_communicators: int) -> None:
        """Tables grow as needed: most jobs have few communicators, and a daemon may have many jobs."""
        n_more = min(n_communicators, MAX_COMMUNICATORS) - len(self._n_members)
        if n_more > 0:
            n_more = min(max(n_more, len(self._n_members), 8), MAX_COMMUNICATORS - len(self._n_members))
            self._n_members = np.append(self._n_members, np.zeros(n_more, np.int64))
            self._joined_up_to = np.append(self._joined_up_to, np.full(16 * n_more, -1, np.int64))

    def _shortest(
        self, places: NDArray[np.int64], starts: NDArray[np.intp], joined: NDArray[np.bool_]
    ) -> NDArray[np.void]:
        """One record per call marked in `joined`, with its shortest duration, in the order the calls started."""
        shortest_us = np.minimum.reduceat(self._records["duration_us"], starts)[joined]
        pressure = np.fmax.reduceat(self._records["memory_pressure"], starts)[joined]
        first = _select(self._records, starts[joined])
        np.maximum.at(self._joined_up_to, places[joined], first["sequence"].astype(np.int64))
        first["duration_us"], first["memory_pressure"] = shortest_us, pressure
        return _select(first, np.argsort(first["start_ns"], kind="stable"))


def measurements_of(observed: NDArray[np.void]) -> NDArray[np.void]:
    """Joined observations (OBSERVATION, shape (n,)) as MEASUREMENT, shape (m,), m <= n.

    Observations of duration 0, and those that the store would refuse, are left out.
    """
    made = np.zeros(len(observed), MEASUREMENT)
    for name in _SAME_FIELDS:
        made[name] = observed[name]
    made["duration_us"] = observed["duration_us"]
    pressure = observed["memory_pressure"]
    made["memory_pressure"] = np.where(pressure >= 0, pressure, np.nan)
    # Symmetric kernels have no algorithm of the cost table: NCCL did not ask, so the plan had no effect.
    unasked = (observed["flags"] & FLAG_CAPTURED != 0) | (observed["algorithm"] == NO_ALGORITHM)
    made["is_default"] = (observed["flags"] & FLAG_MATCHED == 0) & ~unasked
    # The plan had no effect either if the communicator's history did not show the call's phase.
    made["epoch"][unasked | (observed["flags"] & FLAG_OFF_CYCLE != 0)] = UNKNOWN_EPOCH
    good = well_formed(made) & (made["duration_us"] >= LEAST_US)
    return made if good.all() else made[good]


# OBSERVATION blocks are moved as plain bytes: numpy is slow to copy and to promote named fields.


def _concatenate(blocks: list[NDArray[np.void]]) -> NDArray[np.void]:
    return np.concatenate([block.view(_RAW) for block in blocks]).view(OBSERVATION)


def _select(block: NDArray[np.void], which: NDArray[np.bool_] | NDArray[np.intp]) -> NDArray[np.void]:
    return block.view(_RAW)[which].view(OBSERVATION)
