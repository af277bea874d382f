"""The number of ranks, by comparing a file's statement, the bandwidths of its rows, and its list of ranks.

nccl-tests' tables give two bandwidths whose ratio only depends on the number of ranks, for all collectives in which
each rank has a share. So the ratio reveals an incomplete or pasted list of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...store.records import Collective

MAX_RANKS: Final = 1 << 24
_MAX_PLACES: Final = 6
SHARED_OUT: Final = (
    Collective.all_gather, Collective.reduce_scatter, Collective.all_to_all, Collective.gather, Collective.scatter,
)  # fmt: skip
"""NCCL's count of these is one rank's share; their bus bandwidth is (n - 1) / n of the algorithm's.

An all-reduce's bus bandwidth is twice that.
"""
MOST_RATIOS: Final = 64
"""Rows to use, of the highest bandwidths, which have the most digits."""
_MARGINS: Final = (0.51, 1.01)
"""Errors in units of the last printed digit: by rounding, and by truncation."""


class Implied(NamedTuple):
    """The smallest and largest number of ranks that the printed figures allow."""

    least: int = 1
    most: int = MAX_RANKS

    @property
    def is_one_number(self) -> bool:
        """Whether they allow only one number."""
        return self.least == self.most

    @property
    def is_possible(self) -> bool:
        """Whether they allow any number; ratios of several runs, or of another collective, do not."""
        return self.least <= self.most


def implied_ranks(collective: Collective | None, algbw: ArrayLike, busbw: ArrayLike) -> Implied:
    """Numbers of ranks that ratios of printed bandwidths, shapes (n,), allow; none if they contradict each other."""
    factor = 2 if collective is Collective.all_reduce else 1 if collective in SHARED_OUT else 0
    plain, bus = np.asarray(algbw, float), np.asarray(busbw, float)
    usable = (plain > 0) & (bus > 0) & np.isfinite(plain) & np.isfinite(bus)
    if not factor or not usable.any():
        return Implied()
    plain, bus = plain[usable], bus[usable]
    least, most = 1, MAX_RANKS
    for margin in _MARGINS:
        plain_off, bus_off = margin * _last_digit(plain), margin * _last_digit(bus)
        low = float(np.max((bus - bus_off) / (plain + plain_off))) / factor
        with np.errstate(divide="ignore"):
            high = float(np.min(np.where(plain > plain_off, (bus + bus_off) / (plain - plain_off), np.inf))) / factor
        least = max(1, math.ceil(1 / (1 - low))) if low < 1 else MAX_RANKS + 1
        most = math.floor(1 / (1 - high)) if high < 1 and 1 / (1 - high) < MAX_RANKS else MAX_RANKS
        if least <= most:
            break
    return Implied(least, most)


def _last_digit(printed: np.ndarray) -> float:
    """The unit of the last printed digit of the numbers."""
    for places in range(_MAX_PLACES):
        if np.allclose(printed * 10**places, np.round(printed * 10**places), rtol=0, atol=1e-4):
            return 10.0**-places
    return 10.0**-_MAX_PLACES


class RankCount(NamedTuple):
    """The number of ranks, with notes on how it was found."""

    n_ranks: int
    """Number of ranks; 0: unknown."""
    is_complete: bool = False
    """Whether all of them are listed."""
    remark: str = ""
    """A note on an error in the file's facts; empty: there is none."""
    contradiction: str = ""
    """Why the number is unknown although the file has facts about it."""


def rank_count(stated: int, implied: Implied, listed: Sequence[int] | None = None) -> RankCount:
    """The number of one communicator's ranks that agrees with all facts about it.

    `stated` is 0 if the file does not state it. A list may have lost lines, so it only gives the least number.
    """
    if not implied.is_possible:
        what = "busbw / algbw of its rows is that of no one number of ranks"
        return RankCount(0, contradiction=f"{what}: they are of several runs, or of another collective")
    numbers = sorted(set(listed or ()))
    least = numbers[-1] + 1 if numbers else 0
    ratio = f"busbw / algbw is that of {_range(implied)} ranks"
    n_ranks = stated or (least if implied.least <= least <= implied.most else 0)
    if not n_ranks and implied.is_one_number:
        n_ranks = implied.least
    if stated and not implied.least <= stated <= implied.most:
        return RankCount(0, contradiction=f"{stated} ranks are stated, but {ratio}")
    if least > (n_ranks or implied.most):
        basis = f"{stated} are stated" if stated else ratio
        return RankCount(0, contradiction=f"rank {least - 1} is listed, but {basis}")
    if not n_ranks:
        return RankCount(0)
    if numbers and len(numbers) < n_ranks:
        how = f" ({ratio})" if n_ranks != least and not stated else ""
        return RankCount(n_ranks, remark=f"only {len(numbers)} of its {n_ranks} ranks are listed{how}")
    how = "" if numbers or stated else f"its ranks are not listed: {ratio}"
    return RankCount(n_ranks, is_complete=len(numbers) == n_ranks, remark=how)


@dataclass
class RunRanks:
    """Facts about the ranks of one run of nccl-tests."""

    ranks: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Each listed rank's number -> its group and its host."""
    ratios: list[tuple[float, float]] = field(default_factory=list)
    """Algorithm and bus bandwidths of the run's rows, a few of each piece."""
    count: RankCount | None = None
    """Set when the first rows are yielded."""

    def saw(self, ratios: Iterable[tuple[float, float]]) -> None:
        """Add the algorithm and bus bandwidths of more rows; only the fastest are kept."""
        self.ratios = sorted([*self.ratios, *ratios])[-MOST_RATIOS:]

    def compared(self, collective: Collective | None) -> RankCount:
        """The ranks of one communicator, from the fastest rows so far."""
        ratios = np.array(self.ratios or [(0.0, 0.0)])
        self.count = rank_count(0, implied_ranks(collective, ratios[:, 0], ratios[:, 1]), self._members)
        return self.count

    @property
    def _members(self) -> list[int]:
        """The listed ranks of one communicator, counted from 0; NCCL_TESTS_SPLIT makes several groups."""
        groups: dict[int, list[int]] = {}
        for rank, (group, _) in self.ranks.items():
            groups.setdefault(group, []).append(rank)
        if len(groups) <= 1:
            return list(self.ranks)
        sizes = {len(group) for group in groups.values()}
        return list(range(sizes.pop())) if len(sizes) == 1 else []

    @property
    def n_nodes(self) -> int:
        """Hosts of one communicator; 0: not all of its ranks are listed, or groups differ."""
        hosts: dict[int, set[str]] = {}
        for group, host in self.ranks.values():
            hosts.setdefault(group, set()).add(host)
        each = {len(one) for one in hosts.values()}
        return each.pop() if len(each) == 1 and self.count is not None and self.count.is_complete else 0


def agreed(by_source: Mapping[str, int | None]) -> RankCount:
    """The ranks of one call's communicator if all sources agree; a source without a number has None or 0."""
    known = {what: n_ranks for what, n_ranks in by_source.items() if n_ranks}
    if len(set(known.values())) > 1:
        sources = ", ".join(f"{n_ranks} by {what}" for what, n_ranks in known.items())
        return RankCount(0, contradiction=f"the numbers of ranks of a group contradict each other: {sources}")
    return RankCount(next(iter(known.values()), 0))


def _range(implied: Implied) -> str:
    return str(implied.least) if implied.is_one_number else f"{implied.least} to {implied.most}"
