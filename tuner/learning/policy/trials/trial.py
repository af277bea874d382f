"""State of one key, and the verdict on a candidate that is on trial there."""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

from zerotune.agent.nccl.catalog import CHANNEL_LADDER
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence, radius_of_pairs
from zerotune.tuner.learning.policy.evidence.options_field import Field
from zerotune.tuner.learning.policy.settings import PolicySettings
from zerotune.tuner.modeling.features import Floats

Family = tuple[CommunicatorClass, Collective]
"""Keys of one family differ by phase and message size only."""

MOST_CHANNELS: Final = CHANNEL_LADDER[-1]
MAX_TRIAL_UNITS: Final = 8
"""A trial that is still open after this many more steps of evidence is a tie: others come first now. What is probably
faster leads from then on and so goes on being measured; what is not is tried again once it looks better.
"""
NO_HOPE: Final = (0.0, math.inf)
"""Nothing is known of a lead but what this job measures."""
VERIFIED: Final = 0.2
"""Probability of a wrong promotion of what earlier jobs proved."""
WORTH_GOING_ON: Final = 0.001
"""A trial ends when what it may still gain (log, expected) is less."""


class TrialVerdict(Enum):
    """What a trial's evidence says so far."""

    open = "open"
    better = "better"
    not_better = "not better"
    tie = "tie"


class KeyState:
    """Everything the policy remembers about one decision key; mutable, one per key and regime."""

    __slots__ = (
        "banned",
        "default_setting",
        "family",
        "field",
        "hope",
        "incumbent",
        "incumbent_kind",
        "incumbent_reason",
        "index",
        "key",
        "lead",
        "lead_hope",
        "lead_is_proven",
        "max_channels",
        "message_bytes",
        "n_withdrawn",
        "numbers",
        "opinion",
        "quiet_until",
        "retired",
        "ties",
        "trial",
        "trial_reason",
        "trial_until_units",
    )

    def __init__(self, index: int, key: DecisionKey, message_bytes: float) -> None:
        self.index = index
        self.key = key
        self.family: Family = key.communicator, Collective(key.collective)
        self.message_bytes = message_bytes
        self.incumbent: Candidate = BASELINE
        self.incumbent_kind = "keep"
        self.incumbent_reason = "nothing measured beats NCCL's own choice yet"
        self.trial: Candidate | None = None
        self.trial_reason = ""
        self.lead: Candidate | None = None
        """Believed to be faster than the incumbent, but not beyond doubt: runs while that is being found out."""
        self.lead_hope = NO_HOPE
        """By how much (log) earlier jobs measured the lead to be faster than the incumbent, and the standard
        deviation of that.
        """
        self.lead_is_proven = False
        """Earlier jobs proved the lead: it runs at once, is no exploration, and is verified on the side."""
        self.hope = (0.0, 1.0)
        """By how much (log) the trial should be faster than `usual`, and the standard deviation of that."""
        self.trial_until_units = 0.0
        """Units of evidence on the trial at which it is called a tie."""
        self.n_withdrawn = 0
        """How often steps spoke against what was promoted here."""
        self.numbers: dict[Candidate, int] = {}
        """Number, from 1, of each candidate that was on trial, in that order: later ones are allowed less error."""
        self.default_setting: Candidate | None = None
        """What NCCL ran here when left alone."""
        self.max_channels = MOST_CHANNELS
        """More were found to slow training down."""
        self.banned: dict[Candidate, str] = {}
        self.retired: dict[Candidate, str] = {}
        self.ties: dict[Candidate, str] = {}
        """Neither better nor worse so far: on trial again when nothing else is worth one."""
        self.field: Field | None = None
        """Its options with their starting guesses; None until they are asked for."""
        self.opinion: tuple[Floats, Floats] | None = None
        """Mean and spread (log) of every option when the key was last looked at."""
        self.quiet_until = 0

    @property
    def usual(self) -> Candidate:
        """What runs here when nothing is on trial."""
        return self.incumbent if self.lead is None else self.lead

    @property
    def n_channels(self) -> int:
        """What the incumbent runs with, as far as that is known; else 0."""
        return self.channels_of(self.incumbent)

    @property
    def n_tried(self) -> int:
        """Different candidates that were on trial."""
        return len(self.numbers)

    def channels_of(self, candidate: Candidate) -> int:
        """What a setting runs with here, as far as that is known; else 0."""
        if candidate.n_channels or self.default_setting is None:
            return candidate.n_channels
        return self.default_setting.n_channels

    def reopen(self) -> None:
        """Forget verdicts; what runs now stays until evidence speaks against it."""
        self.trial = self.lead = None
        self.n_withdrawn = 0
        self.max_channels = MOST_CHANNELS
        self.banned.clear()
        self.retired.clear()
        self.ties.clear()
        self.numbers.clear()
        self.opinion = None
        self.quiet_until = 0


def judge(
    evidence: CallEvidence, state: KeyState, settings: PolicySettings, *, leads: bool = False
) -> tuple[TrialVerdict, float, float]:
    """TrialVerdict on the trial of a key, or on its lead, against its incumbent; always-valid.

    What earlier jobs measured may keep a lead, but only what this job measures promotes anything. The error levels of
    all that is tried at a key sum to `settings.false_promotion`.

    Args:
        evidence: of the regime in force.
        state: the key, which has a trial or lead.
        settings: of the policy.
        leads: whether the lead is judged.

    Returns:
        TrialVerdict, measured gain (log) and half width of its interval.
    """
    candidate = (state.lead if leads else state.trial) or BASELINE
    slot, incumbent = evidence.find(state.index, candidate), evidence.find(state.index, state.incumbent)
    if slot is None or incumbent is None or not evidence.n_calls[slot] or not evidence.n_calls[incumbent]:
        return TrialVerdict.open, 0.0, math.inf
    gain, pairs, sigma = evidence.contrast(incumbent, slot)
    n_th = state.numbers.get(candidate, 1)
    alpha = VERIFIED if leads and state.lead_is_proven else settings.false_promotion / (n_th * (n_th + 1))
    alpha /= evidence.n_th_window(incumbent) ** 2
    half = radius_of_pairs(pairs, sigma, alpha)
    if gain > max(half, settings.min_gain) and evidence.agrees_nearby(incumbent, slot, gain):
        return TrialVerdict.better, gain, half
    if leads:
        believed, _ = weighed(state.lead_hope, evidence, incumbent, slot)
        return TrialVerdict.open if believed > 0 else TrialVerdict.not_better, gain, half
    hoped, std = weighed(state.hope, evidence, evidence.find(state.index, state.usual), slot)
    if expected_gain(hoped - settings.min_gain, std) < WORTH_GOING_ON:
        return TrialVerdict.not_better, gain, half
    if evidence.units(slot) >= state.trial_until_units:
        return TrialVerdict.tie if hoped > settings.min_gain else TrialVerdict.not_better, gain, half
    return TrialVerdict.open, gain, half


def weighed(
    hope: tuple[float, float], evidence: CallEvidence, first: int | None, second: int | None
) -> tuple[float, float]:
    """Combine what was hoped for and what was measured, weighed by their precisions.

    Args:
        hope: expected gain (log) of the second slot over the first, and its standard deviation.
        evidence: of the regime in force.
        first: slot; None: not measured.
        second: slot; None: not measured.

    Returns:
        Gain (log) and its standard deviation.
    """
    hoped, std = hope
    if first is None or second is None:
        return hope
    measured, pairs, sigma = evidence.contrast(first, second)
    if not pairs:
        return hope
    variance = sigma**2 / pairs
    weight = 1.0 / std**2 + 1.0 / variance
    return (hoped / std**2 + measured / variance) / weight, 1.0 / math.sqrt(weight)


def expected_gain(edge: float, std: float) -> float:
    """E[max(0, edge + std * normal)]."""
    scaled = edge / std
    density = math.exp(-0.5 * scaled**2) / math.sqrt(2.0 * math.pi)
    return edge * 0.5 * math.erfc(-scaled / math.sqrt(2.0)) + std * density
