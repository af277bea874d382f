"""The step of a sequence that records are lost from: nothing repeats call by call, but most of it does.

A window of the end is laid against what comes before it, round after round. Where they differ, the shortest stretch
that one of them has too much of is skipped. Then each of the window's calls is put to the vote of all rounds, and so
is what the window lacks: after three rounds a call lost from one of them, or out of order in it, is outvoted.
"""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MIN_ROUNDS: Final = 3
"""Least rounds that vote: two that differ do not show which is right."""
BAND: Final = 24
"""Calls that may be skipped in a row."""
MATCHING: Final = 6
"""Calls that must be the same again behind what was skipped."""
LOOKAHEAD: Final = 96
"""Calls in which the ways to go on are compared."""
MAX_WAYS: Final = 5
PRICE: Final = 4
"""Calls that must be the same for one that is skipped: where calls alternate, many ways look right at first."""
CHUNK: Final = 256
ODD_SHARE: Final = 0.12
ODD_CALLS: Final = 6
"""Most calls skipped in a stretch: ODD_SHARE of it, and ODD_CALLS more."""
FEW_ROUNDS: Final = 7
MOST: Final = 0.6
"""From FEW_ROUNDS on, this share of rounds must have a call: one of every second round belongs to a step of two."""
SAME_ODDITY: Final = 3
DEVIATIONS: Final = 4.0
"""Differences at one position are no lost calls, but another step, if there are this many of them, and DEVIATIONS
standard deviations more than losses by chance would make."""
LONG_ROW: Final = 8
MAX_POSITIONS: Final = 24
MAX_CODES: Final = 5
"""How many positions of a call, and how many of the rarest calls and pairs, are looked at."""
PAIRING: Final = 0x9E3779B97F4A7C1
"""An odd, large factor that makes one number of two calls in a row; other pairs hardly ever get an equal one."""
N_POSITIONS: Final = 48
DRIFT: Final = 3
MIN_SHARE: Final = 0.7
GOOD_SHARE: Final = 0.92
"""A distance is tried if MIN_SHARE of N_POSITIONS calls come again at it, DRIFT calls more or less; first, if
GOOD_SHARE do."""
NEXT_END: Final = 3
"""A step must explain 1/NEXT_END of the end looked at; else an end of 1/NEXT_END of its length is tried."""
MAX_WALKS: Final = 32
MAX_VOTES: Final = 3
"""Distances tried for one end; rounds of voting for each."""
NEAR: Final = 0.02
"""Relative difference between distances that may be one."""

_COSTS: Final = np.add.outer(np.arange(BAND), np.arange(BAND))


class Walk(NamedTuple):
    """How far back a step explains a sequence, and where not."""

    n_explained: int
    """Calls of the sequence, from its end on."""
    n_odd: int
    """Calls skipped there."""
    n_breaks: int
    """Positions where calls were skipped."""
    n_passed: int
    """Calls of the step, round after round."""
    n_seen: Ints
    """By position in the step: rounds."""
    n_kept: Ints
    """By position in the step: rounds that have the call."""
    instead: Counter[tuple[int, tuple[int, ...]]]
    """What was found before a position, and how often."""


class Voted(NamedTuple):
    """A step that most rounds agree on."""

    step: Ints
    n_explained: int
    """Calls of the sequence, from its end on."""
    n_breaks: int
    """Positions there where calls are missing or odd."""


def walk(codes: Ints, step: Ints) -> Walk:
    """Lay `step`, round after round, against `codes` from the end of both, back to where it explains them no more."""
    past, n = codes[::-1], len(step)
    rounds = np.resize(step[::-1], int(len(past) * (1 + ODD_SHARE)) + ODD_CALLS + n + CHUNK)
    same = np.zeros(len(rounds), np.bool_)
    instead: Counter[tuple[int, tuple[int, ...]]] = Counter()
    at = position = n_odd = n_breaks = 0
    end = end_position = odd_at_end = breaks_at_end = 0
    while at < len(past):
        some = past[at : at + CHUNK]
        n_same = _n_same(some, rounds[position : position + len(some)])
        same[position : position + n_same] = True
        at, position = at + n_same, position + n_same
        if n_odd <= ODD_SHARE * at + ODD_CALLS:
            end, end_position, odd_at_end, breaks_at_end = at, position, n_odd, n_breaks
        elif at - end > BAND:
            break
        if n_same == len(some):
            continue
        skipped = _skipped(past[at : at + LOOKAHEAD], rounds[position : position + LOOKAHEAD])
        if skipped is None:
            break
        n_more, n_less = skipped
        if n_more:
            instead[(position + n_less) % n, tuple(past[at : at + n_more].tolist())] += 1
        at, position = at + n_more, position + n_less
        n_odd, n_breaks = n_odd + max(skipped), n_breaks + 1
    positions = np.arange(end_position) % n
    return Walk(
        end, odd_at_end, breaks_at_end, end_position, np.bincount(positions, minlength=n)[::-1],
        np.bincount(positions[same[:end_position]], minlength=n)[::-1], instead,
    )  # fmt: skip


def _n_same(one: Ints, other: Ints) -> int:
    """Calls until the first difference."""
    differs = one != other
    first = int(differs.argmax())
    return first if differs[first] else len(one)


def _skipped(one: Ints, other: Ints) -> tuple[int, int] | None:
    """What to leave out of both for them to be the same again: few calls, and for long."""
    n, m = min(BAND, len(one) - MATCHING + 1), min(BAND, len(other) - MATCHING + 1)
    if n <= 0 or m <= 0:
        return None
    same = one[: n + MATCHING - 1, None] == other[None, : m + MATCHING - 1]
    again = same[:n, :m]
    for ahead in range(1, MATCHING):
        again = again & same[ahead : ahead + n, ahead : ahead + m]
    positions = np.flatnonzero(again)
    if not len(positions):
        return None
    costs = _COSTS[positions // m, positions % m]
    best, most = (0, 0), -LOOKAHEAD * BAND
    for index in np.argsort(costs, kind="stable")[:MAX_WAYS].tolist():
        n_more, n_less = divmod(int(positions[index]), m)
        length = min(len(one) - n_more, len(other) - n_less)
        gain = _n_same(one[n_more : n_more + length], other[n_less : n_less + length]) - PRICE * int(costs[index])
        if gain > most:
            best, most = (n_more, n_less), gain
    return best


def voted(step: Ints, walked: Walk) -> Ints:
    """The step as most rounds have it."""
    n = len(step)
    enough = np.where(walked.n_seen > FEW_ROUNDS, MOST, 0.5) * walked.n_seen
    stays = walked.n_kept >= enough
    more: dict[int, list[int]] = {}
    for position in {position for position, _ in walked.instead}:
        found = {codes: count for (at, codes), count in walked.instead.items() if at == position}
        more[position] = _common_beginning(found, float(enough[n - 1 - position]))
    parts: list[Ints] = []
    for position in range(n):  # backwards, as the walk went
        if more.get(position):
            parts.append(np.array(more[position], np.int64))
        if stays[n - 1 - position]:
            parts.append(step[n - 1 - position : n - position])
    mended: Ints = np.concatenate([*parts, step[:0]])[::-1]
    return mended


def _common_beginning(found: dict[tuple[int, ...], int], n_enough: float) -> list[int]:
    """What enough rounds have at one position: in a row of equal calls, some lack more of them than others."""
    begin: list[int] = []
    while True:
        following: Counter[int] = Counter()
        for codes, count in found.items():
            if len(codes) > len(begin) and list(codes[: len(begin)]) == begin:
                following[codes[len(begin)]] += count
        code, count = max(following.items(), key=itemgetter(1), default=(0, 0))
        if not count or count < n_enough:
            return begin
        begin.append(code)


def find_step(codes: Ints) -> Voted | None:
    """The step that explains the longest end of `codes` but for odd calls; None if nothing does."""
    n_end = len(codes)
    while n_end >= MIN_ROUNDS * MATCHING:
        found = _explains(codes[-n_end:])
        if found is not None:
            return found
        n_end //= NEXT_END
    return None


def _explains(codes: Ints) -> Voted | None:
    """The shortest step that explains most of `codes`."""
    lags = _lags(codes)
    for _ in range(MAX_WALKS):
        if not lags:
            break
        lag = lags.pop(0)
        step = codes[-lag:]
        walked = walk(codes[-(MIN_ROUNDS + 1) * lag :], step)
        if walked.n_explained < MIN_ROUNDS * lag * (1 - NEAR):
            continue
        for _ in range(MAX_VOTES):
            step = voted(step, walked)
            if len(step) < 2:
                break
            walked = walk(codes, step)
        least = max(MIN_ROUNDS * len(step) * (1 - NEAR), len(codes) / NEXT_END)
        if len(step) < 2 or walked.n_explained < least:
            continue
        end = codes[-walked.n_explained :]
        foreign = foreign_positions(end, step)
        if len(foreign):
            # A step has all that comes again, so it is as long as from one such call to another.
            apart = np.unique(np.subtract.outer(foreign, foreign))
            lags = [one for one in lags if np.abs(apart - one).min() <= max(2, NEAR * one)]
        elif not is_odd_again(step, walked):
            return Voted(once(step), walked.n_explained, walked.n_breaks)
    return None


def foreign_positions(codes: Ints, step: Ints) -> Ints:
    """Where a call stands that comes again but not in the step; empty if there is none."""
    foreign, counts = np.unique(codes[~np.isin(codes, step)], return_counts=True)
    return np.flatnonzero(codes == foreign[counts > 1][0]) if (counts > 1).any() else np.zeros(0, np.int64)


def is_odd_again(step: Ints, walked: Walk) -> bool:
    """Whether something is missing, or too much, at one position time and again.

    What is lost anywhere in a row of calls that are equal, or alternate, is missed at its end.
    """
    odd = _odd(walked)
    expected = walked.n_odd / len(step) * _rows(step)
    return bool(((odd >= SAME_ODDITY) & (odd >= expected + DEVIATIONS * np.sqrt(expected))).any())


def is_odd_in_rows(step: Ints, walked: Walk) -> bool:
    """Whether all that is odd is in long rows: there, two rounds that lost different calls are the same."""
    return bool((_rows(step)[_odd(walked) > 0] >= LONG_ROW).all())


def _odd(walked: Walk) -> Ints:
    """By position, the last first: rounds that miss the call, or have something before it."""
    odd: Ints = (walked.n_seen - walked.n_kept)[::-1].copy()
    for (position, _), count in walked.instead.items():
        odd[position] = max(odd[position], count)
    return odd


def _rows(step: Ints) -> Ints:
    """By position, the last first: calls in the row that it is in or next to."""
    past = step[::-1]
    goes_on = (past == np.roll(past, 1)) | (past == np.roll(past, 2))
    if goes_on.all():
        return np.full(len(step), len(step))
    begin = int((~goes_on).argmax())
    rows = np.cumsum(~np.roll(goes_on, -begin)) - 1
    long: Ints = np.roll(np.bincount(rows)[rows], begin)
    for _ in range(2):
        long = np.maximum.reduce([long, np.roll(long, 1), np.roll(long, -1)])
    return long


def once(step: Ints) -> Ints:
    """One of several equal parts."""
    n = len(step)
    return next((step[:p] for p in range(1, n) if n % p == 0 and np.array_equal(step[p:], step[:-p])), step)


def _lags(codes: Ints) -> list[int]:
    """About how far apart rounds may be, shortest first: distances between the calls that are rarest, yet come again.

    Of these, the ones at which most other calls come again, too.
    """
    n = len(codes)
    pairs = PAIRING * np.roll(codes, 1) + codes
    found: set[int] = set()
    for ones in (codes, pairs):
        values, counts = np.unique(ones, return_counts=True)
        again = np.flatnonzero(counts >= MIN_ROUNDS)
        for value in values[again[np.argsort(counts[again], kind="stable")][:MAX_CODES]].tolist():
            positions = np.flatnonzero(ones == value)
            found.update((positions[-1] - positions[:-1][-MAX_POSITIONS:]).tolist())
    lags = np.array(sorted(lag for lag in found if 1 < lag <= n // MIN_ROUNDS), np.int64)
    if not len(lags):
        return []
    positions = np.linspace(n - n // MIN_ROUNDS + DRIFT, n - 1 - DRIFT, N_POSITIONS).astype(np.int64)
    before = pairs[positions[None, :, None] - lags[:, None, None] + np.arange(-DRIFT, DRIFT + 1)[None, None, :]]
    shares = (before == pairs[positions][None, :, None]).any(axis=2).mean(axis=1)
    return [*lags[shares >= GOOD_SHARE].tolist(), *lags[(shares >= MIN_SHARE) & (shares < GOOD_SHARE)].tolist()]
