"""How a run was set up, and how much of that an ideal observer of its sequence can know."""

from __future__ import annotations

import msgspec

from zerotune.store.records import Stage
from zerotune.tuner.fingerprint.labels import Shown


class TrainingKind(msgspec.Struct, frozen=True):
    """How a run was set up: a recording or the generator knows it, the recogniser does not."""

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
    """Updated parameters are spread by broadcasts (ZeroRedundancyOptimizer); nobody else does that."""


def visible(training: TrainingKind) -> Shown:
    """The answer that an ideal observer of the sequence can give.

    Micro-steps show if each of them leaves a mark (gradients sent, parameters or activations gathered) and something
    else comes once per step. Else a step is as long as a micro-step. A long gap before the first gradient is no proof:
    it may be a data loader. If micro-steps show, sending in each of them is ZeRO-2, and sending in the last only is
    ZeRO-1.
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
        # Only ZeRO-3 gathers in every micro-step, however it treats gradients.
        shows |= stage is Stage.zero3 and training.has_marker
    if stage is Stage.unknown:
        # Tensor parallelism alone is one call over and over, unless another call interrupts it.
        tensor = training.tensor_parallel and (training.has_marker or training.partitioned_activations)
        return Shown(stage, None, training.partitioned_activations, tensor)
    if stage in (Stage.zero1, Stage.zero2) and not training.broadcasts:
        stage = Stage.zero1_or_2
        if accumulates and shows:
            stage = Stage.zero2 if training.sends_each else Stage.zero1
    accumulation = accumulates if shows else None
    return Shown(stage, accumulation, training.partitioned_activations, training.tensor_parallel)
