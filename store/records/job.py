"""Jobs: what they train, how far that is known, and models that were fitted to them."""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

from .job_names import titled
from .lateness import Lateness
from .passages import Passages


class Stage(IntEnum):
    """The kind of workload that the sequence of collectives shows."""

    unknown = 0
    ddp = 1
    zero1 = 2
    zero2 = 3
    zero3 = 4
    zero1_or_2 = 5
    """Gradients are reduced once per gather of parameters, as stages 1 and 2 both do."""


class HowKnown(str, Enum):
    """The origin of the share of exposed communication."""

    unknown = "unknown"
    """The share may have any value."""
    estimated = "estimated"
    """Estimated from how much steps lengthen when calls take longer."""
    measured = "measured"
    """Measured as the time that computation waited for communication."""


class MissingEvidence(str, Enum):
    """Why the collectives of a job do not show its stage."""

    nothing = ""
    """Nothing is missing: the collectives show the stage."""
    no_collectives = "no_collectives"
    only_small = "only_small"
    """No collective is larger than a counter or a flag."""
    nothing_reduced = "nothing_reduced"
    """Large collectives gather or broadcast, and none reduces gradients."""
    one_size = "one_size"
    """All are all-reduces of one size: one bucket of gradients, several equal ones, or activations that are summed."""
    no_repetition = "no_repetition"
    """No two of the observed steps are alike."""
    ambiguous = "ambiguous"
    """The collectives fit several kinds of training, or none that is known."""
    too_early = "too_early"
    """Too few steps were observed."""
    incomplete = "incomplete"
    """A trace has collectives without a size or a kind."""


class Exposure(msgspec.Struct, frozen=True):
    """The share of communication that computation waits for: the ends of its 90 % interval."""

    how: HowKnown = HowKnown.unknown
    least: float = 0.0
    most: float = 1.0


class ModelRecord(msgspec.Struct, frozen=True):
    """A fitted model as the store keeps it: safe bytes, never a pickle, and what they depend on."""

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
    """The model's row in the store is damaged: only its name and fabric are known."""


class JobRecord(msgspec.Struct, frozen=True):
    """One job as the store keeps it; `ended_at_s` is None while it runs, or if nobody saw its end."""

    job_id: str
    fabric_id: str
    n_ranks: int
    stage: Stage
    started_at_s: float
    ended_at_s: float | None = None
    name: str = ""
    is_lost: bool = False
    """Its ranks fell silent, or their daemon ended before they did."""
    passages: Passages = Passages()
    """Collectives that ran by the tuner's decision, and those that it could not decide."""
    lateness: Lateness = Lateness()
    """Which of its ranks collectives waited for."""
    failure: str = ""
    """The first rank whose script ended by an exception, and that exception's type; empty: none is known."""
    training: str = ""
    """The same text for all starts of one training on the same hardware; empty: starts are not compared."""
    environment: str = ""
    """Variables set at its start, as a trial or permanently, as `NAME=VALUE` separated by spaces."""

    @property
    def title(self) -> str:
        """The job's name and id, for people."""
        return titled(self.job_id, self.name)
