"""Estimates the network's level during each measurement, so that settings are compared as if all ran at one time.

Another job may have used the links during a part of an earlier job. The setting that won ran mostly in that part,
NCCL's own choice and the losers mostly before it: medians over the whole job would call the winner slow.

Per communicator class, durations (log) are the sum of two parts: the time of a *cell* (a call and its setting), and the
level of a stretch of a job. Levels are estimated from cells that ran in several stretches. Stretches come from merging
neighbouring blocks of steps without a significant difference. Levels slow keys down differently, so each key has its
own share. If levels differ by no more than drift, measurements stay as they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_SHIFT: Final = 0.03
"""Levels that differ by less (log) count as drift."""
MIN_Z: Final = 4.0
"""Levels that differ by more standard errors than this are different."""
MIN_BLOCK_STEPS: Final = 4
MAX_BLOCKS: Final = 64
"""Most blocks of steps of one job, before neighbours are merged."""
MAX_STRETCHES: Final = 8
"""Most stretches of one job, after neighbouring blocks were merged."""
MAX_JOBS: Final = 100
"""At most this many of the newest jobs are compared, to bound the time."""
MAX_LOOKED_AT: Final = 200_000
"""Most measurements for the estimate of levels; if there are more, a random sample of this many."""
MIN_NOISE: Final = 0.01
CELL_STD: Final = 0.03
"""Standard deviation (log) of one cell's own changes between stretches."""
USUAL_SHARE: Final = 0.1
"""The usual level is the fastest one with at least this share of all measurements; the others were slowed down."""
KEY_SHARE: Final = 0.3
"""Standard deviation of one key's share in a level: a busy link slows small messages less."""
KEY_STD: Final = 0.01
"""Standard deviation (log) of one key between stretches of the same level."""
SETTING_SHARE: Final = 0.03
"""Standard deviation, as a share of the level, between settings of the same key."""
SETTING_STD: Final = 0.003
_SEED: Final = 7


class Cells(NamedTuple):
    """Cells, as arrays of one length: a cell is one setting at one message size of one decision key."""

    place: Ints
    """Index of the communicator class."""
    key: Ints
    default: Ints
    """Index of the cell of NCCL's own choice for the same messages; -1: none."""


class Levelled(NamedTuple):
    """Corrections that bring all measurements to the usual level."""

    shift: Floats
    """To subtract from the log duration of each measurement."""
    doubt: Floats
    """By cell, the standard error (log) of its comparison with NCCL's own choice, as they ran at different times."""


class _Table(NamedTuple):
    """Medians by cell and block or stretch, arrays of one length."""

    cell: Ints
    node: Ints
    n_calls: Floats
    log: Floats


def levelled(cells: Cells, cell: Ints, job: Ints, order: Ints, step: Ints, logs: Floats) -> Levelled | None:
    """Corrections that make measurements comparable although the network's speed changed; None if it never did.

    All arrays but `cells` have one entry per measurement, shape (n,). `cell` is an index into `cells`. Later jobs have
    higher numbers in `job`. `order` is the position in the order of recording, and `logs` are of microseconds.
    """
    if len(logs) < 2 * MIN_BLOCK_STEPS:
        return None
    looked_at = np.flatnonzero(job >= np.unique(job)[-MAX_JOBS:][0])
    if len(looked_at) > MAX_LOOKED_AT:
        looked_at = np.sort(np.random.default_rng(_SEED).choice(looked_at, MAX_LOOKED_AT, replace=False))
    block, job_of_block = _blocks(job, order, step)
    of_blocks, noise = _medians(cell[looked_at], block[looked_at], logs[looked_at])
    shift, doubt = np.zeros(len(logs)), np.zeros(len(cells.key))
    is_changed = False
    for place in np.unique(cells.place).tolist():
        here = _take(of_blocks, cells.place[of_blocks.cell] == place)
        stretch_of = _stretches(here, job_of_block, noise)
        table = _merged(here, stretch_of)
        level = _levels(table, noise)
        if not level.any():
            continue
        is_changed = True
        rows = np.flatnonzero((cells.place[cell] == place) & (stretch_of[block] >= 0))
        stretch = stretch_of[block[rows]]
        shift[rows] = level[stretch]
        own, own_doubt = _shares_of_keys(table, level, cells, noise)
        doubt += own_doubt
        name = cells.key[cell[rows]] * len(level) + stretch
        names = np.array(sorted(own), dtype=np.int64)
        at = np.minimum(np.searchsorted(names, name), len(names) - 1)
        shift[rows] += np.where(names[at] == name, np.array([own[one] for one in names.tolist()])[at], 0.0)
    return Levelled(shift, doubt) if is_changed else None


def _blocks(job: Ints, order: Ints, step: Ints) -> tuple[Ints, Ints]:
    """Block of each measurement, numbered over all jobs in the order of time, and the job of each block.

    Jobs that restart from a checkpoint count steps again, and imported measurements may have none. So time is the order
    of recording, and blocks are cut whenever the step changes.
    """
    found, job_of_block, n_blocks = np.empty(len(job), np.int64), [], 0
    by_job = np.lexsort((order, job))
    starts = np.flatnonzero(np.r_[True, np.diff(job[by_job]) != 0])
    for rows in np.split(by_job, starts[1:]):
        time = np.cumsum(np.r_[0, np.diff(step[rows]) != 0])
        if time[-1] == 0:
            time = np.arange(len(rows))
        n_here = int(np.clip((time[-1] + 1) // MIN_BLOCK_STEPS, 1, MAX_BLOCKS))
        found[rows] = n_blocks + time * n_here // (time[-1] + 1)
        job_of_block += [int(job[rows[0]])] * n_here
        n_blocks += n_here
    return found, np.array(job_of_block, np.int64)


def _medians(cell: Ints, block: Ints, logs: Floats) -> tuple[_Table, float]:
    """Medians by cell and block, and the scatter of single measurements around them."""
    order = np.lexsort((logs, block, cell))
    cell, block, logs = cell[order], block[order], logs[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(cell) != 0) | (np.diff(block) != 0)])
    counts = np.diff(np.r_[starts, len(logs)])
    medians = 0.5 * (logs[starts + (counts - 1) // 2] + logs[starts + counts // 2])
    off = np.abs(logs - np.repeat(medians, counts))[np.repeat(counts > 2, counts)]
    noise = 1.4826 * float(np.median(off)) if len(off) else 0.0
    return _Table(cell[starts], block[starts], counts.astype(np.float64), medians), max(noise, MIN_NOISE)


def _take(table: _Table, which: npt.NDArray[np.bool_]) -> _Table:
    return _Table(table.cell[which], table.node[which], table.n_calls[which], table.log[which])


def _stretches(table: _Table, job_of_block: Ints, noise: float) -> Ints:
    """The stretch of each block, numbered over all jobs; -1: the table has no measurements in it."""
    found, n_stretches = np.full(len(job_of_block), -1), 0
    job = job_of_block[table.node]
    for one in np.unique(job).tolist():
        here = _take(table, job == one)
        blocks, column = np.unique(here.node, return_inverse=True)
        cells, row = np.unique(here.cell, return_inverse=True)
        count, total = np.zeros((2, len(blocks), len(cells)))
        count[column, row], total[column, row] = here.n_calls, here.n_calls * here.log
        stretch = _merge(count, total, noise)
        found[blocks] = n_stretches + stretch
        n_stretches += int(stretch[-1]) + 1
    return found


def _merge(count: Floats, total: Floats, noise: float) -> Ints:
    """Stretch of each block of one job, from counts and sums of logs [n_blocks, n_cells].

    Neighbours that do not differ are merged, the most similar first.
    """
    parts = [(count[at], total[at], 1) for at in range(len(count))]
    jumps = [_jump(*pair, noise) for pair in pairwise(parts)]
    usual = 1.4826 * float(np.median([abs(shift) for shift, _ in jumps])) if len(jumps) > 4 else 0.0
    while jumps:
        best: tuple[float, int] | None = None
        for at, (shift, error) in enumerate(jumps):
            n_here = 1.0 / parts[at][2] + 1.0 / parts[at + 1][2]
            beyond = max(MIN_SHIFT, MIN_Z * max(error, usual * float(np.sqrt(0.5 * n_here))))
            is_alike = abs(shift) <= beyond or len(parts) > MAX_STRETCHES
            if is_alike and (best is None or shift**2 / n_here < best[0]):
                best = shift**2 / n_here, at
        if best is None:
            break
        at = best[1]
        left, right = parts[at], parts[at + 1]
        parts[at : at + 2] = [(left[0] + right[0], left[1] + right[1], left[2] + right[2])]
        around = range(max(0, at - 1), min(len(parts) - 1, at + 1))
        jumps[max(0, at - 1) : at + 2] = [_jump(parts[one], parts[one + 1], noise) for one in around]
    return np.repeat(np.arange(len(parts)), [n_blocks for _, _, n_blocks in parts])


_Part = tuple[Floats, Floats, int]


def _jump(left: _Part, right: _Part, noise: float) -> tuple[float, float]:
    """How much longer (log) the cells of both stretches take in the second, and the standard error."""
    both = (left[0] > 0) & (right[0] > 0)
    if not both.any():
        return 0.0, np.inf
    n_left, n_right = left[0][both], right[0][both]
    weight = 1.0 / (CELL_STD**2 + noise**2 * (1.0 / n_left + 1.0 / n_right))
    shift = np.clip(right[1][both] / n_right - left[1][both] / n_left, -1.0, 1.0)
    return float((weight * shift).sum() / weight.sum()), float(1.0 / np.sqrt(weight.sum()))


def _merged(table: _Table, stretch_of: Ints) -> _Table:
    """The table by stretch."""
    n_stretches = int(stretch_of.max()) + 1
    name = table.cell * n_stretches + stretch_of[table.node]
    names, inverse = np.unique(name, return_inverse=True)
    count = np.bincount(inverse, table.n_calls).astype(np.float64)
    log = np.bincount(inverse, table.n_calls * table.log) / count
    return _Table(names // n_stretches, names % n_stretches, count, log)


def _levels(table: _Table, noise: float) -> Floats:
    """Level (log) of every stretch above the usual one: least squares over shared cells.

    Stretches that share no cell with others, directly or indirectly, have their own usual level.
    """
    cells, row = np.unique(table.cell, return_inverse=True)
    n_stretches = int(table.node.max()) + 1
    weight, log = np.zeros((2, len(cells), n_stretches))
    weight[row, table.node] = 1.0 / (CELL_STD**2 + noise**2 / table.n_calls)
    log[row, table.node] = table.log
    share = weight / weight.sum(axis=1, keepdims=True)
    tied = np.diag(weight.sum(axis=0)) - share.T @ weight
    off = log - (share * log).sum(axis=1, keepdims=True)
    # A weak prior puts stretches without shared cells at level 0; their own usual level removes its effect.
    spread = np.linalg.inv(tied + 1e-3 * np.eye(n_stretches))
    level = spread @ (weight * off).sum(axis=0)
    n_measured = np.bincount(table.node, table.n_calls, minlength=n_stretches)
    found = np.zeros(n_stretches)
    group = _groups(weight > 0)
    for one in np.unique(group).tolist():
        members = np.flatnonzero(group == one)
        by_level = members[np.argsort(level[members], kind="stable")]
        share_below = np.cumsum(n_measured[by_level]) / n_measured[members].sum()
        usual = by_level[int(np.argmax(share_below >= USUAL_SHARE))]
        above = level[members] - level[usual]
        error = np.sqrt(spread[members, members] + spread[usual, usual] - 2.0 * spread[members, usual])
        found[members] = np.where(np.abs(above) > np.maximum(MIN_SHIFT, MIN_Z * error), above, 0.0)
    return found


def _groups(ran: npt.NDArray[np.bool_]) -> Ints:
    """A number for each stretch, the same if cells connect them; `ran` says which cell ran in which, [n_cells, n]."""
    group = np.arange(ran.shape[1])
    while True:
        least = np.where(ran, group, ran.shape[1]).min(axis=1)
        lower = np.where(ran, least[:, None], ran.shape[1]).min(axis=0)
        lower = np.minimum(lower, group)
        if (lower == group).all():
            return group
        group = lower


def _shares_of_keys(table: _Table, level: Floats, cells: Cells, noise: float) -> tuple[dict[int, float], Floats]:
    """Deviation of each key from the level of each stretch, by key * len(level) + stretch, and the doubt by cell.

    Least squares for a cell's time plus the stretch's effect on the key; the latter has a prior.
    """
    off: dict[int, float] = {}
    doubt = np.zeros(len(cells.key))
    key_std = np.hypot(KEY_STD, KEY_SHARE * np.abs(level))
    setting_std = np.hypot(SETTING_STD, SETTING_SHARE * np.abs(level))
    key_of_row = cells.key[table.cell]
    order = np.argsort(key_of_row, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(key_of_row[order])) + 1):
        key = int(key_of_row[rows[0]])
        own, row = np.unique(table.cell[rows], return_inverse=True)
        stretches, column = np.unique(table.node[rows], return_inverse=True)
        n_cells = len(own)
        weight = np.zeros((n_cells, len(stretches)))
        log = np.zeros_like(weight)
        weight[row, column] = 1.0 / (setting_std[table.node[rows]] ** 2 + noise**2 / table.n_calls[rows])
        log[row, column] = table.log[rows] - level[table.node[rows]]
        ties = np.block(
            [
                [np.diag(weight.sum(axis=1)), weight],
                [weight.T, np.diag(weight.sum(axis=0) + key_std[stretches] ** -2.0)],
            ]
        )
        spread = np.linalg.inv(ties)
        solved = spread @ np.r_[(weight * log).sum(axis=1), (weight * log).sum(axis=0)]
        off |= dict(zip((key * len(level) + stretches).tolist(), solved[n_cells:].tolist(), strict=True))
        n_calls = np.bincount(row, table.n_calls[rows])
        default = cells.default[own]
        at = np.searchsorted(own, default)
        for this, (other, is_known) in enumerate(zip(at.tolist(), (default >= 0).tolist(), strict=True)):
            variance = spread[this, this] - noise**2 / n_calls[this]
            if is_known and other != this:
                variance += spread[other, other] - noise**2 / n_calls[other] - 2.0 * spread[this, other]
            doubt[own[this]] = np.sqrt(max(0.0, variance)) if other != this else 0.0
    return off, doubt
