"""The values of an explanation, which `words` prints."""

from __future__ import annotations

from typing import Any

import msgspec

from ....store.misaligned import Misaligned
from ....store.records import BASELINE, CommunicatorClass, Decision, DecisionKey, MissingEvidence, Stage
from ....store.records.lateness import Lateness
from ...learning.policy.overrides import Override
from ..jobs.listing import Gain


class Head(msgspec.Struct, frozen=True):
    """The job whose decisions are explained."""

    job_id: str
    fabric_id: str
    emulated: str
    """Name of the emulated fabric; empty: NCCL was real."""
    n_ranks: int
    communicators: list[CommunicatorClass]
    """Communicator classes of the job's collectives in the store."""
    stage: str = Stage.unknown.name
    """The kind of training that the collectives show."""
    missing_evidence: MissingEvidence = MissingEvidence.nothing
    """Evidence without which no stage can be named."""
    name: str = ""
    """The name that the user gave the job."""
    baseline: str = ""
    """The tuner whose choice is the baseline; empty: NCCL's own choice."""
    lateness: Lateness = Lateness()
    """Late ranks, and their effect."""
    misaligned: tuple[Misaligned, ...] = ()
    """Sizes that NCCL would run faster with padding, the largest first."""
    n_damaged: int = 0
    """Measurements in damaged rows, which only count as calls."""
    gain: Gain | None = None
    """Gain of whole steps, as `zerotune jobs` shows it."""
    n_impossible_times: int = 0
    """Collectives for which NCCL reported other collectives' times; they are neither measured nor counted."""
    frozen_since: int = 0
    """The step since which nothing new was tried; 0: exploring did not end."""
    in_shadow: str = ""
    """Changes that were not made because of --shadow; empty: the job ran without it."""


class Explanation(msgspec.Struct, frozen=True):
    """One decision key: its setting, the alternatives, and the reasons."""

    key: DecisionKey
    collective: str
    phase: str
    min_bytes: int
    max_bytes: int
    decision: Decision | None
    """The decision that put the setting in force, without its alternatives; None: nothing is decided yet."""
    alternatives: list[dict[str, Any]]
    """Every candidate. Expected time at the key's last decision with its 90 % interval: `predicted_us`,
    `predicted_low_us`, `predicted_high_us`, None if that decision did not consider it; `is_guess` if no measurement of
    this job contributed. Measurements of the last decision: `measured_us`, `n_measurements`; cost of trying it:
    `spent_us`. Finding: `note`, with `noted_step` and `noted_epoch`; `is_past` if another setting has come into force
    since. In the store now: median and calls of this job (`job_median_us`, `n_this_job`) and of all jobs on the fabric
    (`median_us`, `n_all_jobs`).
    """
    is_guess: bool
    """Whether the expectations are starting guesses."""
    decided_at_s: float | None
    """Time of the last decision; None: there is none."""
    n_explored: int
    """Candidates that were on trial in some step."""
    spent_us: float
    """Cost of exploring this key up to the last decision, as the budget counts it."""
    history: list[str]
    setting: str = str(BASELINE)
    """The setting in force: that of the last decision whose plan was adopted."""
    not_adopted: str = ""
    """The last decision, if no step has run under a plan with it."""
    on_trial: str = ""
    """The candidate whose trial the last decision began."""
    is_trial_to_come: bool = False
    """Whether no step has yet run under a plan with `on_trial`."""
    model_id: str = ""
    """The model behind the expectations; empty: NCCL's own cost."""
    job_history: list[str] = []
    """Decisions that concern all keys: training or the network became faster or slower, other plans on trial."""
    job: Head | None = None
    calls_per_step: float | None = None
    """Mean calls in measured steps; None: no step was measured."""
    step_percent: float | None = None
    """Time of its calls under the setting in force, in percent of a step, hidden or exposed."""
    saved_us: float | None = None
    """Time saved per step against NCCL's own choice, by measured medians; negative: lost; None: not measured."""
    saved_percent: float | None = None
    """`saved_us` in percent of a step under NCCL's own choice, which is that of `zerotune jobs` if known there."""
    runs_as: str = Override.incumbent.name
    """The reason for its setting, if that is decided key by key: the name of an `Override`."""
    is_quiet: bool = False
    """NCCL's own choice is in force: nothing is saved or lost, whatever was tried."""
