"""How many ranks ran: what a file states, what its figures imply and what it lists, compared.

nccl-tests' tables give two bandwidths whose ratio is a function of the number of ranks alone, for all collectives in
which each rank has a share. So a list of ranks that was cut or pasted shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from zerotune.store.records import Collective
from zerotune.tuner.traces.columns import MAX_PLACES

MAX_RANKS: Final = 1 << 24
_SHARED: Final = (
    Collective.all_gather, Collective.reduce_scatter, Collective.all_to_all, Collective.gather, Collective.scatter,
)  # fmt: skip
"""Their bus bandwidth is (n - 1) / n of the algorithm's; an all-reduce's is twice that."""
_MARGINS: Final = (0.51, 1.01)
"""Of the last printed digit: what rounding takes, and what cutting takes."""


class Implied(NamedTuple):
    """The least and the most ranks that the printed figures allow."""

    least: int = 1
    most: int = MAX_RANKS

    @property
    def is_one_number(self) -> bool:
        """Whether they allow one number alone."""
        return self.least == self.most


def implied_ranks(collective: Collective | None, algbw: ArrayLike, busbw: ArrayLike) -> Implied:
    """The ranks that the ratios of bandwidths allow.

    Args:
        collective: of the table; None: unknown.
        algbw: algorithm bandwidths as printed, shape (n,).
        busbw: bus bandwidths likewise.

    Returns:
        The range; any number if the collective's ratio does not depend on it, or no ratio is what it can be.
    """
    factor = 2 if collective is Collective.all_reduce else 1 if collective in _SHARED else 0
    plain, bus = np.asarray(algbw, float), np.asarray(busbw, float)
    usable = (plain > 0) & (bus > 0) & np.isfinite(plain) & np.isfinite(bus)
    if not factor or not usable.any():
        return Implied()
    plain, bus = plain[usable], bus[usable]
    for margin in _MARGINS:
        plain_off, bus_off = margin * _last_digit(plain), margin * _last_digit(bus)
        low = float(np.max((bus - bus_off) / (plain + plain_off))) / factor
        with np.errstate(divide="ignore"):
            high = float(np.min(np.where(plain > plain_off, (bus + bus_off) / (plain - plain_off), np.inf))) / factor
        least = max(1, math.ceil(1 / (1 - low))) if low < 1 else MAX_RANKS + 1
        most = math.floor(1 / (1 - high)) if high < 1 and 1 / (1 - high) < MAX_RANKS else MAX_RANKS
        if least <= most:
            return Implied(least, most)
    return Implied()


def _last_digit(printed: np.ndarray) -> float:
    """The unit of the last digit that any of the numbers shows."""
    for places in range(MAX_PLACES):
        if np.allclose(printed * 10**places, np.round(printed * 10**places), rtol=0, atol=1e-4):
            return 10.0**-places
    return 10.0**-MAX_PLACES


class RankCount(NamedTuple):
    """The number of ranks, and what is to be told of how it was found."""

    n_ranks: int
    """0: unknown."""
    is_complete: bool = False
    """Whether each of them is listed."""
    remark: str = ""
    """What was not as it should be; empty: nothing."""
    contradiction: str = ""
    """Why it is unknown although something is said of it."""


def rank_count(stated: int, implied: Implied, listed: Sequence[int] | None = None) -> RankCount:
    """Compare what is known of one communicator's ranks.

    Args:
        stated: how many a file says there are; 0: it does not.
        implied: what its figures allow.
        listed: the numbers of those that it lists; None: it lists none.

    Returns:
        The number that agrees with all of it; the lines of a list may have been lost, so it gives the least number.
    """
    numbers = sorted(set(listed or ()))
    least = numbers[-1] + 1 if numbers else 0
    ratio = f"busbw / algbw is that of {_range(implied)} ranks"
    n_ranks = stated or (least if implied.least <= least <= implied.most else 0)
    if not n_ranks and implied.is_one_number:
        n_ranks = implied.least
    if stated and not implied.least <= stated <= implied.most:
        return RankCount(0, contradiction=f"{stated} ranks are stated, but {ratio}")
    if least > (n_ranks or implied.most):
        said = f"{stated} are stated" if stated else ratio
        return RankCount(0, contradiction=f"rank {least - 1} is listed, but {said}")
    if not n_ranks:
        return RankCount(0)
    if numbers and len(numbers) < n_ranks:
        how = f" ({ratio})" if n_ranks != least and not stated else ""
        return RankCount(n_ranks, remark=f"only {len(numbers)} of its {n_ranks} ranks are listed{how}")
    how = "" if numbers or stated else f"its ranks are not listed: {ratio}"
    return RankCount(n_ranks, is_complete=len(numbers) == n_ranks, remark=how)


def _range(implied: Implied) -> str:
    return str(implied.least) if implied.is_one_number else f"{implied.least} to {implied.most}"
