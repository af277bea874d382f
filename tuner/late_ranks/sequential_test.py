"""A sequential test for members that are late more often than by chance; it may be checked at any time.

The null hypothesis: members of a group are late in events of at most `EVENT_STEPS` steps, such as another process that
computes. Each event hits one member, all with equal probability, and in each of its steps up to half of the others may
be late, too. In a group of n, a step in which a member is late multiplies its wealth by u; a step in which only others
are late multiplies it by d. An event of l steps then multiplies it on average by

    u^l / n + (1 - 1/n) (q u + (1 - q) d)^l,    q = ((n - 1) // 2) / (n - 1),

which is 1 at l = 0 and convex in l: d is chosen to make it 1 at l = EVENT_STEPS, so it is never above 1. So wealth
reaches x with a probability of at most 1/x (Ville's inequality). Since lateness may begin at any time, the initial
wealth is added in parts, the j-th of which is 1 / (j (j + 1)).
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

EVENT_STEPS: Final = 16
"""Longest chance event; a rank that is late for much longer has a cause."""
FALSE_ALARMS: Final = 0.01
"""Probability that chance ever proves any column late, for any length of the job."""
STAKES: Final = (0.3, 0.8)
"""Gain by an event on the column, as a share of n - 1; the lower one is for columns that are late less often."""
PART_STEPS: Final = 64
"""Steps from one part of the initial wealth to the next."""


class SequentialTest:
    """Wealth of each column; columns may be added."""

    def __init__(self) -> None:
        self._log_wealth = np.full((len(STAKES), 0), -np.inf)
        self._n_steps = 0

    def observe(self, late: NDArray[np.bool_], counts: NDArray[np.bool_], n_of_group: NDArray[np.int64]) -> None:
        """Take in further steps; `late` and `counts` have the shape (n_steps, n_columns).

        `counts` tells whether the column was seen in a step in which any of its group was late. `n_of_group` has the
        size of each column's group.
        """
        n_more = late.shape[1] - self._log_wealth.shape[1]
        self._log_wealth = np.pad(self._log_wealth, ((0, 0), (0, n_more)), constant_values=-np.inf)
        factors = np.array([_log_factors(max(2, n)) for n in n_of_group.tolist()]).reshape(-1, 2, len(STAKES))
        log_u, log_d = factors[:, 0].T, factors[:, 1].T
        done = 0
        while done < len(late):
            part, past = divmod(self._n_steps, PART_STEPS)
            if not past:
                first = -np.log((part + 1.0) * (part + 2.0) * len(STAKES))
                self._log_wealth = np.logaddexp(self._log_wealth, first)
            steps = slice(done, done + PART_STEPS - past)
            n_late, n_counted = late[steps].sum(0), counts[steps].sum(0)
            self._log_wealth += n_late * log_u + (n_counted - n_late) * log_d
            n_done = len(late[steps])
            done, self._n_steps = done + n_done, self._n_steps + n_done

    def forget(self, columns: NDArray[np.bool_]) -> None:
        """Remove the wealth of some columns, shape (n_columns,): if they are late again, that must be proven again."""
        self._log_wealth[:, columns] = -np.inf

    def is_proven(self) -> NDArray[np.bool_]:
        """Whether each column is proven late, shape (n_columns,)."""
        n_columns = max(1, self._log_wealth.shape[1])
        found: NDArray[np.bool_] = np.logaddexp.reduce(self._log_wealth, axis=0) >= np.log(n_columns / FALSE_ALARMS)
        return found


@cache
def _log_factors(n: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(log u, log d) in a group of n, each with one entry per stake."""
    won = 1.0 + (n - 1) * np.array(STAKES)
    q = (n - 1) // 2 / (n - 1)
    u = won ** (1.0 / EVENT_STEPS)
    d = (((n - won) / (n - 1)) ** (1.0 / EVENT_STEPS) - q * u) / (1.0 - q)
    return tuple(np.log(u).tolist()), tuple(np.log(d).tolist())
