"""Removes answers that a step's calls cannot decide: equal sequences must get equal answers.

Several kinds of training enqueue the sequences in this module, so the answer claims none of them.
docs/design/stage-fingerprint.md lists these sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...store.records import Collective, Stage
from .labels import UNKNOWN, Shown
from .steps.anatomy import MIN_ACTIVATIONS, TINY_BYTES, Ints, has_nearly_equal, period_of

PERHAPS_TENSOR_PARALLEL: Final = Shown(tensor_parallel=None)
PADDING: Final = 0.02
"""Relative difference that padding makes between equal volumes."""
MUCH_SMALLER: Final = 64
SUMS_PER_BUCKET: Final = 1
"""Least sums of activations per bucket. A unit sums in forward and in backward before it sends gradients. But buckets
may be smaller than a unit, and a pipeline's first and last stage also send the embedding's gradients."""

Groups = Mapping[int, Set[int]]
"""Ids of the communicators that each call of a step was enqueued on, by code."""
NO_GROUPS: Final[Groups] = MappingProxyType({})


def unambiguous(shown: Shown, codes: Ints, groups: Groups = NO_GROUPS) -> Shown:
    """The part of `shown`, or a weaker claim, that the calls decide: other kinds of training may enqueue them, too.

    Args:
        codes: of one step, as `anatomy.encode` writes them, [n].
        groups: empty: the communicators are unknown, and only the sequence counts.
    """
    calls = np.where(codes >> 4 > TINY_BYTES, codes, 0)  # all flags are equal
    calls = calls[(calls > 0) | (np.roll(calls, 1) > 0)]
    calls = calls[: period_of(calls)]  # one round: its repetitions show nothing more
    large = calls[calls > 0]
    if not len(large) or len(calls) == 1:
        return UNKNOWN
    kinds = large & 15
    if (kinds == Collective.all_reduce).all():
        return _all_reduces(shown, large, groups)
    returns = (kinds == Collective.all_gather) | (kinds == Collective.broadcast)
    if returns.all():
        return UNKNOWN  # nothing is ever reduced
    if _n_rows(returns) != 1:
        return shown
    return _sent_and_returned(shown, large[~returns], large[returns])


def _all_reduces(shown: Shown, large: Ints, groups: Groups) -> Shown:
    """Only all-reduces: equal buckets and activations look the same if all equal calls are consecutive.

    They differ if they use other communicators than the other calls, since all buckets go to a model's replicas. Any
    number of calls may be activations: units sum as often in backward as in forward, and again if forward is
    recomputed. But embeddings sum in forward only, and so does the first unit if its inputs need no gradient.
    """
    round_ = large[: period_of(large)]
    if len(round_) == 1:
        return PERHAPS_TENSOR_PARALLEL if len(large) > 1 else msgspec.structs.replace(shown, accumulation=None)
    values, counts = np.unique(round_, return_counts=True)
    n_alike, commonest = int(counts.max()), values[counts.argmax()]
    if has_nearly_equal(values >> 4, int(commonest >> 4)) or n_alike < MIN_ACTIVATIONS:
        return shown
    is_enough = n_alike >= SUMS_PER_BUCKET * (len(round_) - n_alike)
    in_a_row = _n_rows(round_ == commonest) == 1
    # A far smaller call, such as a loss between forward and backward, interrupts sums of activations, but not buckets.
    others = round_[(round_ >> 4) * MUCH_SMALLER > commonest >> 4]
    is_broken_by_small = _n_rows(others == commonest) == 1
    if is_enough and (in_a_row or (is_broken_by_small and shown.tensor_parallel is False)):
        beside = set(others.tolist()) - {int(commonest)}
        return msgspec.structs.replace(shown, tensor_parallel=_are_apart(int(commonest), beside, groups) or None)
    return shown


def _are_apart(code: int, others: Set[int], groups: Groups) -> bool:
    """Whether none of the other calls was enqueued on a communicator of the first."""
    first = groups.get(code, frozenset())
    found = [groups.get(other, frozenset()) for other in others]
    return bool(first and found) and all(one and first.isdisjoint(one) for one in found)


def _sent_and_returned(shown: Shown, sent: Ints, returned: Ints) -> Shown:
    """All reductions come first, then all gathers and broadcasts."""
    ratio = float((sent >> 4).sum()) / float((returned >> 4).sum())
    is_once, is_twice = (abs(ratio / n - 1) < PADDING for n in (1, 2))
    is_whole = ratio > 1 - PADDING and abs(ratio / round(ratio) - 1) < PADDING
    if (sent == sent[0]).all():
        may_be_activations = sent[0] & 15 == Collective.all_reduce and len(sent) >= MIN_ACTIVATIONS
        is_result = len(returned) <= 2 and is_whole and int((returned >> 4).sum()) > (1 + PADDING) * int(sent[0] >> 4)
        if may_be_activations and is_result:
            return PERHAPS_TENSOR_PARALLEL  # activations and a result, or equal chunks of one or more micro-steps
        if is_twice and len(sent) % 2 == 0 and shown.stage is not Stage.unknown:
            # Gradients of one micro-step in elements of twice the size, or of two micro-steps.
            from_gathers = bool((returned & 15 == Collective.all_gather).all())
            return msgspec.structs.replace(
                shown, stage=Stage.zero1_or_2 if from_gathers else shown.stage, accumulation=None
            )
    if len(returned) > 1 and (returned & 15 == Collective.all_gather).all():
        n_rounds = len(returned) // period_of(returned)
        are_equal = n_rounds == len(returned)
        if ratio < 1 / 1.5 and (are_equal or n_rounds % 2 == 0):
            return UNKNOWN  # gathered in several micro-steps, or for forward and again for backward
        if are_equal and is_once and shown.stage is Stage.zero1:
            return msgspec.structs.replace(shown, stage=Stage.zero1_or_2, accumulation=None)
    return shown


def _n_rows(is_one: npt.NDArray[np.bool_]) -> int:
    """Number of consecutive stretches of True in a cyclic array."""
    return int(np.count_nonzero(is_one & ~np.roll(is_one, 1)))
