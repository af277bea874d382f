"""Jobs: what they train, how far that is known, and models that were fitted to them."""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

from .job_names import titled
from .lateness import Lateness
from .passages import Passages


class Stage(IntEnum):
    """What kind of workload the sequence of collectives shows."""

    unknown = 0
    ddp = 1
    zero1 = 2
    zero2 = 3
    zero3 = 4
    zero1_or_2 = 5
    """Gradients leave once per gather of parameters, as in both."""


class HowKnown(str, Enum):
    """What it is based on that a share of communication is exposed."""

    unknown = "unknown"
    """It may be any share."""
    estimated = "estimated"
    """From how steps get longer where calls do."""
    measured = "measured"
    """From what computation waited for."""


class MissingEvidence(str, Enum):
    """Why the collectives of a job do not show its stage."""

    nothing = ""
    """Nothing is missing: they show it."""
    no_collectives = "no_collectives"
    only_small = "only_small"
    """No collective is larger than a counter or a flag."""
    nothing_reduced = "nothing_reduced"
    """Much is gathered or broadcast, and no gradient is sent."""
    one_size = "one_size"
    """All are all-reduces of one size: one bucket of gradients, several equal ones, or activations that are summed."""
    no_repetition = "no_repetition"
    """No two steps were seen that are alike."""
    ambiguous = "ambiguous"
    """Several kinds of training, or none of those known, send what was seen."""
    too_early = "too_early"
    """So few steps show nothing yet, be it what is there or what is not."""
    incomplete = "incomplete"
    """A trace has collectives whose size or kind it does not tell."""


class Exposure(msgspec.Struct, frozen=True):
    """The share of communication that computation waits for: the least and the most that it may be (90 %)."""

    how: HowKnown = HowKnown.unknown
    least: float = 0.0
    most: float = 1.0


class ModelRecord(msgspec.Struct, frozen=True):
    """A fitted model at rest: safe bytes, never a pickle, and what they depend on."""

    name: str
    fabric_id: str
    blob: bytes
    versions: dict[str, str]
    """Versions of the features, of scikit-learn ...; a mismatch means refit."""
    training_hash: str
    error: float | None
    """Error on held-out data, in the model's own unit; None when there was too little data."""
    created_at_s: float
    is_damaged: bool = False
    """Its row in the store is damaged: only its name and fabric are known."""


class JobRecord(msgspec.Struct, frozen=True):
    """One job as the store remembers it; `ended_at_s` None while it runs, or where nobody saw its end."""

    job_id: str
    fabric_id: str
    n_ranks: int
    stage: Stage
    started_at_s: float
    ended_at_s: float | None = None
    name: str = ""
    """What `launch --name` called it."""
    is_lost: bool = False
    """Its ranks fell silent, or the daemon that heard them ended before they did."""
    passages: Passages = Passages()
    """What was seen to pass the tuner by, and what it decided."""
    lateness: Lateness = Lateness()
    """Which of its ranks collectives waited for."""
    failure: str = ""
    """The first rank whose script ended by an exception, and that exception's type; empty: none is known of."""
    training: str = ""
    """What all starts of the same training on the same hardware have in common; empty: nobody compares them."""
    environment: str = ""
    """Variables that it was started with, for trial or for good, as `NAME=VALUE` with spaces between."""

    @property
    def title(self) -> str:
        """How it is shown to people."""
        return titled(self.job_id, self.name)
