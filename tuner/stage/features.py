"""A step as numbers: which collectives, of which sizes relative to one another, in which order, how far apart.

Nothing here depends on the model's scale or on where the step was cut: sizes count relative to the step's own,
and the step is turned so that it begins with its longest stretch without a reduction. Tensor parallelism sums
activations of one size all over the step; the *rest* is the step without them. Two views: a *summary* of the whole
step and of its rest, and the rest's *frames*, at most N_FRAMES equal stretches in order.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from store.records import Collective

FEATURES_VERSION: Final = 2
N_FRAMES: Final = 16
MAX_BYTES: Final = (1 << 58) - 1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

GATHER, SCATTER, REDUCE, ROOTED, TINY = range(5)
"""Roles of a call: all-gather, reduce-scatter, all-reduce, broadcast or reduce, and any too small for a model."""
N_ROLES: Final = 5
_ROLE_OF: Final = np.full(16, -1, np.int64)
_ROLE_OF[[Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce]] = (GATHER, SCATTER, REDUCE)
_ROLE_OF[[Collective.broadcast, Collective.reduce]] = ROOTED
IS_SEEN: Final = _ROLE_OF >= 0
"""By collective: whether NCCL asks a tuner about it; all others are left out of every sequence."""

TINY_BYTES: Final = 2048
MIN_ACTIVATIONS: Final = 4
TINY_SHARE: Final = 1.0 / 4096
N_SUMMARY: Final = 86
N_FRAME: Final = 14


def encode(collectives: Ints, message_bytes: Ints) -> Ints:
    """Each call as one number: two calls are the same when their numbers are."""
    return np.minimum(message_bytes, MAX_BYTES) << 4 | collectives


class Step:
    """One step, turned to begin with its longest stretch without a reduction."""

    def __init__(self, codes: Ints, gaps_us: Floats, *, may_have_activations: bool = True) -> None:
        roles, n_bytes = _ROLE_OF[codes & 15], codes >> 4
        tiny = n_bytes <= max(TINY_BYTES, TINY_SHARE * int(n_bytes.max()))
        roles = np.where(tiny, TINY, roles)
        begin, self.longest_stretch = _longest_stretch((roles == SCATTER) | (roles == REDUCE))
        turn = np.roll(np.arange(len(codes)), -begin)
        self.roles: Ints = roles[turn]
        self.bytes: Ints = n_bytes[turn]
        gaps_us = gaps_us[turn]
        total_us = float(gaps_us.sum())
        self.has_gaps = total_us > 0 and bool((gaps_us >= 0).all())
        self.gaps: Floats = gaps_us / total_us if self.has_gaps else np.zeros(len(codes))
        """Share of the step's time that passed before each call; zeros where times are unknown."""
        self.rest: Step = self
        """The step without activations that tensor parallelism may have summed."""
        if may_have_activations:
            keep = _no_activations(self.roles, self.bytes)
            if keep.any() and not keep.all():
                passed = np.cumsum(gaps_us)[keep]
                gaps_of_rest = np.diff(passed, prepend=passed[-1] - float(gaps_us.sum()))
                self.rest = Step(codes[turn][keep], gaps_of_rest, may_have_activations=False)


def summary(step: Step) -> Floats:
    """The whole step and its rest in N_SUMMARY numbers."""
    whole = _summary(step)
    return np.concatenate([whole, whole if step.rest is step else _summary(step.rest)])


def _summary(step: Step) -> Floats:
    roles, n_bytes, n = step.roles, step.bytes, len(step.roles)
    counts = np.bincount(roles, minlength=N_ROLES).astype(np.float64)
    volume = np.bincount(roles, n_bytes, minlength=N_ROLES)
    large = max(1.0, n - counts[TINY])
    moved = max(1.0, float(volume[:TINY].sum()))
    gathers, scatters, reduces = (_Sizes(n_bytes[roles == role]) for role in (GATHER, SCATTER, REDUCE))
    sent = volume[SCATTER] + volume[REDUCE]
    sends = np.flatnonzero((roles == SCATTER) | (roles == REDUCE))
    is_gather = roles == GATHER
    # Gathers between the first and the last reduction of the turned step belong to its backward part.
    amid = float(n_bytes[sends[0] : sends[-1]][is_gather[sends[0] : sends[-1]]].sum()) if len(sends) else 0.0
    gaps = np.sort(step.gaps)[::-1]
    reach = float(step.gaps[sends[0] + 1 : sends[-1] + 1].sum()) if len(sends) else 0.0
    return np.array(
        [
            np.log1p(n) / 8.0,
            *(counts / n),
            *(volume[:TINY] / moved),
            np.log1p(counts[TINY]) / 4.0,
            float(n <= 1),
            _log_ratio(volume[GATHER], sent),
            _log_ratio(volume[SCATTER], volume[REDUCE]),
            _log_ratio(counts[GATHER], counts[SCATTER] + counts[REDUCE]),
            *gathers.profile(),
            *scatters.profile(),
            *reduces.profile(),
            gathers.share_in(scatters),
            gathers.share_in(reduces),
            scatters.share_in(gathers),
            reduces.modal_share_of(float(n_bytes.max())),
            float(reduces.modal_count) / large,
            amid / max(1.0, float(volume[GATHER])),
            step.longest_stretch / n,
            _log_ratio(float(reduces.modal_count), counts[SCATTER] + counts[REDUCE] - reduces.modal_count),
            _rounds(n_bytes[(roles == SCATTER) | (roles == REDUCE)]),
            _rounds(n_bytes[is_gather]),
            _rounds(n_bytes[roles == ROOTED]),
            _long_stretches(is_gather),
            float(step.has_gaps),
            float(gaps[0]) if n > 1 else 0.0,
            float(gaps[1]) if n > 1 else 0.0,
            reach,
        ]
    )


def frames(step: Step) -> Floats:
    """The rest's order as at most N_FRAMES stretches of N_FRAME numbers each, shape [n_frames, N_FRAME]."""
    step = step.rest
    roles, n_bytes, n = step.roles, step.bytes, len(step.roles)
    n_frames = min(n, N_FRAMES)
    place = np.arange(n) * n_frames // n
    long = np.bincount(place, minlength=n_frames).astype(np.float64)
    table = np.zeros((n_frames, N_FRAME))
    by_role = np.bincount(place * N_ROLES + roles, minlength=n_frames * N_ROLES).reshape(n_frames, N_ROLES)
    volume = np.bincount(place * N_ROLES + roles, n_bytes, minlength=n_frames * N_ROLES).reshape(n_frames, N_ROLES)
    table[:, :N_ROLES] = by_role / long[:, None]
    table[:, N_ROLES : 2 * N_ROLES - 1] = np.sqrt(volume[:, :TINY] / max(1.0, float(volume.max())))
    turns = np.r_[roles[1:] != roles[:-1], False]
    table[:, 9] = np.bincount(place, turns, minlength=n_frames) / long
    _, inverse, counts = np.unique(n_bytes, return_inverse=True, return_counts=True)
    table[:, 10] = np.bincount(place, inverse == int(counts.argmax()), minlength=n_frames) / long
    in_reduces = np.isin(n_bytes, n_bytes[roles == REDUCE]) & (roles == GATHER)
    table[:, 11] = np.bincount(place, in_reduces, minlength=n_frames) / long
    table[:, 12] = np.bincount(place, step.gaps, minlength=n_frames)
    table[:, 13] = float(step.has_gaps)
    return table


def _no_activations(roles: Ints, n_bytes: Ints) -> npt.NDArray[np.bool_]:
    """False for the commonest all-reduce, if it is common enough, and for gathers of the same size."""
    values, counts = np.unique(n_bytes[roles == REDUCE], return_counts=True)
    if not len(values) or counts.max() < MIN_ACTIVATIONS or 2 * counts.max() < counts.sum():
        return np.ones(len(roles), np.bool_)
    stays: npt.NDArray[np.bool_] = (n_bytes != values[counts.argmax()]) | ((roles != REDUCE) & (roles != GATHER))
    return stays


class _Sizes:
    """The message sizes of one role within a step."""

    def __init__(self, n_bytes: Ints) -> None:
        self.n = len(n_bytes)
        self.values, self.counts = np.unique(n_bytes, return_counts=True)
        self.modal_count = int(self.counts.max()) if self.n else 0
        self._modal_bytes = int(self.values[self.counts.argmax()]) if self.n else 0

    def profile(self) -> tuple[float, float, float, float]:
        """How often the rarest, the largest and the commonest size come (log2), and how many there are."""
        if not self.n:
            return 0.0, 0.0, 0.0, 0.0
        fewest, most = float(self.counts.min()), float(self.modal_count)
        return np.log2(fewest) / 2.0, np.log2(self.counts[-1]) / 3.0, np.log2(most) / 5.0, len(self.values) / self.n

    def share_in(self, other: _Sizes) -> float:
        """Share of calls whose size the other role has too."""
        if not self.n or not other.n:
            return 0.0
        return float(self.counts[np.isin(self.values, other.values)].sum()) / self.n

    def modal_share_of(self, largest_bytes: float) -> float:
        return self._modal_bytes / max(1.0, largest_bytes)


def _longest_stretch(is_reduction: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """(begin, length) of the longest run without a reduction, around the end; (0, 0) if there is none."""
    at = np.flatnonzero(is_reduction)
    n = len(is_reduction)
    if not len(at):
        return 0, n
    lengths = np.diff(np.r_[at, at[0] + n]) - 1
    longest = int(lengths.argmax())
    return int(at[longest] + 1) % n, int(lengths[longest])


def _rounds(n_bytes: Ints) -> float:
    """How many times the sizes run through the same series (log2): micro-steps that all send the same."""
    n = len(n_bytes)
    if n < 2:
        return 0.0
    for period in range(1, n // 2 + 1):
        if n % period == 0 and np.array_equal(n_bytes[period:], n_bytes[:-period]):
            return float(np.log2(n // period)) / 4.0
    return 0.0


def _long_stretches(is_gather: npt.NDArray[np.bool_]) -> float:
    """How many stretches between gathers are much longer than most (log2): forward passes, if gathers are P_a's."""
    at = np.flatnonzero(is_gather)
    if len(at) < 2:
        return 0.0
    lengths = np.diff(np.r_[at, at[0] + len(is_gather)]) - 1
    return float(np.log2(1 + np.count_nonzero(lengths > 1.5 * np.median(lengths) + 1))) / 4.0


def _log_ratio(one: float, other: float) -> float:
    """log2 of one over other, in octaves over four, from -1 to 1; 0 when there is neither."""
    if one <= 0 and other <= 0:
        return 0.0
    return float(np.clip(np.log2((one + 1e-9) / (other + 1e-9)) / 4.0, -1.0, 1.0))
