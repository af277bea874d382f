"""What an explanation says, as values: `words` prints them."""

from __future__ import annotations

from typing import Any

import msgspec

from ....store.misaligned import Misaligned
from ....store.records import BASELINE, CommunicatorClass, Decision, DecisionKey, MissingEvidence, Stage
from ....store.records.lateness import Lateness
from ...learning.policy.overrides import Override
from ..jobs.listing import Gain


class Head(msgspec.Struct, frozen=True):
    """Whose decisions are explained."""

    job_id: str
    fabric_id: str
    emulated: str
    """Name of the fabric that the NCCL was emulated on; empty: it was real."""
    n_ranks: int
    communicators: list[CommunicatorClass]
    """Communicator classes of the collectives that the store has of it."""
    stage: str = Stage.unknown.name
    """The kind of training that they show."""
    missing_evidence: MissingEvidence = MissingEvidence.nothing
    """Evidence without which no stage can be named."""
    name: str = ""
    """What people call the job."""
    baseline: str = ""
    """The tuner whose choice runs where no plan applies; empty: it is NCCL's own."""
    lateness: Lateness = Lateness()
    """Which of its ranks collectives waited for."""
    misaligned: tuple[Misaligned, ...] = ()
    """Sizes that NCCL would run faster if they were padded, the largest first."""
    n_damaged: int = 0
    """Measurements whose rows in the store are damaged: left out of all but the counts of calls."""
    gain: Gain | None = None
    """Of its steps as a whole, as `zerotune jobs` has it."""
    n_impossible_times: int = 0
    """Collectives to which NCCL gave the times of others: not measured, and not counted."""
    frozen_since: int = 0
    """The step since which nothing new was tried; 0: that did not come."""
    in_shadow: str = ""
    """What would have changed, had it not run in shadow; empty: it did not."""


class Explanation(msgspec.Struct, frozen=True):
    """One decision key: what runs there, what else is possible, and why."""

    key: DecisionKey
    collective: str
    phase: str
    min_bytes: int
    max_bytes: int
    decision: Decision | None
    """The decision that put the setting in force, without its alternatives; None where nothing was decided yet."""
    alternatives: list[dict[str, Any]]
    """Every candidate: what was expected of it at the key's last decision, with the 90 % interval
    (`predicted_us`, `predicted_low_us`, `predicted_high_us`, None for what ran without having been weighed;
    `is_guess` where nothing that this job measured had a part in that); what the last decision had seen of it
    (`measured_us`, `n_measurements`) and had spent on trying it (`spent_us`); what was found (`note`), when
    (`noted_step`, `noted_epoch`), and whether another setting has come into force since (`is_past`); and what is
    in the store by now: median and calls of this job (`job_median_us`, `n_this_job`) and of all jobs on the fabric
    (`median_us`, `n_all_jobs`).
    """
    is_guess: bool
    """Whether the expectations are starting guesses."""
    decided_at_s: float | None
    """When the last decision was taken; None: never."""
    n_explored: int
    """Candidates that were on trial in some step."""
    spent_us: float
    """What exploring this key had cost by the last decision, as the budget counts it."""
    history: list[str]
    setting: str = str(BASELINE)
    """The setting in force: that of the last decision of which a plan was adopted."""
    not_adopted: str = ""
    """The last decision, where no step has run under a plan with it."""
    on_trial: str = ""
    """The candidate whose trial the last decision began."""
    is_trial_to_come: bool = False
    """Whether no step has yet run under a plan with `on_trial`."""
    model_id: str = ""
    """Whose predictions the expectations rest on; empty: NCCL's own cost."""
    job_history: list[str] = []
    """Decisions that concern all keys: changes of training's pace and of the network, other plans on trial."""
    job: Head | None = None
    calls_per_step: float | None = None
    """Mean calls in the steps that were measured; None where none was."""
    step_percent: float | None = None
    """What its calls take under the setting in force, in percent of a step's time, hidden by computation or not."""
    saved_us: float | None = None
    """Time saved per step against NCCL's own choice, by measured medians; negative: lost; None: not measured."""
    saved_percent: float | None = None
    """`saved_us` in percent of a step's time under NCCL's own choice, as `zerotune jobs` has it where it knows one."""
    runs_as: str = Override.incumbent.name
    """Why it runs what it runs, as far as that is decided key by key: the name of an `Override`."""
    is_quiet: bool = False
    """NCCL's own choice is in force there: nothing is saved or lost, whatever was tried."""
