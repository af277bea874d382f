"""State of one key, and the verdict on a candidate that is on trial there."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Final

from store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey
from tuner.features import Floats
from tuner.policy.evidence import Evidence, radius

if TYPE_CHECKING:
    from tuner.policy.field import Field

Family = tuple[CommunicatorClass, Collective]
"""Keys of one family differ by phase and message size only."""

MAX_TRIAL_UNITS: Final = 40
"""A trial that is still open after so many steps of evidence is a tie: the incumbent stays."""
PROMISING: Final = 0.02


class Verdict(Enum):
    """What a trial's evidence says so far."""

    open = "open"
    better = "better"
    not_better = "not better"
    catastrophic = "catastrophic"


class KeyState:
    """Everything the policy remembers about one decision key; mutable, one per key and regime."""

    __slots__ = (
        "banned",
        "default_setting",
        "family",
        "field",
        "incumbent",
        "incumbent_kind",
        "incumbent_reason",
        "index",
        "is_trusted",
        "key",
        "max_channels",
        "message_bytes",
        "n_tried",
        "opinion",
        "previous",
        "quiet_until",
        "retired",
        "trial",
        "trial_reason",
    )

    def __init__(self, index: int, key: DecisionKey, message_bytes: float) -> None:
        self.index = index
        self.key = key
        self.family: Family = key.communicator, Collective(key.collective)
        self.message_bytes = message_bytes
        self.incumbent: Candidate = BASELINE
        self.incumbent_kind = "keep"
        self.incumbent_reason = "nothing measured beats NCCL's own choice yet"
        self.previous: Candidate = BASELINE
        """What ran before the incumbent was promoted."""
        self.trial: Candidate | None = None
        self.trial_reason = ""
        self.is_trusted = False
        """The trial comes from earlier runs: it runs at once and is verified on the side."""
        self.n_tried = 0
        self.default_setting: Candidate | None = None
        """What NCCL ran here when left alone."""
        self.max_channels = 64
        """More were found to slow training down."""
        self.banned: dict[Candidate, str] = {}
        self.retired: dict[Candidate, str] = {}
        self.field: Field | None = None
        """Its options with their starting guesses; None until they are asked for."""
        self.opinion: tuple[Floats, Floats] | None = None
        """Mean and spread (log) of every option when the key was last looked at."""
        self.quiet_until = 0

    def reopen(self) -> None:
        """Forget verdicts; what runs now stays until evidence speaks against it."""
        self.trial = None
        self.is_trusted = False
        self.n_tried = 0
        self.max_channels = 64
        self.banned.clear()
        self.retired.clear()
        self.opinion = None
        self.quiet_until = 0


def compare(evidence: Evidence, first: int, second: int, alpha: float) -> tuple[float, float]:
    """(gain, half width): by how much (log) the second slot is faster than the first, always-valid."""
    sigma = float(evidence.sigma(evidence.key[[first]])[0])
    half = radius(evidence.units(first), evidence.units(second), sigma, alpha)
    return evidence.log_us(first) - evidence.log_us(second), half


def level(false_promotion: float, n_tried: int) -> float:
    """Error level of the n-th trial at a key (1-based); the levels of all trials sum to `false_promotion`."""
    return false_promotion / (n_tried * (n_tried + 1))


def judge(
    evidence: Evidence,
    state: KeyState,
    *,
    false_promotion: float,
    min_gain: float,
) -> tuple[Verdict, float, float]:
    """Verdict on the trial of `state`, with the measured gain (log) and its half width."""
    if state.trial is None:
        raise ValueError("no trial to judge")
    trial = evidence.find(state.index, state.trial)
    incumbent = evidence.find(state.index, state.incumbent)
    if trial is None or incumbent is None or not evidence.n_calls[trial] or not evidence.n_calls[incumbent]:
        return Verdict.open, 0.0, float("inf")
    alpha = 0.2 if state.is_trusted else level(false_promotion, max(1, state.n_tried))
    gain, half = compare(evidence, incumbent, trial, alpha)
    if gain - half > 0 and gain > min_gain:
        return Verdict.better, gain, half
    n_trial, n_incumbent = evidence.units(trial), evidence.units(incumbent)
    sigma = float(evidence.sigma(evidence.key[[trial]])[0])
    doubt = sigma * math.sqrt(1.0 / n_trial + 1.0 / n_incumbent)
    hopeless = gain + 1.6 * doubt < min_gain and n_trial >= 2
    clearly_slow = gain + 3.0 * doubt < -0.05
    if hopeless or clearly_slow or n_trial >= MAX_TRIAL_UNITS:
        return Verdict.not_better, gain, half
    return Verdict.open, gain, half
