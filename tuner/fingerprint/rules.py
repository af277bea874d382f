"""What remains when no weights can be read: rules over one step's collectives, in order.

- DDP reduces gradients with all_reduce and gathers nothing;
- ZeRO-3 gathers parameters before and while it scatters gradients;
- ZeRO-1 and 2 gather the updated parameters after the last gradient has left.

Accumulation, partitioned activations and tensor parallelism are beyond them.
"""

from __future__ import annotations

from typing import Final

from zerotune.store.records import Stage
from zerotune.tuner.fingerprint.labels import UNKNOWN, Shown
from zerotune.tuner.fingerprint.steps.anatomy import GATHER, REDUCE, SCATTER, TINY, Step

SOME_SHARE: Final = 0.02


def classify(step: Step) -> Shown:
    """What one step's collectives show."""
    large = step.roles != TINY
    roles, n_bytes = step.roles[large], step.bytes[large]
    gathered, scattered, reduced = (float(n_bytes[roles == role].sum()) for role in (GATHER, SCATTER, REDUCE))
    total = gathered + scattered + reduced
    if len(roles) < 2 or total < 0.5 * float(n_bytes.sum()):
        return UNKNOWN
    # Gradients leave once in many micro-steps, while parameters are gathered in each: a small share counts.
    gathers_much, scatters_much = gathered > SOME_SHARE * total, scattered > SOME_SHARE * total
    if not gathers_much:
        return UNKNOWN if scatters_much else Shown(Stage.ddp)
    sends = roles == (SCATTER if scatters_much else REDUCE)
    if not sends.any():
        return UNKNOWN
    first, last = (int(at) for at in sends.nonzero()[0][[0, -1]])
    between = float(n_bytes[first:last][roles[first:last] == GATHER].sum()) / gathered
    if between < 0.1:
        return Shown(Stage.zero1_or_2)
    return Shown(Stage.zero3) if scatters_much and between > 0.25 else UNKNOWN
