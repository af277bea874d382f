"""A step as numbers: its collectives, their relative sizes, their order and their gaps.

No feature depends on the model's scale or on where the step was cut. There are two views. A *summary* describes the
whole step, its rest and its round (anatomy.py). *Frames* are at most N_FRAMES equal stretches of rest and round.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from ..steps.anatomy import (
    GATHER,
    N_ROLES,
    REDUCE,
    ROOTED,
    SCATTER,
    TINY,
    Floats,
    Ints,
    Rounds,
    Step,
    most_between,
    period_of,
)

FEATURES_VERSION: Final = 6
N_FRAMES: Final = 16
N_SUMMARY: Final = 259
N_FRAME: Final = 16
NEARLY: Final = 0.6
MAX_ROUNDS: Final = 16
SAME_PIECE: Final = 0.005
"""Relative difference in size that padding may make between a gathered piece and the same piece sent."""
FORWARD_STRETCH: Final = 1.75
"""Least ratio of a long stretch to the usual one: two blocks' forward before a block's backward is twice as long."""
FINEST: Final = 1e-5
ROUNDS_SHARE: Final = 0.97
"""Share of bytes that must come m times to count as m rounds; it is below 1 since calls get lost."""


def summary(step: Step) -> Floats:
    """The whole step, its rest and the rest's round in N_SUMMARY numbers."""
    tiny_bytes = int(step.bytes[step.roles == TINY].sum())
    whole = _summary(step, tiny_bytes)
    rest = whole if step.rest is step else _summary(step.rest, tiny_bytes)
    rounds = step.rest.rounds
    gathered = [int(one.bytes[one.roles == GATHER].sum()) for one in (step.rest, rounds.unit)]
    left_over = tiny_bytes + max(0, gathered[0] - rounds.n * gathered[1])
    once = rest if rounds.unit is step.rest else _summary(rounds.unit, left_over)
    activations = _profile(step.activations.rounds) if step.activations is not None else (0.0,) * 5
    passes = micro_steps_shown(step)
    shown = (float(np.log2(passes)) / 4.0, float(passes > 1)) if passes else (-0.25, 0.0)
    flags = (float(np.log2(1 + step.n_flags)) / 4.0,)
    return np.concatenate([whole, rest, once, _profile(rounds), activations, shown, flags])


def _profile(rounds: Rounds) -> tuple[float, ...]:
    """Rounds (log2), their coverage, novelty and share, and long stretches between gathers within one (P_a)."""
    return (
        float(np.log2(rounds.n)) / 4.0,
        rounds.coverage,
        rounds.novelty,
        rounds.share,
        _long_stretches(rounds.unit.roles == GATHER),
    )


def _summary(step: Step, left_over: int) -> Floats:
    """Numbers of one step; `left_over` counts bytes outside its gathers that may be parameters gathered after it."""
    roles, n_bytes, n = step.roles, step.bytes, len(step.roles)
    counts = np.bincount(roles, minlength=N_ROLES).astype(np.float64)
    volume = np.bincount(roles, n_bytes, minlength=N_ROLES)
    large = max(1.0, n - counts[TINY])
    fewest = int(np.unique(n_bytes * N_ROLES + roles, return_counts=True)[1].min())
    moved = max(1.0, float(volume[:TINY].sum()))
    gathers, scatters, reduces = (Sizes(n_bytes[roles == role]) for role in (GATHER, SCATTER, REDUCE))
    sent = volume[SCATTER] + volume[REDUCE]
    sends = np.flatnonzero((roles == SCATTER) | (roles == REDUCE))
    is_gather = roles == GATHER
    # Gathers between the first and the last reduction of the rotated step belong to its backward part.
    bytes_between = float(n_bytes[sends[0] : sends[-1]][is_gather[sends[0] : sends[-1]]].sum()) if len(sends) else 0.0
    before = int(np.count_nonzero(is_gather[: sends[0]])) if len(sends) else 0
    sizes_sent = Sizes(n_bytes[sends])
    ahead, *passes = _gathered_between(roles, n_bytes, sends)
    gaps = np.sort(step.gaps)[::-1]
    reach = float(step.gaps[sends[0] + 1 : sends[-1] + 1].sum()) if len(sends) else 0.0
    return np.array(
        [
            np.log1p(n) / 8.0,
            *(counts / n),
            *(volume[:TINY] / moved),
            np.log1p(counts[TINY]) / 4.0,
            float(counts[TINY] > 0),
            float(np.log2(fewest)) / 4.0,
            _log_ratio(volume[GATHER], sent),
            _log_ratio(volume[SCATTER], volume[REDUCE]),
            _log_ratio(counts[GATHER], counts[SCATTER] + counts[REDUCE]),
            *gathers.profile(),
            *scatters.profile(),
            *reduces.profile(),
            gathers.share_in(scatters),
            gathers.share_in(reduces),
            scatters.share_in(gathers),
            reduces.modal_bytes / max(1.0, float(n_bytes.max())),
            float(reduces.modal_count) / large,
            bytes_between / max(1.0, float(volume[GATHER])),
            step.longest_stretch / n,
            _log_ratio(float(reduces.modal_count), counts[SCATTER] + counts[REDUCE] - reduces.modal_count),
            _octaves(rounds(n_bytes[(roles == SCATTER) | (roles == REDUCE)])),
            _octaves(rounds(n_bytes[is_gather])),
            _octaves(rounds(n_bytes[roles == ROOTED])),
            _long_stretches(is_gather),
            *gathers.repetition(),
            *sizes_sent.repetition(),
            _log_ratio(float(gathers.values.sum()), float(sizes_sent.values.sum())),
            _log_ratio(volume[GATHER] / gathers.n_rounds, sent / sizes_sent.n_rounds),
            _log_ratio(ahead, sent / sizes_sent.n_rounds),
            _log_ratio(float(gathers.n_rounds), float(sizes_sent.n_rounds)),
            _log_ratio(volume[GATHER] - ahead, ahead),
            _log_ratio(volume[ROOTED], sent),
            _log_ratio(sizes_sent.largest_bytes, gathers.largest_bytes),
            *passes,
            *same_pieces(gathers, sizes_sent),
            *_balance(float(volume[GATHER] + volume[ROOTED]), float(sent), gathers.n_rounds, sizes_sent.n_rounds),
            *_once_or_twice(n_bytes[is_gather], float(sent), left_over, before),
            *_modal(roles, n_bytes, reduces),
            float(step.has_gaps),
            float(gaps[0]) if n > 1 else 0.0,
            float(gaps[1]) if n > 1 else 0.0,
            reach,
        ]
    )


def frames(step: Step) -> Floats:
    """The rest, then its round, in order, as at most N_FRAMES stretches each, shape [n_frames, N_FRAME]."""
    return np.concatenate([_frames(step.rest, 0.0), _frames(step.rest.rounds.unit, 1.0)])


def _frames(step: Step, part: float) -> Floats:
    roles, n_bytes, n = step.roles, step.bytes, len(step.roles)
    n_frames = min(n, N_FRAMES)
    frame = np.arange(n) * n_frames // n
    long = np.bincount(frame, minlength=n_frames).astype(np.float64)
    table = np.zeros((n_frames, N_FRAME))
    by_role = np.bincount(frame * N_ROLES + roles, minlength=n_frames * N_ROLES).reshape(n_frames, N_ROLES)
    volume = np.bincount(frame * N_ROLES + roles, n_bytes, minlength=n_frames * N_ROLES).reshape(n_frames, N_ROLES)
    table[:, :N_ROLES] = by_role / long[:, None]
    table[:, N_ROLES : 2 * N_ROLES - 1] = np.sqrt(volume[:, :TINY] / max(1.0, float(volume.max())))
    changes = np.r_[roles[1:] != roles[:-1], False]
    table[:, 9] = np.bincount(frame, changes, minlength=n_frames) / long
    _, inverse, counts = np.unique(n_bytes, return_inverse=True, return_counts=True)
    table[:, 10] = np.bincount(frame, inverse == int(counts.argmax()), minlength=n_frames) / long
    in_reduces = np.isin(n_bytes, n_bytes[roles == REDUCE]) & (roles == GATHER)
    table[:, 11] = np.bincount(frame, in_reduces, minlength=n_frames) / long
    table[:, 12] = np.bincount(frame, step.gaps, minlength=n_frames)
    table[:, 13] = float(step.has_gaps)
    codes = n_bytes * N_ROLES + roles
    seen_before = np.ones(n)
    seen_before[np.unique(codes, return_index=True)[1]] = 0.0
    table[:, 14] = np.bincount(frame, seen_before, minlength=n_frames) / long
    table[:, 15] = part
    return table


class Sizes:
    """The message sizes of one role within a step."""

    def __init__(self, n_bytes: Ints) -> None:
        self.n = len(n_bytes)
        self.values, self.counts = np.unique(n_bytes, return_counts=True)
        self.modal_count = int(self.counts.max()) if self.n else 0
        self.modal_bytes = int(self.values[self.counts.argmax()]) if self.n else 0

    def profile(self) -> tuple[float, float, float, float]:
        """Counts of the rarest, the largest and the most frequent size (log2), and the share of distinct sizes."""
        if not self.n:
            return 0.0, 0.0, 0.0, 0.0
        fewest, most = float(self.counts.min()), float(self.modal_count)
        return np.log2(fewest) / 2.0, np.log2(self.counts[-1]) / 3.0, np.log2(most) / 5.0, len(self.values) / self.n

    @property
    def largest_bytes(self) -> float:
        """The largest size. A piece that is gathered whole is also sent whole, perhaps in another type, unless cut."""
        return float(self.values[-1]) if self.n else 0.0

    @cached_property
    def n_rounds(self) -> int:
        """The largest m for which nearly all bytes have sizes that come m, 2 m, 3 m, ... times."""
        n_bytes = self.values * self.counts
        enough = ROUNDS_SHARE * float(n_bytes.sum())
        return (
            next((m for m in range(MAX_ROUNDS, 1, -1) if float(n_bytes[self.counts % m == 0].sum()) >= enough), 1)
            if self.n
            else 1
        )

    def repetition(self) -> tuple[float, float, float, float]:
        """Rounds (log2), shares of bytes whose sizes come more than once and in pairs, mean count (log2)."""
        if not self.n:
            return 0.0, 0.0, 0.0, 0.0
        weights = self.values * self.counts / float((self.values * self.counts).sum())
        return (
            float(np.log2(self.n_rounds)) / 4.0,
            float(weights[self.counts > 1].sum()),
            float(weights[self.counts % 2 == 0].sum()),
            float((weights * np.log2(self.counts)).sum()) / 4.0,
        )

    def share_in(self, other: Sizes) -> float:
        """Share of calls whose size also occurs in the other role."""
        if not self.n or not other.n:
            return 0.0
        return float(self.counts[np.isin(self.values, other.values)].sum()) / self.n


def _gathered_between(roles: Ints, n_bytes: Ints, sends: Ints) -> tuple[float, float, float, float]:
    """Most bytes gathered between two sends; stretches with nearly as many bytes, or calls (log2); share with any."""
    if not len(sends):
        return float(n_bytes[roles == GATHER].sum()), 0.0, 0.0, 0.0
    # The step is rotated to end with a send, so gathers before the first send need no wrapping.
    stretch = np.searchsorted(sends, np.flatnonzero(roles == GATHER))
    gathered = np.bincount(stretch, n_bytes[roles == GATHER], minlength=len(sends))
    most = float(gathered.max())
    if most <= 0:
        return 0.0, 0.0, 0.0, 0.0
    n_calls = np.bincount(stretch, minlength=len(sends))
    by_bytes, by_calls = (float(np.log2(np.count_nonzero(x >= NEARLY * x.max()))) / 4.0 for x in (gathered, n_calls))
    return most, by_bytes, by_calls, np.count_nonzero(gathered) / len(sends)


def same_pieces(gathers: Sizes, sends: Sizes) -> tuple[float, float, float, float, float, float]:
    """How often pieces are gathered per send, for pieces that occur in both.

    Elements of both have equally many bytes, half or twice as many. The numbers are: share of gathered bytes with a
    counterpart; ratio of the types; fewest, most and mean gathers per send (log2); share of bytes gathered most often.
    """
    best = (0.0,) * 6
    if not gathers.n or not sends.n:
        return best
    n_bytes = gathers.values * gathers.counts
    for octave in (0, 1, -1):
        sought = gathers.values * 2.0**octave
        right = np.searchsorted(sends.values, sought).clip(max=len(sends.values) - 1)
        left = (right - 1).clip(min=0)
        nearest = np.where(np.abs(sends.values[left] - sought) < np.abs(sends.values[right] - sought), left, right)
        found = np.abs(sends.values[nearest] - sought) <= SAME_PIECE * sought
        share = float(n_bytes[found].sum()) / float(n_bytes.sum())
        if share <= best[0]:
            continue
        ratios = np.log2(gathers.counts[found] / sends.counts[nearest[found]]) / 4.0
        weights = gathers.values[found] / float(gathers.values[found].sum())
        most = float(ratios.max())
        often = float(weights[ratios >= most - 1e-9].sum())
        best = (share, octave / 2.0, float(ratios.min()), most, float((ratios * weights).sum()), often)
    return best


def _balance(returned: float, sent: float, n_returns: int, n_sends: int) -> tuple[float, float, float]:
    """How well volumes fit one model, given types and micro-steps: 0 = not at all, 1 = to the byte.

    Parameters returned once have as many bytes as the gradients sent, or half or twice as many, unless activations are
    among them. The numbers are: fit per round; bytes sent per returned, and returned per sent, in halves.
    """
    if returned <= 0 or sent <= 0:
        return 0.0, 0.0, 0.0
    octaves = float(np.log2(returned / n_returns * n_sends / sent))
    return (
        _nearness(abs(octaves - round(octaves)) if abs(octaves) < 1.5 else 1.0),
        _nearness(_from_halves(sent / returned)),
        _nearness(_from_halves(returned / sent)),
    )


def _once_or_twice(gathered: Ints, sent: float, left_over: int, n_before: int) -> tuple[float, float, float, float]:
    """How well gathers add up to the model, once or more.

    The model's size is the bytes sent, or half of them. Nearness is 0 = not at all to 1 = to the byte. The numbers are:
    nearness of all gathers to the model; nearness of a beginning of the gathers to the model, if its pieces follow; the
    share of later bytes that are no piece of it; and the first `n_before` gathers, before any send, as a share of the
    model: all of it if there is one pass.
    """
    passed = np.cumsum(gathered) + left_over
    if not len(passed) or sent <= 0:
        return 0.0, 0.0, 0.0, 0.0
    once, twice, foreign, share = 0.0, 0.0, 1.0, 0.0
    for times in (1, 2):
        model = sent / times
        once = max(once, _nearness(abs(float(passed[-1]) / model - 1)))
        begin = int(np.abs(passed - model).argmin()) + 1
        rest = gathered[begin:]
        if not len(rest):
            continue
        values, counts = np.unique(gathered[:begin], return_counts=True)
        again, n_again = np.unique(rest, return_counts=True)
        at = np.searchsorted(values, again).clip(max=len(values) - 1)
        left = np.maximum(0, n_again - np.where(values[at] == again, counts[at], 0))
        near = _nearness(abs(float(passed[begin - 1]) / model - 1))
        if near > twice:
            twice, foreign = near, float((left * again).sum()) / float(rest.sum())
            share = min(2.0, float(passed[n_before - 1]) / model) if n_before else 0.0
    return once, twice, foreign, share


def _from_halves(ratio: float) -> float:
    """Relative distance to the next multiple of a half."""
    return abs(2 * ratio - max(1, round(2 * ratio))) / max(1.0, 2 * ratio)


def _nearness(error: float) -> float:
    return float(np.clip(-np.log10(error + FINEST), 0.0, 5.0)) / 5.0


def _modal(roles: Ints, n_bytes: Ints, reduces: Sizes) -> tuple[float, ...]:
    """The most frequent all-reduce among other reductions: activations are also summed in forward, gradients are not.

    The numbers are: share of them without another reduction between, and without any other call between; size relative
    to the others; whether 2 and 4 divide their number; gathers of the same size, and the share that is not consecutive.
    """
    if not reduces.n:
        return (0.0,) * 7
    modal = (roles == REDUCE) & (n_bytes == reduces.modal_bytes)
    others = ((roles == REDUCE) | (roles == SCATTER)) & ~modal
    large = roles != TINY
    is_gather = roles[n_bytes == reduces.modal_bytes] == GATHER
    return (
        most_between(modal, others) / reduces.modal_count,
        most_between(modal, large & ~modal) / reduces.modal_count,
        _log_ratio(float(reduces.modal_bytes), float(n_bytes[others].mean()) if others.any() else 0.0),
        float(reduces.modal_count % 2 == 0),
        float(reduces.modal_count % 4 == 0),
        (np.count_nonzero(is_gather) / reduces.modal_count) ** 0.5,
        np.count_nonzero(is_gather & ~np.roll(is_gather, 1)) / max(1, int(np.count_nonzero(is_gather))),
    )


def rounds(n_bytes: Ints) -> int:
    """How often the sizes repeat one series, as micro-steps do that all send the same."""
    return len(n_bytes) // period_of(n_bytes) if len(n_bytes) else 1


def _octaves(n: int) -> float:
    return float(np.log2(n)) / 4.0


def _long_stretches(is_gather: npt.NDArray[np.bool_]) -> float:
    """Number (log2) of stretches between gathers that are much longer than most: forward passes if P_a gathers."""
    at = np.flatnonzero(is_gather)
    if len(at) < 2:
        return 0.0
    lengths = np.diff(np.r_[at, at[0] + len(is_gather)]) - 1
    return float(np.log2(1 + np.count_nonzero(lengths > 1.5 * np.median(lengths) + 1))) / 4.0


def micro_steps_shown(step: Step) -> int:
    """Micro-steps that P_a's gathers show, 0 without gathers: forward sums before a pass's first gather, too."""
    activations = step.activations
    if activations is None:
        return 0
    is_gather = activations.roles == GATHER
    at = np.flatnonzero(is_gather & ~np.roll(is_gather, 1))
    sums = np.cumsum(activations.roles == REDUCE)
    if not len(at) or not sums[-1]:
        return 0
    lengths = np.diff(sums[at], prepend=sums[at[-1]] - sums[-1])
    usual = float(np.quantile(lengths, 0.1, method="lower"))
    n_long = int(np.count_nonzero(lengths > FORWARD_STRETCH * usual))
    return n_long or len(at)  # all stretches are alike: one gather in each


def _log_ratio(one: float, other: float) -> float:
    """A quarter of log2(one / other), from -2.5 to 2.5; 0 if both are missing."""
    if one <= 0 and other <= 0:
        return 0.0
    return float(np.clip(np.log2((one + 1e-9) / (other + 1e-9)) / 4.0, -2.5, 2.5))
