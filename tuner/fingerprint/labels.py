"""What a sequence of collectives can show of the training behind it, and what it cannot.

Where two kinds of training enqueue the same sequence, no recogniser can tell them apart, so the label is the
set of both: `zero1_or_2` for a stage, None ("cannot tell") for accumulation and tensor parallelism. This is what a
kind of training shows in general; `ambiguity.py` has single sequences that show less.
docs/design/stage-fingerprint.md lists which are the same, and `tests/stage/test_stage_labels.py` checks it on
recordings and on generated runs.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import msgspec

from zerotune.store.records import Stage

STAGES: Final = (Stage.unknown, Stage.ddp, Stage.zero1, Stage.zero2, Stage.zero3, Stage.zero1_or_2)
ACCUMULATIONS: Final = (False, True, None)
N_OUTPUTS: Final = len(STAGES) + len(ACCUMULATIONS) + 2
"""Scores of the stages, of accumulation, of partitioned activations, of tensor parallelism."""


class Shown(msgspec.Struct, frozen=True):
    """What is recognised. None, for accumulation or tensor parallelism: the calls are the same with and without."""

    stage: Stage = Stage.unknown
    accumulation: bool | None = None
    partitioned_activations: bool = False
    tensor_parallel: bool | None = False

    def __str__(self) -> str:
        parts = [self.stage.name]
        if self.accumulation is not None:
            parts.append("accumulating" if self.accumulation else "not accumulating")
        if self.tensor_parallel is not False:
            parts.append("tensor parallel" if self.tensor_parallel else "perhaps tensor parallel")
        if self.partitioned_activations:
            parts.append("partitioned activations")
        return ", ".join(parts)


UNKNOWN: Final = Shown()


class TrainingKind(msgspec.Struct, frozen=True):
    """How a run was set up: what a recording or the generator knows, and the recogniser does not."""

    stage: Stage
    n_micro: int = 1
    sends_each: bool = False
    """Gradients leave in every micro-step; else only in the last one of a step."""
    gathers_each: bool = False
    """Parameters are gathered in every micro-step; else once per step."""
    has_marker: bool = False
    """Something small is reduced once per step: a norm, a loss, an overflow flag."""
    partitioned_activations: bool = False
    tensor_parallel: bool = False
    broadcasts: bool = False
    """Updated parameters are spread by broadcasts (ZeroRedundancyOptimizer), which nobody else does."""


def visible(training: TrainingKind) -> Shown:
    """What an ideal observer of the sequence can know of `training`.

    Micro-steps show if each of them leaves a mark (gradients sent, parameters or activations gathered) and
    something else comes once per step; else a step is as long as one of them. A long gap before the first gradient
    is no proof: it may be a data loader. Gradients that leave once per gather of parameters may be ZeRO-1's or
    ZeRO-2's; if micro-steps show, sending in each of them is ZeRO-2, in the last only ZeRO-1.
    """
    stage, accumulates = training.stage, training.n_micro > 1
    leaves_marks = training.sends_each or training.gathers_each
    returns = stage not in (Stage.ddp, Stage.unknown)  # else nothing is gathered, in no micro-step nor after
    does_all = training.sends_each and (training.gathers_each or not returns) and not training.broadcasts
    shows = training.partitioned_activations and (training.has_marker or not does_all)
    if accumulates:
        shows |= returns and training.sends_each != training.gathers_each
        shows |= leaves_marks and training.has_marker
        shows |= training.broadcasts and training.sends_each
    else:
        # Only ZeRO-3 gathers in every micro-step whatever it does with gradients.
        shows |= stage is Stage.zero3 and training.has_marker
    if stage is Stage.unknown:
        # Tensor parallelism alone is one call over and over, unless something breaks the row.
        tensor = training.tensor_parallel and (training.has_marker or training.partitioned_activations)
        return Shown(stage, None, training.partitioned_activations, tensor)
    if stage in (Stage.zero1, Stage.zero2) and not training.broadcasts:
        stage = Stage.zero1_or_2
        if accumulates and shows:
            stage = Stage.zero2 if training.sends_each else Stage.zero1
    accumulation = accumulates if shows else None
    return Shown(stage, accumulation, training.partitioned_activations, training.tensor_parallel)


def _possible() -> tuple[Shown, ...]:
    flags = product((False, True), repeat=6)
    found = {
        visible(TrainingKind(stage, n_micro, *some))
        for some in flags
        for stage in (Stage.unknown, Stage.ddp, Stage.zero1, Stage.zero2, Stage.zero3)
        for n_micro in (1, 2)
        if some[4] >= some[3]  # activations are partitioned among those who compute them together
        and (stage is Stage.zero1) >= some[5]
    }
    return tuple(sorted(found, key=str))


POSSIBLE: Final = _possible()
"""All that a kind of training can show: not every accumulation goes with every stage."""
