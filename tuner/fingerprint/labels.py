"""Limits of the evidence that a sequence of collectives gives on its training.

If two kinds of training enqueue the same sequence, no recogniser can separate them. The label is then the set of both:
`zero1_or_2` for a stage, None ("cannot tell") for accumulation and tensor parallelism. `ambiguity.py` has single
sequences that show less than their kind of training usually does. docs/design/stage-fingerprint.md lists them all.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ...store.records import Stage

STAGES: Final = (Stage.unknown, Stage.ddp, Stage.zero1, Stage.zero2, Stage.zero3, Stage.zero1_or_2)
ACCUMULATIONS: Final = (False, True, None)
N_OUTPUTS: Final = len(STAGES) + len(ACCUMULATIONS) + 2
"""Number of scores: for the stages, accumulation, partitioned activations and tensor parallelism."""


class Shown(msgspec.Struct, frozen=True):
    """The recognised kind. None, for accumulation or tensor parallelism: the calls are the same with and without."""

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
_ACCUMULATIONS_OF: Final = {
    Stage.unknown: ((None,), (None,)),
    Stage.ddp: ((True, None), (False, True, None)),
    Stage.zero1: ((True, None), (False, True)),
    Stage.zero2: ((True,), (True,)),
    Stage.zero3: ((False, True, None), (False, True, None)),
    Stage.zero1_or_2: ((None,), (False, None)),
}
"""By stage, the accumulations that a sequence can show without and with partitioned activations."""

POSSIBLE: Final = tuple(
    Shown(stage, accumulation, partitioned, tensor_parallel)
    for stage, accumulations in _ACCUMULATIONS_OF.items()
    for partitioned, tensor_parallel in ((False, False), (False, True), (True, True))
    for accumulation in accumulations[partitioned]
)
"""All kinds of training; activations are partitioned only among ranks that compute them together."""
