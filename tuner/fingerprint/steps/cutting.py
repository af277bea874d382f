"""Cuts a sequence of collectives into training steps without being told where they begin.

Training repeats itself, so a step is the period of the sequence. A period is believed once two whole ones
were seen; of several, the one that explains the longest stretch up to now: the micro-steps of an accumulation
explain less than the step they are part of. From then on each new call is compared with the one a period ago,
which costs next to nothing; a call lost or out of order disturbs two periods and nothing else. Where records are
lost so often that no two periods are the same, several vote (voting.py).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.tuner.fingerprint.steps.voted_step import FOREIGN_CALLS, VotedStep, VoteOutcome
from zerotune.tuner.fingerprint.steps.voting import PAIRING, Voted, find_step, is_odd_in_rows, walk

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_CALLS: Final = 8192
"""Longest history kept, and twice the longest step that is recognised."""
MAX_PAIRS: Final = 3
MAX_LAGS_PER_PAIR: Final = 24
SHORTEST_END: Final = 24
STEPS_TO_TRUST: Final = 3
CALLS_TO_TRUST: Final = 64
"""A period is doubted until it has held for this many steps and calls."""
BEGUN_SHARE: Final = 0.05
"""Share of a step that must have come again before it is waited for."""
SEARCH_GROWTH: Final = 0.2
"""A search is repeated when the history has grown by this share since the last one, or when it may have an end."""
SHARE_LEFT: Final = 0.75
"""A shorter period replaces a step that lost calls only if it is at least this share of it."""
FOREIGN_SHARE: Final = 0.75
"""A step is over when FOREIGN_CALLS calls, and this share of those since it was doubted, are not its own."""
BREAKS_TO_VOTE: Final = 3
"""Disturbances of a step that is known, before several are asked what it is."""
CALLS_TO_VOTE: Final = 48
VOTE_GROWTH: Final = 1 / 3
"""Least calls between two votes, and least share of the history; a quarter where the last answer is in doubt."""
BREAKS_BEFORE: Final = 2
"""Positions where calls were lost before the last two rounds, if they were lost and it is not the step that changed."""
MAX_STEPS: Final = 4
"""Rounds that happen to be equal although each lost a few calls are fewer than this."""
MUCH_LONGER: Final = 2.0
LONGER: Final = 1.4
"""A vote must explain this many times the calls that repeat one by one; LONGER if it does not contradict them."""


class Found(NamedTuple):
    """A period, the length of the stretch at the end that has it, and calls until a longer stretch may prove another.

    Period and span are 0 if no stretch was seen twice; `wait` is 0 if none has begun to come again.
    """

    period: int
    span: int
    wait: int


def find_period(codes: Ints) -> Found:
    """The period that explains the longest stretch up to now, if two whole ones were seen."""
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
    """Distances, shortest first, that a period may have: between positions of the rarest pairs of calls lately.

    Lately: in the whole history and in ever shorter ends of it, so that short new steps show behind long old ones.
    Pairs: where nothing is rare, the positions are where one kind of call gives way to another.
    """
    lags: set[int] = set()
    n_end = len(codes)
    pairs = PAIRING * np.roll(codes, 1) + codes
    while True:
        end = pairs[-n_end:]
        values, counts = np.unique(end[-(n_end // 2 + 1) :], return_counts=True)
        n_tried = 0
        for value in values[np.argsort(counts, kind="stable")].tolist():
            positions = np.flatnonzero(end == value)
            if len(positions) > 1:
                lags.update((positions[-1] - positions[:-1][-MAX_LAGS_PER_PAIR:]).tolist())
                n_tried += 1
                if n_tried == (MAX_PAIRS if n_end > SHORTEST_END else SHORTEST_END):
                    break
        if n_end <= SHORTEST_END:
            return sorted(lags)
        n_end = max(SHORTEST_END, n_end // 2)


class StepCutter:
    """Follows one sequence; `window` is the last whole step."""

    def __init__(self) -> None:
        self.period = 0
        """Calls per step; 0 = not known yet."""
        self.n_steps = 0
        """Whole steps seen since the period was found."""
        self._codes = np.zeros(2 * MAX_CALLS, np.int64)
        self._gaps = np.zeros(2 * MAX_CALLS, np.float64)
        self._n = 0
        self._n_held = 0
        """Calls since the last that was not as one period ago."""
        self._n_disturbed = 0
        """Calls since the step was put in question; 0 = it is not."""
        self._n_foreign = 0
        """Calls since then that the step does not have."""
        self._quiet_after = 0
        self._searched_at = 0
        self._due_at = 0
        """When a step that has begun to come again will be complete; 0 = none has."""
        self._step = np.zeros(0, np.int64)
        """Two rounds of the step that was recognised last."""
        self._voted: VotedStep | None = None
        """The step, if it does not repeat call by call."""
        self._n_breaks = 0
        """Times that whatever step was known was disturbed since the last vote."""
        self._is_doubted = False
        """What was voted is no longer the step, and nothing else is known."""
        self._vote_at = self._vote_pause = CALLS_TO_VOTE

    @property
    def codes(self) -> Ints:
        """The history, oldest first."""
        return self._codes[: self._n]

    @property
    def window(self) -> tuple[Ints, Floats]:
        """The last `period` calls and the gaps before them; what was voted has none."""
        if self._voted is not None:
            return self._voted.step, np.zeros(self.period)
        start = self._n - self.period
        return self._codes[start : self._n], self._gaps[start : self._n]

    @property
    def n_alike(self) -> int:
        """Calls up to now that repeat the step known, one by one; 0: the last one did not."""
        return 0 if self._voted is not None else self._n_held

    @property
    def is_over(self) -> bool:
        """What comes now is not the step known, and nothing has repeated yet."""
        if self._voted is not None:
            return self._voted.is_over
        return self._n_foreign >= max(FOREIGN_CALLS, FOREIGN_SHARE * self._n_disturbed)

    def add(self, codes: Ints, gaps_us: Floats) -> bool:
        """Take in calls; True when a (new) period was found."""
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
            self._searched_at -= self._n - keep
            self._due_at = max(0, self._due_at - (self._n - keep))
            self._vote_at -= self._n - keep
            self._n = keep
        before = self._n
        self._codes[before : before + n_new] = codes
        self._gaps[before : before + n_new] = gaps_us
        self._n += n_new
        if self._voted is not None:
            return self._follow(self._voted, codes)
        if self.period:
            start = max(before, self.period)
            expected = self._codes[start - self.period : self._n - self.period]
            if np.array_equal(expected, self._codes[start : self._n]):
                self.n_steps += (self._n_held + n_new) // self.period - self._n_held // self.period
                self._n_held += n_new
                if self._n_held >= self._quiet_after and not self._is_due:
                    return self._settle() if self._n_disturbed else False
            else:
                if not self._n_disturbed:  # what has held for long holds again soon; else it may be part of a step
                    self._quiet_after = self.period
                differs = expected != self._codes[start : self._n]
                self._n_breaks += 1 + int(np.count_nonzero(differs[1:] & ~differs[:-1]))
                if self._n_held:
                    self._n_disturbed = self._n_foreign = 0
                    self._searched_at = before
                self._n_held = 0
                self._n_foreign += n_new - int(np.isin(self._codes[before : self._n], self._step).sum())
            self._n_disturbed += n_new
        found = self._search()
        return self._vote(found) or found

    def _search(self) -> bool:
        if self._n - self._searched_at < self._pause() and not self._is_due:
            return False
        found = self._find()
        if not found.period or (self.period and not self._is_news(found)):
            return False
        return self._take(found.period)

    def _vote(self, has_found: bool) -> bool:
        """Ask several rounds what the step is, unless it is known for sure; True when they say something new."""
        if self._n < self._vote_at - has_found * self._vote_pause * 3 // 4:
            return False
        if self.period and not has_found and self._n_breaks < BREAKS_TO_VOTE:
            return False
        n_end = min(self._n, MAX_CALLS)
        end = self._codes[self._n - n_end : self._n]
        self._vote_pause = max(CALLS_TO_VOTE, int(VOTE_GROWTH * n_end))
        self._n_breaks, self._vote_at = 0, self._n + self._vote_pause
        n_alike = _n_alike(end, self.period) if self.period and not self._is_doubted else 0
        if n_alike >= 2 * self.period and n_end < LONGER * n_alike:
            return False  # what repeats call by call is nearly all there is
        found = find_step(end)
        if found is None or (n_alike and not self._is_better(found, end, n_alike)):
            return False
        is_news = len(found.step) != self.period or not _contains(self._step, found.step)
        self._voted = VotedStep(found.step, found.n_explained)
        self._known(found.step)
        return is_news

    def _is_better(self, voted: Voted, end: Ints, n_alike: int) -> bool:
        """Whether what was voted is to replace a step that repeated call by call.

        Calls must have been lost before the last two rounds, or these are the first of another step; and the vote must
        explain far more than what has repeated up to now, or that must be a part of it, or some rounds that lost a few.
        """
        n_calls = len(voted.step)
        if n_calls < self.period and voted.n_explained < 2 * self.period + n_calls:
            return False
        if n_alike >= 2 * self.period:
            there = walk(end[-n_alike:], voted.step)
            is_rounds = _is_multiple(self.period, n_calls, there.n_breaks) and is_odd_in_rows(voted.step, there)
            if voted.n_explained < (LONGER if is_rounds or not there.n_breaks else MUCH_LONGER) * n_alike:
                return False
            if is_rounds or not there.n_breaks:
                return True
        return voted.n_breaks - walk(end[-2 * n_calls :], voted.step).n_breaks >= BREAKS_BEFORE

    def _follow(self, voted: VotedStep, codes: Ints) -> bool:
        """Go on with a step that was voted for; True when it turns out to be another."""
        voted.add(codes)
        self._n_disturbed += len(codes)
        if not voted.is_over:
            if self._is_due or self._n - self._searched_at >= self._pause():
                better = self._find()
                if better.period and self._is_longer(better, voted):
                    self._voted = None
                    return self._take(better.period)
                if len(voted.step) != self.period or not _contains(self._step, voted.step):
                    self._known(voted.step)
                    return True
            if not voted.is_due:
                return False
            outcome = voted.vote(self.codes)
            if outcome is VoteOutcome.same:
                return False
            if outcome is VoteOutcome.mended:
                self._known(voted.step)
                return True
            if outcome is VoteOutcome.whole:
                self._voted = None
                return self._take(self.period)
        self._voted = None
        self._n_held, self._n_breaks, self._is_doubted = 0, BREAKS_TO_VOTE, True
        self._n_foreign = self._n_disturbed = FOREIGN_CALLS if voted.is_over else 0
        self._searched_at = self._n - self._n_disturbed
        self._vote_at = min(self._vote_at, max(self._n, self._vote_at - self._vote_pause * 3 // 4))
        found = self._search()
        return self._vote(found) or found

    def _is_longer(self, found: Found, voted: VotedStep) -> bool:
        """Whether what repeats call by call is to replace what was voted: no rounds of it, each without a few calls."""
        if found.span < 2 * self.period or found.period < SHARE_LEFT * self.period:
            return False
        if found.period == self.period and _contains(self._step, self._codes[self._n - found.period : self._n]):
            return False
        return voted.vote(self.codes) is VoteOutcome.gone or voted.n_known < LONGER * found.span

    def _known(self, step: Ints) -> None:
        """A step that was voted for is the one from now on."""
        self.period, self._step = len(step), np.tile(step, 2)
        self._n_held, self._n_foreign, self._is_doubted = 0, 0, False

    @property
    def _is_due(self) -> bool:
        return 0 < self._due_at <= self._n

    def _find(self) -> Found:
        is_due, n_end = self._is_due, min(self._n, MAX_CALLS)
        if not self.period and not is_due:
            n_end = min(n_end, _looked_back(self._searched_at, self._n))
        end = self._codes[self._n - n_end : self._n]
        found = find_period(end) if self.period or is_due or _comes_again(end) else Found(0, 0, 0)
        self._searched_at = self._n
        waits = [self._n + found.wait] if found.wait else []
        waits += [self._due_at] if self._due_at and not is_due else []
        self._due_at = min(waits, default=0)
        return found

    def _settle(self) -> bool:
        """The known step holds again, or has held for long enough: search for a longer one that it is part of."""
        self._n_disturbed = self._n_foreign = 0
        return self._take(max(self._find().period, self.period))

    def _take(self, period: int) -> bool:
        """The last `period` calls are a step from now on; False when it is the one known already."""
        step = self._codes[self._n - period : self._n]
        if period == self.period and _contains(self._step, step):
            return False
        self.period, self._is_doubted = period, False
        self._step = np.tile(step, 2)
        self._n_held, self._n_disturbed, self._n_foreign = period, period, 0
        self._quiet_after = period + max(STEPS_TO_TRUST * period, CALLS_TO_TRUST)
        return True

    def _pause(self) -> float:
        """Calls to wait for between two searches; many, if nothing has repeated in a long time."""
        n_searched = self._n_disturbed if self.period else min(self._searched_at, SHORTEST_END)
        return SEARCH_GROWTH * n_searched if n_searched < MAX_CALLS else MAX_CALLS / 2

    def _is_news(self, found: Found) -> bool:
        """Parts of the old step repeat as long as it lasts: they replace it only when they go on for longer.

        Two rounds of a part that the old step does not have in a row are news, but for a step that lost a few calls:
        it repeats once beside the whole one before.
        """
        if found.period >= self.period or found.span >= 2 * self.period + found.period:
            return True
        n_rounds = 2 if found.period <= SHARE_LEFT * self.period else 1
        return not _contains(self._step, self._codes[self._n - n_rounds * found.period : self._n])


def _n_alike(codes: Ints, period: int) -> int:
    """Calls at the end that repeat with a period, the first round included."""
    differs = codes[period:][::-1] != codes[:-period][::-1]
    return period + (int(differs.argmax()) if differs.any() else len(differs))


def _is_multiple(period: int, n_calls: int, n_lost: int) -> bool:
    """Whether `period` is some rounds of `n_calls`, but for up to `n_lost` calls."""
    n_rounds = round(period / n_calls)
    return 1 < n_rounds < MAX_STEPS and 0 < abs(period - n_rounds * n_calls) <= n_lost


def _comes_again(codes: Ints) -> bool:
    """Whether the last two calls stand in `codes` before: if not, no search is worth its time."""
    return bool(((codes[:-2] == codes[-2]) & (codes[1:-1] == codes[-1])).any()) if len(codes) > 2 else False


def _looked_back(before: int, now: int) -> int:
    """Calls to search while no step is known: every second time twice as far back as the times between.

    So a short step shows at once behind much that never repeated, and a long one when a fifth of it is new.
    """
    pause = int(SEARCH_GROWTH * SHORTEST_END)
    return SHORTEST_END << (before // pause ^ now // pause).bit_length()


def _contains(codes: Ints, part: Ints) -> bool:
    """Whether `part` stands in `codes` as it is."""
    for start in np.flatnonzero(codes[: len(codes) - len(part) + 1] == part[0]).tolist():
        if np.array_equal(codes[start : start + len(part)], part):
            return True
    return False
