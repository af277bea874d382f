"""Cuts a sequence of collectives into training steps whose beginnings are unknown.

Training repeats itself, so a step is the period of the sequence. A period counts once two whole ones were seen. Of
several, the one that explains the longest stretch up to now counts: micro-steps explain less than their whole step.
From then on each new call is compared with the one a period ago, which costs little. A call that is lost or out of
order disturbs only two periods. If records are lost so often that no two periods are equal, several are aligned
(alignment.py).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .alignment import distances, find_consensus, paired, voted_again

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_CALLS: Final = 8192
"""Longest history kept, and twice the longest step that is recognised."""
MAX_PAIRS: Final = 3
SHORTEST_END: Final = 24
STEPS_TO_TRUST: Final = 3
CALLS_TO_TRUST: Final = 64
"""A period is certain once it has held for this many steps and calls."""
BEGUN_SHARE: Final = 0.05
"""Share of a step that must have come again before the search waits for the rest."""
SEARCH_GROWTH: Final = 0.2
"""A search is repeated once the history has grown by this share, or once a step may be complete."""
SHARE_LEFT: Final = 0.75
"""A shorter period replaces a step that lost calls only if it is at least this share of it."""
FOREIGN_CALLS: Final = 16
FOREIGN_SHARE: Final = 0.75
"""A step is over if FOREIGN_CALLS calls, and this share of those since the first doubt, are not its own."""
MAX_FOREIGN: Final = 64
OWN_PER_FOREIGN: Final = 3
"""Calls of an aligned step that outweigh one foreign call."""
BREAKS_TO_ALIGN: Final = 3
"""Disturbances of a known step before rounds are aligned."""
CALLS_TO_ALIGN: Final = 48
ALIGN_GROWTH: Final = 1 / 3
"""Least calls between two alignments, and least share of the history."""
MAX_UNCHECKED: Final = 12
"""Most steps between two votes on an aligned step that still holds."""
MUCH_LONGER: Final = 2.0
"""Aligned rounds must explain this many times the calls that repeat one by one."""
WHOLE_CALLS: Final = 512
"""After this many calls that repeat one by one, and at least six steps, records are not lost any more."""
WHOLE_STEPS: Final = 6


class Found(NamedTuple):
    """A period, the length of the final stretch that has it, and calls until a longer stretch may prove another.

    Period and span are 0 if no stretch was seen twice; `wait` is 0 if no stretch has begun to come again.
    """

    period: int
    span: int
    wait: int


def find_period(codes: Ints) -> Found:
    """The period that explains the longest stretch up to now, if it was seen twice."""
    n = len(codes)
    best, best_span = 0, 0
    begun = []
    for lag in _lags(codes) if n > 1 else ():
        differs = codes[lag:] != codes[:-lag]
        last = int(differs[::-1].argmax())
        matched = last if differs[len(differs) - 1 - last] else n - lag
        span = matched + lag
        if matched >= lag:
            if span > best_span:
                best, best_span = lag, span
        elif matched >= BEGUN_SHARE * lag:
            begun.append((lag - matched, span))
    return Found(best, best_span, min((wait for wait, span in begun if span > best_span), default=0))


def _lags(codes: Ints) -> list[int]:
    """Possible lengths of a period, shortest first: distances between positions of the rarest recent pairs of calls.

    Recent means the whole history and ever shorter ends of it, so that short new steps show behind long old ones. Pairs
    mark changes between kinds of calls even if no single call is rare.
    """
    pairs, n_end = paired(codes), len(codes)
    lags: set[int] = set()
    while n_end > SHORTEST_END:
        lags |= distances(pairs[-n_end:], 2, MAX_PAIRS)
        n_end = max(SHORTEST_END, n_end // 2)
    return sorted(lags | distances(pairs[-n_end:], 2, SHORTEST_END))


class StepCutter:
    """Follows one sequence; `window` is the last whole step."""

    def __init__(self) -> None:
        self.period = 0
        """Calls per step; 0: not known yet."""
        self.n_alike = 0
        """Newest calls that repeat the known step one by one; 0: the last one did not, or rounds are aligned."""
        self._codes = np.zeros(2 * MAX_CALLS, np.int64)
        self._gaps = np.zeros(2 * MAX_CALLS, np.float64)
        self._n = 0
        """Calls in the history."""
        self._total = 0
        """Number of all calls so far; the next five attributes are such numbers."""
        self._searched_at = 0
        self._due_at = 0
        """When a step that has begun to come again will be complete; 0: none has."""
        self._align_at = CALLS_TO_ALIGN
        self._align_pause = CALLS_TO_ALIGN
        self._aligned_at = 0
        """When the last aligned step ended."""
        self._step = np.zeros(0, np.int64)
        """Two rounds of the last recognised step."""
        self._is_aligned = False
        """The step does not repeat call by call: it is the majority of several aligned rounds."""
        self._n_disturbed = 0
        """Calls since the first doubt about the step; 0: there is none."""
        self._n_foreign = 0
        """Foreign calls since then: the step does not have them."""
        self._foreign: set[int] = set()
        """Foreign calls that came once since then, for an aligned step."""
        self._n_breaks = 0
        """Disturbances of the step since the last alignment."""
        self._quiet_after = 0

    @property
    def codes(self) -> Ints:
        """The history, oldest first."""
        return self._codes[: self._n]

    @property
    def window(self) -> tuple[Ints, Floats]:
        """The last `period` calls and the gaps before them; an aligned step has no gaps."""
        if self._is_aligned:
            return self._step[: self.period], np.zeros(self.period)
        start = self._n - self.period
        return self._codes[start : self._n], self._gaps[start : self._n]

    @property
    def is_over(self) -> bool:
        """Whether new calls are not the known step's, and no other step is known yet."""
        share = 0.0 if self._is_aligned else FOREIGN_SHARE
        return self._n_foreign >= max(FOREIGN_CALLS, share * self._n_disturbed)

    def add(self, codes: Ints, gaps_us: Floats) -> bool:
        """Take in calls; True if a (new) period was found."""
        found = False
        for start in range(0, len(codes), MAX_CALLS):
            found |= self._add(codes[start : start + MAX_CALLS], gaps_us[start : start + MAX_CALLS])
        return found

    def _add(self, codes: Ints, gaps_us: Floats) -> bool:
        n_new = len(codes)
        if self._n + n_new > len(self._codes):
            keep = min(self._n, MAX_CALLS)
            for history in (self._codes, self._gaps):
                history[:keep] = history[self._n - keep : self._n]
            self._n = keep
        before = self._n
        self._codes[before : before + n_new] = codes
        self._gaps[before : before + n_new] = gaps_us
        self._n, self._total = before + n_new, self._total + n_new
        if self._is_aligned:
            return self._follow(codes)
        if self.period:
            start = max(before, self.period)
            differs = self._codes[start - self.period : self._n - self.period] != self._codes[start : self._n]
            if not differs.any():
                self.n_alike += n_new
                if self.n_alike >= self._quiet_after and not self._is_due:
                    return self._settle() if self._n_disturbed else False
            else:
                self._disturbed(codes, differs)
            self._n_disturbed += n_new
        found = self._search()
        return self._align(found) or found

    def _disturbed(self, codes: Ints, differs: npt.NDArray[np.bool_]) -> None:
        """Count calls that differ from those one period ago."""
        if not self._n_disturbed:  # a step that has held for long holds again soon; another may be part of a longer one
            self._quiet_after = self.period
        if self.n_alike:
            self._n_disturbed = self._n_foreign = 0
            self._searched_at = self._total - len(codes)
        self.n_alike = 0
        self._n_breaks += 1 + int(np.count_nonzero(differs[1:] & ~differs[:-1]))
        self._n_foreign += len(codes) - int(np.isin(codes, self._step).sum())

    def _search(self) -> bool:
        """Search for calls that repeat one by one; True if they are another step."""
        if self._total - self._searched_at < self._pause() and not self._is_due:
            return False
        found = self._find()
        if not found.period or (self.period and not self._is_news(found)):
            return False
        return self._take(found.period)

    def _align(self, has_found: bool) -> bool:
        """Align several rounds, unless the step is certain; True if they are another step."""
        if self._total < self._align_at - has_found * self._align_pause * 3 // 4:
            return False
        if self.period and not has_found and self._n_breaks < BREAKS_TO_ALIGN:
            return False
        end = self.codes[-MAX_CALLS:]
        self._align_pause = max(CALLS_TO_ALIGN, int(ALIGN_GROWTH * len(end)))
        self._n_breaks, self._align_at = 0, self._total + self._align_pause
        n_alike = _n_alike(end, self.period) if self.period else 0
        if n_alike >= 2 * self.period and len(end) < MUCH_LONGER * n_alike:
            return False  # nearly all calls repeat one by one
        found = find_consensus(end)
        if found is None or (n_alike and found.n_breaks < BREAKS_TO_ALIGN) or found.n_explained < MUCH_LONGER * n_alike:
            return False
        return self._known(found.step)

    def _known(self, step: Ints) -> bool:
        """Take an aligned step as the known one; True if it is another one."""
        is_news = len(step) != self.period or not _contains(self._step, step)
        self.period, self._step, self._is_aligned = len(step), np.tile(step, 2), True
        self.n_alike = self._n_foreign = 0
        self._aligned_at, self._foreign = self._total, set() if is_news else self._foreign
        longest = min(MAX_UNCHECKED * len(step), MAX_CALLS // 2)
        self._align_pause = max(CALLS_TO_ALIGN, min(2 * (len(step) if is_news else self._align_pause), longest))
        self._align_at = self._total + self._align_pause
        return is_news

    def _follow(self, codes: Ints) -> bool:
        """Compare new calls with an aligned step; True if it turns out to be another."""
        foreign = codes[~np.isin(codes, self._step)].tolist()
        comes_again = len({*foreign} - self._foreign) < len(foreign)  # then it belongs to another step
        self._foreign = {*foreign, *(self._foreign if len(self._foreign) < MAX_FOREIGN else ())}
        n_own = len(codes) - len(foreign)
        self._n_foreign = max(0, self._n_foreign + len(codes) - n_own - OWN_PER_FOREIGN * n_own)
        self._n_disturbed += len(codes)
        if self._is_due or self._total - self._searched_at >= self._pause():
            found = self._find()
            if found.period and self._is_whole(found):
                return self._take(found.period)
        if not (self.is_over or comes_again):
            if self._total < self._align_at:
                return False
            again = voted_again(self._step[: self.period], self.codes, self._total - self._aligned_at)
            if again is not None and len(again) > 1:
                return self._known(again)
        self._is_aligned, self.n_alike, self._n_breaks = False, 0, BREAKS_TO_ALIGN
        self._n_disturbed = max(1, self._n_foreign)
        self._searched_at, self._align_at = self._total - self._n_disturbed, self._total
        found_again = self._search()
        return self._align(found_again) or found_again

    def _is_whole(self, found: Found) -> bool:
        """Whether calls that repeat one by one replace an aligned step; its own rounds with lost calls do not."""
        if found.period == self.period and _contains(self._step, self.codes[-found.period :]):
            return found.span >= max(WHOLE_CALLS, WHOLE_STEPS * self.period)
        return found.span >= 2 * self.period and found.period >= SHARE_LEFT * self.period

    @property
    def _is_due(self) -> bool:
        return 0 < self._due_at <= self._total

    def _find(self) -> Found:
        is_due, n_end = self._is_due, min(self._n, MAX_CALLS)
        if not self.period and not is_due:
            n_end = min(n_end, _looked_back(self._searched_at, self._total))
        end = self.codes[-n_end:]
        found = find_period(end) if self.period or is_due or _comes_again(end) else Found(0, 0, 0)
        self._searched_at = self._total
        waits = [self._total + found.wait] if found.wait else []
        waits += [self._due_at] if self._due_at and not is_due else []
        self._due_at = min(waits, default=0)
        return found

    def _settle(self) -> bool:
        """The known step holds again, or has held for long enough: search for a longer one that includes it."""
        self._n_disturbed = self._n_foreign = 0
        return self._take(max(self._find().period, self.period))

    def _take(self, period: int) -> bool:
        """Take the last `period` calls as the step; False if it is the known one."""
        step = self.codes[-period:]
        if period == self.period and not self._is_aligned and _contains(self._step, step):
            return False
        is_news = period != self.period or not _contains(self._step, step)
        self.period, self._is_aligned = period, False
        self._step = np.tile(step, 2)
        self.n_alike, self._n_disturbed, self._n_foreign = period, period, 0
        self._quiet_after = period + max(STEPS_TO_TRUST * period, CALLS_TO_TRUST)
        return is_news

    def _pause(self) -> float:
        """Calls between two searches; many if nothing has repeated for a long time."""
        n_searched = self._n_disturbed if self.period else min(self._searched_at, SHORTEST_END)
        return SEARCH_GROWTH * n_searched if n_searched < MAX_CALLS else MAX_CALLS / 2

    def _is_news(self, found: Found) -> bool:
        """Whether a found period replaces the old step; a part of the old step does so only if it goes on for longer.

        Two rounds of a part replace it if the old step does not have them in sequence. The exception is a step that
        lost a few calls: it repeats once beside the whole one before.
        """
        if found.period >= self.period or found.span >= 2 * self.period + found.period:
            return True
        n_rounds = 2 if found.period <= SHARE_LEFT * self.period else 1
        return not _contains(self._step, self.codes[-n_rounds * found.period :])


def _n_alike(codes: Ints, period: int) -> int:
    """Calls at the end that repeat with a period, including the first round."""
    differs = codes[period:][::-1] != codes[:-period][::-1]
    return period + (int(differs.argmax()) if differs.any() else len(differs))


def _comes_again(codes: Ints) -> bool:
    """Whether the last two calls occur in `codes` before; if not, no search is worth its time."""
    return bool(((codes[:-2] == codes[-2]) & (codes[1:-1] == codes[-1])).any()) if len(codes) > 2 else False


def _looked_back(before: int, now: int) -> int:
    """Calls to search while no step is known: every second search goes twice as far back as those between.

    So a short step is found soon after a long sequence without repetition, and a long one once a fifth of it is new.
    """
    pause = int(SEARCH_GROWTH * SHORTEST_END)
    return SHORTEST_END << (before // pause ^ now // pause).bit_length()


def _contains(codes: Ints, part: Ints) -> bool:
    """Whether `codes` contain `part`."""
    for start in np.flatnonzero(codes[: len(codes) - len(part) + 1] == part[0]).tolist():
        if np.array_equal(codes[start : start + len(part)], part):
            return True
    return False
