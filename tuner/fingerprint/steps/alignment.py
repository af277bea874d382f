"""Finds the step of a sequence with lost calls: its rounds differ, so they are aligned and the majority decides.

Rounds are aligned with the last one by Myers' greedy algorithm (An O(ND) difference algorithm, 1986), backwards from
the end of the sequence. A call belongs to the step if most rounds have it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from .anatomy import Ints, period_of

MIN_ROUNDS: Final = 3
"""Least rounds that vote: if only two differ, neither is known to be right."""
ODD_SHARE: Final = 0.12
ODD_CALLS: Final = 6
"""Most skipped calls in a stretch: ODD_SHARE of it plus ODD_CALLS."""
CHUNK: Final = 256
FEW_ROUNDS: Final = 7
MOST: Final = 0.6
"""From FEW_ROUNDS on, a call must be in this share of rounds: a call of every second round belongs to a step of two."""
SAME_ODDITY: Final = 3
DEVIATIONS: Final = 4.0
"""Differences at one position show another step, not lost calls, if there are this many of them, and DEVIATIONS
standard deviations more than by chance."""
PAIRING: Final = 0x9E3779B97F4A7C1
"""An odd, large factor that turns two consecutive calls into one number, rarely equal for different pairs."""
MAX_CODES: Final = 5
MAX_POSITIONS: Final = 24
"""Most rare calls and pairs, and most positions of each, that a search considers."""
N_SAMPLES: Final = 48
DRIFT: Final = 3
MIN_SHARE: Final = 0.7
GOOD_SHARE: Final = 0.92
"""A distance is tried if MIN_SHARE of N_SAMPLES calls come again at it, DRIFT calls more or less; it is tried first if
GOOD_SHARE do."""
MAX_LAGS: Final = 32
MAX_VOTES: Final = 3
"""Most distances tried for one end, and most votes for each."""
NEXT_END: Final = 3
"""A step must explain 1/NEXT_END of the searched end; if none does, an end of 1/NEXT_END of its length is searched."""
NEAR: Final = 0.02
"""Relative difference between lengths that count as equal."""
SHORTEST_END: Final = 18
MAX_ROUNDS: Final = 6
"""Most rounds that vote again on a known step, so that constant losses cost little."""
EXPLAINED: Final = 0.75
"""Least share of these rounds that the step must explain; below it the step has changed."""


class Consensus(NamedTuple):
    """A step that most rounds have."""

    step: Ints
    n_explained: int
    """Calls of the sequence that the step explains, back from its end."""
    n_breaks: int
    """Stretches among these in which calls are missing or odd."""


class Alignment(NamedTuple):
    """Rounds of a step aligned with a sequence, both backwards from their ends."""

    n_explained: int
    """Calls of the sequence that the step explains, back from its end."""
    n_odd: int
    """Skipped calls in either of them."""
    n_breaks: int
    """Stretches of skipped calls."""
    n_passed: int
    """Aligned calls of the step in the last, incomplete round."""
    n_seen: Ints
    """Aligned rounds, by position in the step, backwards."""
    n_kept: Ints
    """Rounds that have the call, by position in the step."""
    inserted: Counter[tuple[int, int, int]]
    """How often a call was found before a position: (position, number there, code)."""


def find_consensus(codes: Ints) -> Consensus | None:
    """The step that explains the longest end of `codes`, except odd calls; None if there is none."""
    n_end = len(codes)
    while n_end >= SHORTEST_END:
        found = _explains(codes[-n_end:])
        if found is not None:
            return found
        n_end //= NEXT_END
    return None


def _explains(codes: Ints) -> Consensus | None:
    """The shortest step that explains most of `codes`."""
    for lag in _lags(codes)[:MAX_LAGS]:
        step = codes[-lag:]
        found = align(codes[-(MIN_ROUNDS + 1) * lag :], step)
        if found.n_explained < MIN_ROUNDS * lag * (1 - NEAR):
            continue
        for _ in range(MAX_VOTES):
            corrected = _voted(step, found)
            if len(corrected) < 2:
                break
            is_settled, step = np.array_equal(corrected, step), corrected
            found = align(codes, step)
            if is_settled:
                break
        least = max(MIN_ROUNDS * len(step) * (1 - NEAR), len(codes) / NEXT_END)
        if len(corrected) < 2 or found.n_explained < least:
            continue
        end = codes[-found.n_explained :]
        _, n_foreign = np.unique(end[~np.isin(end, step)], return_counts=True)
        if not (n_foreign > 1).any() and not _is_odd_again(step, found):  # all repeated calls are part of the step
            return Consensus(step[: period_of(step)], found.n_explained, found.n_breaks)
    return None


def voted_again(step: Ints, history: Ints, n_new: int) -> Ints | None:
    """The step by a new vote of the last rounds of `history`; None if they no longer have it.

    The given `step` is the last round before the last `n_new` calls. `history` has the oldest call first.
    """
    forward = align(history[len(history) - n_new :][::-1], step[::-1])
    step = np.roll(step, -forward.n_passed)
    codes = history[-MAX_ROUNDS * len(step) :]
    found = align(codes, step)
    if forward.n_explained < n_new or found.n_explained < EXPLAINED * len(codes) or _is_odd_again(step, found):
        return None
    corrected = _voted(step, found)
    return corrected[: period_of(corrected)]


def align(codes: Ints, step: Ints) -> Alignment:
    """Align `step`, round after round, with `codes` from the end of both, as far back as it explains them."""
    past, back, n = codes[::-1], step[::-1], len(step)
    n_seen, n_kept = np.zeros(n, np.int64), np.zeros(n, np.int64)
    inserted: Counter[tuple[int, int, int]] = Counter()
    at = n_odd = n_breaks = n_back = 0
    rounds = np.resize(back, len(past))
    while at < len(past):
        n_whole = _n_same(past[at:], rounds) // n
        n_seen, n_kept, at = n_seen + n_whole, n_kept + n_whole, at + n_whole * n
        edits, passed, n_back = _edits(past[at : at + n + int(ODD_SHARE * n) + ODD_CALLS], back)
        n_seen[:n_back] += 1
        n_kept[:n_back] += 1
        n_extra: Counter[int] = Counter()
        for in_past, in_back, is_extra in edits:
            if is_extra:
                inserted[in_back % n, n_extra[in_back], int(past[at + in_past])] += 1
                n_extra[in_back] += 1
            else:
                n_kept[in_back] -= 1
        at, n_odd = at + passed, n_odd + len(edits)
        places = [-2, *(in_past + in_back for in_past, in_back, _ in edits)]
        n_breaks += sum(place - before > 1 for before, place in pairwise(places))
        if n_back < n or 2 * passed < n:
            break
    return Alignment(at, n_odd, n_breaks, n_back, n_seen, n_kept, inserted)


def _edits(one: Ints, other: Ints) -> tuple[list[tuple[int, int, bool]], int, int]:
    """The calls to skip so that `one` equals `other`, up to the end of either or the limit of skipped calls.

    Returns each skipped call as (position in one, position in other, whether it is in one), and both aligned lengths.
    """
    reached: dict[int, int] = {1: 0}
    """By diagonal, the aligned length of `one` with this many skipped calls."""
    history: list[dict[int, int]] = []
    for n_skipped in range(int(ODD_SHARE * len(one)) + ODD_CALLS + 1):
        now: dict[int, int] = {}
        for diagonal in range(-n_skipped, n_skipped + 1, 2):
            below, above = reached.get(diagonal - 1, -1), reached.get(diagonal + 1, -1)
            at = above if above > below or diagonal == -n_skipped else below + 1
            at += _n_same(one[at:], other[at - diagonal :])
            now[diagonal] = at
            if at >= len(one) or at - diagonal >= len(other):
                history.append(now)
                return _traced(history, diagonal)
        history.append(now)
        reached = now
        best = max(2 * at - diagonal for diagonal, at in now.items()) // 2
        if n_skipped > ODD_SHARE * best + ODD_CALLS:
            break
    return _traced(history, max(reached, key=lambda diagonal: 2 * reached[diagonal] - diagonal))


def _traced(history: list[dict[int, int]], diagonal: int) -> tuple[list[tuple[int, int, bool]], int, int]:
    """The skipped calls on the path to the last diagonal; see `_edits`."""
    at = history[-1][diagonal]
    n_one, n_other = at, at - diagonal
    edits = []
    for n_skipped in range(len(history) - 1, 0, -1):
        before = history[n_skipped - 1]
        below, above = before.get(diagonal - 1, -1), before.get(diagonal + 1, -1)
        is_extra = not (above > below or diagonal == -n_skipped)
        diagonal += -1 if is_extra else 1
        at = before[diagonal]
        edits.append((at, at - diagonal, is_extra))
    return edits[::-1], n_one, n_other


def _n_same(one: Ints, other: Ints) -> int:
    """Number of equal calls before the first difference."""
    n, at = min(len(one), len(other)), 0
    while at < n:
        end = min(n, at + CHUNK)
        differs = one[at:end] != other[at:end]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at = end
    return n


def _voted(step: Ints, found: Alignment) -> Ints:
    """The step by majority of the rounds."""
    enough = np.where(found.n_seen > FEW_ROUNDS, MOST, 0.5) * found.n_seen
    more: dict[int, list[int]] = {}
    for (position, _, code), count in sorted(found.inserted.items()):
        if count >= enough[position]:
            more.setdefault(position, []).append(code)
    backwards: list[int] = []
    for position, code in enumerate(step[::-1].tolist()):
        backwards += more.get(position, [])
        if found.n_kept[position] >= enough[position]:
            backwards.append(code)
    return np.array(backwards[::-1], np.int64)


def _is_odd_again(step: Ints, found: Alignment) -> bool:
    """Whether calls are missing, or odd, at one position again and again.

    A call lost anywhere in a stretch of equal or alternating calls seems to be missing at its end.
    """
    odd = found.n_seen - found.n_kept
    for (position, _, _), count in found.inserted.items():
        odd[position] = max(odd[position], count)
    expected = found.n_odd / len(step) * _rows(step[::-1])
    return bool(((odd >= SAME_ODDITY) & (odd >= expected + DEVIATIONS * np.sqrt(expected))).any())


def _rows(past: Ints) -> Ints:
    """By position, the number of calls in its stretch of equal or alternating calls."""
    goes_on = (past == np.roll(past, 1)) | (past == np.roll(past, 2))
    if goes_on.all():
        return np.full(len(past), len(past))
    begin = int((~goes_on).argmax())
    rows = np.cumsum(~np.roll(goes_on, -begin)) - 1
    long: Ints = np.roll(np.bincount(rows)[rows], begin)
    for _ in range(2):
        long = np.maximum.reduce([long, np.roll(long, 1), np.roll(long, -1)])
    return long


def distances(codes: Ints, n_least: int, n_codes: int) -> set[int]:
    """Distances between positions of codes that are rarest lately and come at least `n_least` times in all."""
    known, n_in_all = np.unique(codes, return_counts=True)
    values, n_lately = np.unique(codes[-(len(codes) // 2 + 1) :], return_counts=True)
    again = np.flatnonzero(n_in_all[np.searchsorted(known, values)] >= n_least)
    found: set[int] = set()
    for value in values[again[np.argsort(n_lately[again], kind="stable")][:n_codes]].tolist():
        positions = np.flatnonzero(codes == value)
        found.update((positions[-1] - positions[:-1][-MAX_POSITIONS:]).tolist())
    return found


def _lags(codes: Ints) -> list[int]:
    """Approximate distances between rounds, shortest first: most other calls also come again at them."""
    n = len(codes)
    pairs = paired(codes)
    found = distances(codes, MIN_ROUNDS, MAX_CODES) | distances(pairs, MIN_ROUNDS, MAX_CODES)
    lags = np.array(sorted(lag for lag in found if 1 < lag <= n // MIN_ROUNDS), np.int64)
    if not len(lags):
        return []
    positions = np.linspace(n - n // MIN_ROUNDS + DRIFT, n - 1 - DRIFT, N_SAMPLES).astype(np.int64)
    before = pairs[positions[None, :, None] - lags[:, None, None] + np.arange(-DRIFT, DRIFT + 1)[None, None, :]]
    shares = (before == pairs[positions][None, :, None]).any(axis=2).mean(axis=1)
    return [*lags[shares >= GOOD_SHARE].tolist(), *lags[(shares >= MIN_SHARE) & (shares < GOOD_SHARE)].tolist()]


def paired(codes: Ints) -> Ints:
    """One number for each call and the one before it."""
    pairs: Ints = PAIRING * np.roll(codes, 1) + codes
    return pairs
