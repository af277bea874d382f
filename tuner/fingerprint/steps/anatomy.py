"""The parts of a step: its activations, the rest, and the rest's round.

Tensor parallelism sums activations of one size all over a step; the *rest* is the step without them. The rest's *round*
is a micro-step, or equal blocks. Where the step was cut does not matter.
"""

from __future__ import annotations

from functools import cached_property
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from ....store.records import Collective

MAX_BYTES: Final = (1 << 58) - 1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

GATHER, SCATTER, REDUCE, ROOTED, TINY = range(5)
"""Roles of a call: all-gather, reduce-scatter, all-reduce, broadcast or reduce, and any call too small for a model."""
N_ROLES: Final = 5
_ROLE_OF: Final = np.full(16, -1, np.int64)
_ROLE_OF[[Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce]] = (GATHER, SCATTER, REDUCE)
_ROLE_OF[[Collective.broadcast, Collective.reduce]] = ROOTED
IS_SEEN: Final = _ROLE_OF >= 0
"""By collective, whether NCCL asks a tuner about it; sequences leave out the others."""

TINY_BYTES: Final = 2048
MIN_ACTIVATIONS: Final = 4
NEARLY_ALL: Final = 0.9
"""Share of the calls of one size that must have a partner; a few may lack it, since records get lost."""
MIN_IN_A_ROW: Final = 3
"""Least consecutive activations: all of forward, and those of the first unit in backward, before its gradients."""
WHOLE: Final = 0.01
NEARLY_EQUAL: Final = 0.01
TINY_SHARE: Final = 1.0 / 4096
MIN_ROUNDS: Final = 0.12
"""Least coverage times novelty; below it the step counts as one round."""
MAX_RARE: Final = 4
MAX_POSITIONS: Final = 48


def encode(collectives: Ints, message_bytes: Ints) -> Ints:
    """Each call as one number; two calls are equal if their numbers are."""
    return np.minimum(message_bytes, MAX_BYTES) << 4 | collectives


def period_of(codes: Ints) -> int:
    """Length of the shortest cycle that `codes` repeat in whole rounds."""
    n = len(codes)
    return next((p for p in range(1, n // 2 + 1) if n % p == 0 and np.array_equal(codes[p:], codes[:-p])), n)


class Step:
    """A step, rotated to begin with its longest stretch without a reduction."""

    def __init__(self, codes: Ints, gaps_us: Floats) -> None:
        roles, n_bytes = _ROLE_OF[codes & 15], codes >> 4
        # Even activations that are small beside all parameters in one call are summed by tensor parallelism and
        # gathered by P_a.
        summed = (roles == REDUCE) | ((roles == GATHER) & np.isin(n_bytes, n_bytes[roles == REDUCE]))
        share = np.where(summed, 0.0, TINY_SHARE)
        tiny = n_bytes <= np.maximum(TINY_BYTES, share * int(n_bytes.max()))
        self.n_flags = len(np.unique(n_bytes[tiny & (codes & 15 == Collective.all_reduce)]))
        """Sizes of all-reduces too small for a model: norms, losses, counters, or the beginning of a benchmark."""
        self.n_flags_in_a_row = _most_sizes_in_a_row(tiny & (codes & 15 == Collective.all_reduce), n_bytes)
        """Most of these sizes in consecutive calls."""
        self.has_mark = bool((tiny & (roles != ROOTED)).any())
        """Whether a small call marks the step; broadcasts do not count, as each forward may broadcast buffers."""
        moved = np.where((roles == REDUCE) & (n_bytes <= TINY_BYTES), TINY, roles)
        self.has_pairs = bool(_gathered_and_scattered(moved, n_bytes).any())
        """Whether it has activations that tensor parallelism gathers and scatters, of any size."""
        roles = np.where(tiny, TINY, roles)
        sent = ~_replica_sums(roles, n_bytes)
        self._rotate(roles[sent], n_bytes[sent], _gaps_without(gaps_us, sent))
        keep = _no_activations(self.roles, self.bytes)
        self.activations: Step | None = None if keep.all() else self._kept(~keep)
        keep &= ~((self.roles == TINY) & (np.roll(self.roles, 1) == TINY))
        self.rest: Step = self if keep.all() or not keep.any() else self._kept(keep)
        """The step without activations that tensor parallelism may have summed, and with one of several small calls."""

    def _rotate(self, roles: Ints, n_bytes: Ints, gaps_us: Floats) -> None:
        begin, self.longest_stretch = _longest_stretch((roles == SCATTER) | (roles == REDUCE))
        rotation = np.roll(np.arange(len(roles)), -begin)
        self.roles: Ints = roles[rotation]
        self.bytes: Ints = n_bytes[rotation]
        self._gaps_us: Floats = gaps_us[rotation]
        total_us = float(gaps_us.sum())
        self.has_gaps = total_us > 0 and bool((gaps_us >= 0).all())
        self.gaps: Floats = self._gaps_us / total_us if self.has_gaps else np.zeros(len(roles))
        """Share of the step's time that passed before each call; zeros if times are unknown."""

    def _kept(self, keep: npt.NDArray[np.bool_]) -> Step:
        """The step with only the calls to `keep`."""
        return self._new(self.roles[keep], self.bytes[keep], _gaps_without(self._gaps_us, keep))

    def _new(self, roles: Ints, n_bytes: Ints, gaps_us: Floats) -> Step:
        step = Step.__new__(Step)
        step._rotate(roles, n_bytes, gaps_us)
        step.rest = step
        return step

    def part(self, where: Ints) -> Step:
        """Some of the calls as a step of its own."""
        return self._new(self.roles[where], self.bytes[where], self._gaps_us[where])

    @cached_property
    def rounds(self) -> Rounds:
        """The rounds that the step repeats within itself."""
        return Rounds(self)


class Rounds:
    """The rounds that a step repeats within itself: its micro-steps, or equal blocks."""

    def __init__(self, step: Step) -> None:
        self.unit: Step = step
        """One round; the step itself if it repeats little."""
        self.n = 1
        self.coverage = 0.0
        """Share of the step's calls that are in consecutive rounds."""
        self.share = 1.0
        """Share of the step's calls that are in one round."""
        self.novelty = 0.0
        """Share of the step's distinct calls that a round has."""
        codes = step.bytes * N_ROLES + step.roles
        n_kinds = len(np.unique(codes))
        best, found = MIN_ROUNDS, None
        n, around = len(codes), np.concatenate([codes, codes])
        for lag in _inner_lags(codes):
            start, matched = _longest_row(around[lag:] == around[:-lag])
            if matched < lag:
                continue
            unit = np.arange(start, start + lag) % n
            matched = min(matched, n - lag)
            coverage, novelty = (matched + lag) / n, len(np.unique(codes[unit])) / n_kinds
            if coverage * novelty > best:
                best, found = coverage * novelty + 1e-9, unit
                self.coverage, self.novelty, self.n = coverage, novelty, 1 + matched // lag
        if found is not None:
            self.unit = step.part(found)
            self.share = len(self.unit.roles) / len(codes)


def _inner_lags(codes: Ints) -> list[int]:
    """Distances between positions of the rarest repeated calls, shortest first."""
    values, counts = np.unique(codes, return_counts=True)
    again = np.argsort(counts, kind="stable")
    lags: set[int] = set()
    for value in values[again[counts[again] > 1][:MAX_RARE]].tolist():
        positions = np.flatnonzero(codes == value)[:MAX_POSITIONS]
        lags.update((positions[1:] - positions[0]).tolist())
        lags.update(np.diff(positions[:MAX_RARE]).tolist())
    return [lag for lag in sorted(lags) if 2 * lag <= len(codes)]


def _longest_row(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest stretch of True."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    if not len(ends):
        return 0, 0
    lengths = ends[1::2] - ends[::2]
    longest = int(lengths.argmax())
    return int(ends[2 * longest]), int(lengths[longest])


def _gaps_without(gaps_us: Floats, keep: npt.NDArray[np.bool_]) -> Floats:
    """Gaps of the calls to keep; the gap before a dropped call is added to the next one's."""
    if keep.all():
        return gaps_us
    passed = np.cumsum(gaps_us)
    return np.diff(passed[keep], prepend=passed[keep][-1] - float(passed[-1]))


def _replica_sums(roles: Ints, n_bytes: Ints) -> npt.NDArray[np.bool_]:
    """True for shards that are summed over replicas directly after they are scattered.

    Activations are summed in forward, too, where nothing is scattered. So sizes that also come elsewhere stay False.
    """
    reduces = roles == REDUCE
    follows: npt.NDArray[np.bool_] = reduces & (np.roll(roles, 1) == SCATTER) & (n_bytes <= np.roll(n_bytes, 1))
    if not follows.any():
        return follows
    values, of = np.unique(n_bytes, return_inverse=True)
    n_all, n_following = (np.bincount(of[some], minlength=len(values)) for some in (reduces, follows))
    follows &= (n_following >= NEARLY_ALL * n_all)[of]
    return follows


def _no_activations(roles: Ints, n_bytes: Ints) -> npt.NDArray[np.bool_]:
    """False for activations.

    Activations are calls that are gathered and scattered all over the step (sequence parallelism). Without any, they
    are all-reduces of one size with gathers of that size between them (P_a), or else the most frequent all-reduce that
    cannot be gradients, if it is frequent enough.
    """
    pairs = _gathered_and_scattered(roles, n_bytes)
    if pairs.any():
        return ~pairs
    values, counts = np.unique(n_bytes[roles == REDUCE], return_counts=True)
    partitioned, most = np.zeros(len(roles), np.bool_), 0
    common = (counts >= MIN_ACTIVATIONS) & np.isin(values, n_bytes[roles == GATHER])
    for value, count in zip(values[common].tolist(), counts[common].tolist(), strict=True):
        of_size = (n_bytes == value) & ((roles == REDUCE) | (roles == GATHER))
        if count > most and _alternate(roles[of_size] == GATHER) and _may_be_partitioned(roles, of_size):
            partitioned, most = of_size, count
    if most:
        return ~partitioned  # for any number of buckets beside them
    all_stay, n_left = np.ones(len(roles), np.bool_), int(counts.sum())
    for value, count in sorted(zip(values.tolist(), counts.tolist(), strict=True), key=itemgetter(1), reverse=True):
        if count < MIN_ACTIVATIONS or 2 * count < n_left:
            break
        of_size = (n_bytes == value) & ((roles == REDUCE) | (roles == GATHER))
        # They are gradients if parameters have the same pieces or as many bytes, or if other calls are nearly as large.
        if (roles[of_size] == GATHER).any() or _are_the_model(roles, n_bytes, value) or has_nearly_equal(values, value):
            n_left -= count
            continue
        others = (roles == SCATTER) | (roles == REDUCE) & ~of_size
        return ~of_size if most_between(of_size, others) >= MIN_IN_A_ROW else all_stay
    return all_stay


def has_nearly_equal(values: Ints, n_bytes: int) -> bool:
    """Whether other calls have nearly this size: buckets do, as their last pieces differ; activations have one size."""
    distance = np.abs(values - n_bytes)
    return bool(((distance > 0) & (distance < NEARLY_EQUAL * n_bytes)).any())


def _may_be_partitioned(roles: Ints, of_size: npt.NDArray[np.bool_]) -> bool:
    """Whether gathers come in every block, as of activations; one gather after all reductions returns their result."""
    reduced = (roles == SCATTER) | (roles == REDUCE)
    return bool(np.count_nonzero(of_size & (roles == GATHER)) > 1 or (reduced & ~of_size).any())


def _are_the_model(roles: Ints, n_bytes: Ints, chunk_bytes: int) -> bool:
    """Whether all reductions are a multiple of the returned bytes, so that they may be equal chunks of gradients."""
    sent = n_bytes[(roles == SCATTER) | (roles == REDUCE)]
    returned = n_bytes[(roles == GATHER) | (roles == ROOTED)]
    if not len(returned) or 2 * chunk_bytes < sent.max():
        return False
    times = float(sent.sum()) / float(returned.sum())
    # One or two gathers larger than a chunk may be a result whose size divides all activations by chance.
    most = 2 if len(returned) <= 2 and returned.sum() > (1 + WHOLE) * chunk_bytes else times
    return 1 - WHOLE < times < most + WHOLE and abs(times - round(times)) < WHOLE


def _most_sizes_in_a_row(counted: npt.NDArray[np.bool_], n_bytes: Ints) -> int:
    """Most distinct sizes of counted calls between two others, in a cyclic step."""
    at = np.flatnonzero(~counted)
    if not len(at) or not counted.any():
        return len(np.unique(n_bytes[counted]))
    row = np.searchsorted(at, np.flatnonzero(counted)) % len(at)
    rows = np.unique(np.stack([row, n_bytes[counted]]), axis=1)[0]
    return int(np.bincount(rows).max())


def most_between(counted: npt.NDArray[np.bool_], bounds: npt.NDArray[np.bool_]) -> int:
    """Most counted calls between two bounds, in a cyclic step."""
    at = np.flatnonzero(bounds)
    n_counted = int(np.count_nonzero(counted))
    if not len(at) or not n_counted:
        return n_counted
    return int(np.bincount(np.searchsorted(at, np.flatnonzero(counted)) % len(at)).max())


def _gathered_and_scattered(roles: Ints, n_bytes: Ints) -> npt.NDArray[np.bool_]:
    """True for gathers of the most frequent size, if scatters of it follow in many pairs, among other calls.

    Parameters do not look like that: in forward they are gathered, and nothing is scattered. In backward, sequence
    parallelism may gather twice, the gradient and the input, before it scatters.
    """
    none = np.zeros(len(roles), np.bool_)
    gathers = roles == GATHER
    values, counts = np.unique(n_bytes[gathers], return_counts=True)
    if not len(values) or counts.max() < MIN_ACTIVATIONS:
        return none
    of_size = n_bytes == values[counts.argmax()]
    first, second = of_size & gathers, of_size & (roles == SCATTER)
    pairs = first & np.roll(second, -1)
    in_a_row = np.count_nonzero(pairs & np.roll(pairs, -2))
    both = first | second
    others = ~both & (roles != TINY)
    n_least = NEARLY_ALL * max(np.count_nonzero(first), np.count_nonzero(second))
    enough = bool(np.count_nonzero(pairs) >= n_least)
    if not enough and (enough := come_back_soon(first[both])):
        in_a_row += np.count_nonzero(pairs & np.roll(first, -2) & np.roll(pairs, -3))
    return both if enough and 3 * in_a_row >= np.count_nonzero(pairs) and others.any() else none


def come_back_soon(is_gather: npt.NDArray[np.bool_]) -> bool:
    """Whether nearly each gather of one size has a scatter after it, at once or after one more gather.

    Forward gathers the parameters of at least three units before any scatter.
    """
    after, second = np.roll(is_gather, -1), np.roll(is_gather, -2)
    n_gathers, n_scatters = int(np.count_nonzero(is_gather)), int(np.count_nonzero(~is_gather))
    n_back = int(np.count_nonzero(is_gather & ~(after & second)))
    n_led = int(np.count_nonzero(is_gather & ~after))
    return n_scatters >= MIN_ACTIVATIONS and n_back >= NEARLY_ALL * n_gathers and n_led >= NEARLY_ALL * n_scatters


def _alternate(is_gather: npt.NDArray[np.bool_]) -> bool:
    """Whether gathers come singly between all-reduces: consecutive gathers are updated parameters, not activations."""
    return bool(2 * np.count_nonzero(is_gather & ~np.roll(is_gather, 1)) >= np.count_nonzero(is_gather))


def _longest_stretch(is_reduction: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """(begin, length) of the longest stretch without a reduction in a cyclic step; (0, 0) if there is none."""
    at = np.flatnonzero(is_reduction)
    n = len(is_reduction)
    if not len(at):
        return 0, n
    lengths = np.diff(np.r_[at, at[0] + n]) - 1
    longest = int(lengths.argmax())
    return int(at[longest] + 1) % n, int(lengths[longest])
