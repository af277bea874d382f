"""From what each rank saw of a collective to the one measurement it is.

A collective's duration on one rank includes waiting for the slowest rank, so the measurement is the
shortest duration among the ranks: what the last arrival saw. All of it is numpy over whole blocks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from store.measurements import MEASUREMENT, well_formed
from store.records import Collective
from store.wire import OBSERVATION_FIELDS

OBSERVATION: Final = np.dtype(OBSERVATION_FIELDS)
FLAG_MATCHED: Final = 1
FLAG_TIMED: Final = 2

JOIN_TIMEOUT_S: Final = 2.0
"""How long the first rank's record waits for the others'."""
MAX_PENDING: Final = 400_000
MAX_COMMUNICATORS: Final = 4096
MAX_REPORTERS: Final = 65536

_SAME_FIELDS: Final = ("n_ranks", "n_nodes", "message_bytes", "epoch", "step", "collective", "phase", "algorithm",
                       "protocol", "n_channels", "timing_source")  # fmt: skip


class Joiner:
    """Joins one job's observations.

    A collective is complete when as many ranks have reported it as this daemon can expect to: its
    communicator's ranks, or fewer where the others are on other nodes. How many of a communicator
    are here is learned from the first timeout; joins of fewer ranks than usual are discarded, since
    their durations would include waiting.
    """

    def __init__(self) -> None:
        self.n_partial = 0
        """Records given up because not all ranks reported that collective."""
        self.n_late = 0
        """Records that came after their collective had been joined, or twice."""
        self._chunks: list[tuple[int, NDArray[np.void]]] = []
        self._n_new = 0
        self._communicators: dict[int, int] = {}
        self._forget()

    def _forget(self) -> None:
        self._records = np.empty(0, OBSERVATION)
        self._codes = np.empty(0, np.uint64)
        self._arrived_s = np.empty(0, np.float64)
        self._communicators.clear()
        self._joined_up_to = np.full(MAX_COMMUNICATORS * 16, -1, np.int64)
        self.members_changed()

    def members_changed(self) -> None:
        """Ranks came or went: how many report each communicator has to be learned anew."""
        self._n_members = np.zeros(MAX_COMMUNICATORS, np.int64)

    @property
    def n_pending(self) -> int:
        """Records that wait for others."""
        return len(self._codes) + self._n_new

    def add(self, rank: int, records: NDArray[np.void]) -> None:
        """Take in records (OBSERVATION, shape [n]) that `rank` sent; only timed ones count."""
        timed = (
            (records["flags"] & FLAG_TIMED != 0)
            & (records["duration_us"] >= 0)
            & (records["collective"] <= max(Collective))
            & (records["n_ranks"] > 0)
        )
        if not timed.all():
            records = records[timed]
        if len(records):
            self._chunks.append((rank, records))
            self._n_new += len(records)

    def join(self, now_s: float, n_ranks_here: int, *, give_up: bool = False) -> tuple[NDArray[np.void], int]:
        """Measurements (MEASUREMENT, shape [n]) complete by now, in the order they started.

        Also returns from how many observations they were joined. `n_ranks_here` is the number of
        the job's ranks that report to this daemon; `give_up` waits for no more records.
        """
        self._take_in(now_s)
        if not len(self._codes):
            return np.empty(0, MEASUREMENT), 0
        starts, counts = self._group()
        first = self._records[starts]
        places = (self._codes[starts] >> np.uint64(48)).astype(np.int64)
        members = self._n_members[places >> 4]
        expected = np.where(members > 0, members, np.minimum(first["n_ranks"], n_ranks_here))
        complete = counts >= expected
        oldest_s = np.minimum.reduceat(self._arrived_s, starts)
        expired = ~complete & (give_up | (oldest_s < now_s - JOIN_TIMEOUT_S) | (len(self._codes) > MAX_PENDING))
        usual = self._usual_counts(places >> 4, counts, complete, expired)
        joined = complete | (expired & (counts >= usual))
        self.n_partial += int(counts[expired & ~joined].sum())
        np.maximum.at(self._joined_up_to, places[joined], first["sequence"][joined].astype(np.int64))
        measurements = self._measure(first, starts)[joined]
        keep = np.repeat(~(complete | expired), counts)
        self._records, self._codes = self._records[keep], self._codes[keep]
        self._arrived_s = self._arrived_s[keep]
        ordered = measurements[np.argsort(first["start_ns"][joined], kind="stable")]
        return ordered[well_formed(ordered)], int(counts[joined].sum())

    def _take_in(self, now_s: float) -> None:
        if not self._chunks:
            return
        records = np.concatenate([records for _, records in self._chunks])
        reporters = np.repeat(
            np.array([rank for rank, _ in self._chunks], np.uint64) % MAX_REPORTERS,
            [len(records) for _, records in self._chunks],
        )
        self._chunks.clear()
        self._n_new = 0
        codes = self._encode(records, reporters)
        late = records["sequence"] <= self._joined_up_to[(codes >> np.uint64(48)).astype(np.int64)]
        if late.any():
            self.n_late += int(late.sum())
            self._n_members[(codes[late] >> np.uint64(52)).astype(np.int64)] = 0  # more report than was thought
            records, codes = records[~late], codes[~late]
        self._records = np.concatenate([self._records, records])
        self._codes = np.concatenate([self._codes, codes])
        self._arrived_s = np.concatenate([self._arrived_s, np.full(len(codes), now_s)])

    def _encode(self, records: NDArray[np.void], reporters: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One integer per record that sorts by collective call, then rank.

        12 bits communicator, 4 collective, 32 sequence, 16 rank.
        """
        unique, inverse = np.unique(records["comm_id"], return_inverse=True)
        if len(self._communicators) + len(unique) > MAX_COMMUNICATORS:
            self.n_partial += len(self._codes)
            self._forget()
        indices = [self._communicators.setdefault(comm_id, len(self._communicators)) for comm_id in unique.tolist()]
        communicator = np.array(indices, np.uint64)[inverse] % np.uint64(MAX_COMMUNICATORS)
        place = communicator << np.uint64(4) | records["collective"].astype(np.uint64)
        codes: NDArray[np.uint64] = (
            place << np.uint64(48) | records["sequence"].astype(np.uint64) << np.uint64(16) | reporters
        )
        return codes

    def _group(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Sort what is pending by call; where each call's records start, and how many they are."""
        order = np.argsort(self._codes, kind="stable")
        codes = self._codes[order]
        once = np.concatenate([[True], codes[1:] != codes[:-1]])
        if not once.all():
            self.n_late += int(len(once) - once.sum())
            order, codes = order[once], codes[once]
        self._records, self._codes, self._arrived_s = self._records[order], codes, self._arrived_s[order]
        calls = codes >> np.uint64(16)
        starts = np.flatnonzero(np.concatenate([[True], calls[1:] != calls[:-1]]))
        return starts, np.diff(np.append(starts, len(codes)))

    def _usual_counts(
        self,
        communicators: NDArray[np.int64],
        counts: NDArray[np.intp],
        complete: NDArray[np.bool_],
        expired: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """How many ranks report each call's communicator, judged by the fullest calls so far."""
        ended = complete | expired
        np.maximum.at(self._n_members, communicators[ended], counts[ended])
        usual: NDArray[np.int64] = self._n_members[communicators]
        return usual

    def _measure(self, first: NDArray[np.void], starts: NDArray[np.intp]) -> NDArray[np.void]:
        made = np.zeros(len(starts), MEASUREMENT)
        for name in _SAME_FIELDS:
            made[name] = first[name]
        made["duration_us"] = np.minimum.reduceat(self._records["duration_us"], starts)
        pressure = np.fmax.reduceat(self._records["memory_pressure"], starts)
        made["memory_pressure"] = np.where(pressure >= 0, pressure, np.nan)
        made["is_default"] = first["flags"] & FLAG_MATCHED == 0
        return made
