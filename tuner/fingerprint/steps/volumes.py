"""What a step's volumes prove, where they add up to the byte: how often the model is gathered for each time it is sent.

Gradients are the model once, in elements of as many bytes as parameters or of twice as many. Who gathers parameters
before their use gathers all of them in every micro-step; small tensors may stay whole and be gathered once, after the
step. A piece is gathered for forward, for backward, and for a recomputation between them: three times at most.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.tuner.fingerprint.steps.anatomy import GATHER, REDUCE, SCATTER, Floats, Ints, Step

Flags = npt.NDArray[np.bool_]

EXACT: Final = 1e-4
"""Relative difference of volumes that are the same; what padding adds is more, and proves nothing."""
NEARLY: Final = 0.03
"""Padding adds at most this share."""
AGAIN: Final = 0.02
"""Share of a model that is gathered a second time at least, or there is nothing to see of ZeRO-3."""
PER_MICRO_STEP: Final = 3
NOT_ALL: Final = 0.9
"""Less than this share of a model, besides what stays whole, is not gathered in a further micro-step."""


class Proven(NamedTuple):
    """What the volumes of one step exclude."""

    only_once: bool = False
    """All that is sent is gathered once: neither ZeRO-3 nor several micro-steps that gather and send in the last."""
    again: bool = False
    """Parts are gathered again before they are sent: they were freed."""
    one_pass: bool = False
    """What is gathered again is less than a further micro-step needs."""
    several_passes: bool = False
    """More is gathered than one micro-step can need."""


def proven(step: Step) -> Proven:
    """What volumes prove of a step that gathers and sends; nothing where they do not add up."""
    roles, n_bytes = step.moved
    is_send = (roles == SCATTER) | (roles == REDUCE)
    is_gather = roles == GATHER
    if not is_send.any() or not is_gather.any():
        return Proven()
    n_rounds, by_round = _rounds(n_bytes[is_send], is_send, is_gather, n_bytes)
    sent = float(n_bytes[is_send].sum()) / n_rounds
    each = float(by_round.min())
    once = float(by_round.sum()) - n_rounds * each
    gathered = n_bytes[is_gather]
    total = each + once
    if abs(total / sent - 0.5) < EXACT / 2:
        return Proven(only_once=True)
    # The same bytes would be all of a model with elements of half the size, gathered twice.
    if abs(total / sent - 1) < EXACT and max(once, _unpaired(gathered)) > 2 * EXACT * sent:
        return Proven(only_once=True)
    if n_rounds > 1:
        if by_round.argmax():
            return Proven()  # rotated to begin within a step
        gathered = n_bytes[is_gather & (np.cumsum(is_send) <= np.count_nonzero(is_send) // n_rounds)]
    found = [_from_model(gathered, sent / times, total, sent) for times in (1, 2)]
    found = [one for one in found if one != Proven()]
    if len(found) != 1:
        return Proven()
    return found[0] if n_rounds == 1 else found[0]._replace(one_pass=False)


def _from_model(gathered: Ints, model: float, total: float, sent: float) -> Proven:
    """What follows if the first gathers are `model` to the byte, and the others are pieces of it."""
    passed = np.cumsum(gathered)
    at = int(np.abs(passed - model).argmin())
    if abs(float(passed[at]) / model - 1) > EXACT:
        return Proven()
    again = gathered[at + 1 :]
    if not np.isin(again, gathered[: at + 1]).all():
        return Proven()
    more = float(passed[-1]) - float(passed[at])
    if more < AGAIN * model:
        return Proven()
    keeps = min(abs(total / sent - 1), abs(2 * total / sent - 1)) < NEARLY
    is_too_much = more > (PER_MICRO_STEP - 1) * (1 + EXACT) * model
    forward = gathered[: at + 1][np.isin(gathered[: at + 1], again)]
    # Every micro-step gathers the same for forward, in the same order.
    is_repeated = _contains(again, forward)
    return Proven(
        again=not keeps,
        one_pass=more < NOT_ALL * model or not (is_repeated or is_too_much),
        several_passes=is_repeated and is_too_much,
    )


def _rounds(sent: Ints, is_send: Flags, is_gather: Flags, n_bytes: Ints) -> tuple[int, Floats]:
    """(number of rounds of equal sends, bytes gathered in each): the most rounds that gather equally, one excepted."""
    n = len(sent)
    number = np.concatenate([[0], np.cumsum(is_send)[:-1]])[is_gather] % n
    # What comes after the last send belongs to the first round of the next step.
    for n_rounds in range(n, 1, -1):
        period = n // n_rounds
        if n % n_rounds or not np.array_equal(sent[period:], sent[:-period]):
            continue
        by_round = np.bincount(number // period, n_bytes[is_gather], minlength=n_rounds).astype(np.float64)
        if (by_round > 0).all() and np.count_nonzero(by_round != by_round.min()) <= 1:
            return n_rounds, by_round
    return 1, np.array([float(n_bytes[is_gather].sum())])


def _contains(sizes: Ints, part: Ints) -> bool:
    """Whether `part` stands in `sizes` as it is."""
    n = len(part)
    starts = np.flatnonzero(sizes[: max(0, len(sizes) - n + 1)] == part[0]).tolist()
    return any(np.array_equal(sizes[start : start + n], part) for start in starts)


def _unpaired(gathered: Ints) -> int:
    """Bytes of pieces without a second gather of their size: these at least are kept if others are gathered again."""
    values, counts = np.unique(gathered, return_counts=True)
    return int(values[counts % 2 == 1].sum())
