"""Joins other tools' traces over ranks: one record per collective, with the shortest of its ranks' durations.

Files come rank by rank and in any order, so the timed records of all files are held in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .left_out import LeftOut
from .records import BLOCK_ROWS, FLAG_COUNTED, Block, Summary

ALONE: Final = (
    "not all ranks of a communicator are here: the times may include waiting for others; give the files of all ranks"
)


def joined(blocks: Iterable[Block], summary: Summary) -> Iterator[Block]:
    """One record per timed collective, with the shortest of its ranks' durations.

    A collective with records of fewer ranks than others of its communicator is left out, as its duration may include
    waiting for the missing ranks. Calls without numbers are also left out if a rank has fewer of them than others, as
    the missing ones are unknown. Records that do not name their rank stay as they are.
    """
    timed = []
    for block in blocks:
        has_time = block["duration_us"] > 0
        summary.skip(LeftOut.no_duration, int((~has_time).sum()))
        timed.append(block[has_time])
    records = np.concatenate(timed) if timed else None
    if records is None or not len(records):
        return
    order = np.lexsort([records[name] for name in ("rank", "sequence", "collective", "comm_id")])
    records = records[order]
    if (shifted := _shifted(records)).any():
        summary.skip(LeftOut.partial_ranks, int(shifted.sum()), "calls without numbers, of which a rank has fewer")
        if shifted.all():
            return
        records = records[~shifted]
    repeat = _place_in_row(_begins(records, ("comm_id", "collective", "sequence", "rank")))
    order = np.lexsort([repeat, *(records[name] for name in ("sequence", "collective", "comm_id"))])
    records, repeat = records[order], repeat[order]
    is_first = _begins(records, ("comm_id", "collective", "sequence"))
    is_first[1:] |= repeat[1:] != repeat[:-1]
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(records)))
    calls = records[starts]
    calls["duration_us"] = np.minimum.reduceat(records["duration_us"], starts)
    _, communicator = np.unique(calls["comm_id"], return_inverse=True)
    usual = np.zeros(communicator.max() + 1, np.int64)
    np.maximum.at(usual, communicator, counts)
    is_partial = counts < usual[communicator]
    is_mixed = (counts > calls["n_ranks"]) & (calls["n_ranks"] > 0)
    summary.skip(LeftOut.partial_ranks, int(counts[is_partial & ~is_mixed].sum()))
    summary.skip(LeftOut.too_many_ranks, int(counts[is_mixed].sum()))
    is_whole = ~(is_partial | is_mixed)
    if (usual[communicator] < calls["n_ranks"]).any():
        summary.note(ALONE)
    if counts.max() > 1:
        summary.n_joined = int(counts[is_whole].sum())
    whole = calls[is_whole]
    for first in range(0, len(whole), BLOCK_ROWS):
        yield whole[first : first + BLOCK_ROWS]


def _shifted(records: Block) -> NDArray[np.bool_]:
    """Which records, sorted by communicator, are of calls without numbers that some ranks made more often."""
    groups = np.cumsum(_begins(records, ("comm_id", "collective"))) - 1
    of_rank, n_calls = np.unique(np.stack((groups, records["rank"].astype(np.int64)), 1), axis=0, return_counts=True)
    most, least = np.zeros(groups[-1] + 1, np.int64), np.full(groups[-1] + 1, len(records))
    np.maximum.at(most, of_rank[:, 0], n_calls)
    np.minimum.at(least, of_rank[:, 0], n_calls)
    shifted: NDArray[np.bool_] = (most > least)[groups] & ((records["flags"] & FLAG_COUNTED) != 0)
    return shifted


def _begins(records: Block, names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which records differ from the one before in any of the columns."""
    begins = np.ones(len(records), bool)
    begins[1:] = np.logical_or.reduce([records[name][1:] != records[name][:-1] for name in names])
    return begins


def _place_in_row(begins: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Counts 0, 1, 2 ... that begin again at each True."""
    places = np.arange(len(begins))
    runs: NDArray[np.intp] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return runs
