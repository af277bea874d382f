"""What `zerotune launch` was told of one job's tuning; it travels with the job, to whichever daemon tunes it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MOST_STEPS: Final = 2**31 - 1


class JobOptions(msgspec.Struct, frozen=True):
    """What is not told is as the daemon has it."""

    shadow: bool = False
    """Nothing that is decided is carried out."""
    tune_steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """After so many steps nothing is tried any more; 0: not told."""
    compare_steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """So many steps are compared with NCCL's own choice, whatever that loses; 0: not told."""
    own_steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """So many steps at the beginning run NCCL's own choice, by which starts are compared."""
    chunk_sizes: bool = False
    """NCCL asks the plugin for chunk sizes, so that a plan may name some."""


NOTHING_TOLD: Final = JobOptions()
