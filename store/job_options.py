"""Options of `zerotune launch` for one job's tuning; ranks send them to the daemon that tunes the job."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MOST_STEPS: Final = 2**31 - 1


class JobOptions(msgspec.Struct, frozen=True):
    """Options that the user leaves out follow the daemon's."""

    shadow: bool = False
    """The daemon decides, and no decision takes effect."""
    tune_steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """Steps after which the daemon tries nothing any more; 0: left out."""
    compare_steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """Steps that are compared with NCCL's own choice, whatever that costs; 0: left out."""
    own_steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)] = 0
    """Steps at the beginning that run NCCL's own choice; different starts are compared by them."""
    chunk_sizes: bool = False
    """NCCL asks the plugin for chunk sizes, so that a plan may name some."""


NO_OPTIONS: Final = JobOptions()
