"""State of one key, and the verdict on a candidate that is on trial there."""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

from zerotune.agent.nccl.catalog import CHANNEL_LADDER
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey
from zerotune.tuner.learning.policy.evidence.evidence import Evidence, radius_of_pairs
from zerotune.tuner.learning.policy.evidence.options_field import Field
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
WORTH_GOING_ON: Final = 0.001
"""A trial ends when what it may still gain (log, expected) is less."""


class Verdict(Enum):
    """What a trial's evidence says so far."""

    open = "open"
    better = "better"
    not_better = "not better"
    tie = "tie"
    catastrophic = "catastrophic"


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
        "is_trusted",
        "key",
        "lead",
        "lead_hope",
        "max_channels",
        "message_bytes",
        "n_tried",
        "n_withdrawn",
        "numbers",
        "opinion",
        "previous",
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
        self.previous: Candidate = BASELINE
        """What ran before the incumbent was promoted."""
        self.trial: Candidate | None = None
        self.trial_reason = ""
        self.lead: Candidate | None = None
        """Believed to be faster than the incumbent, but not beyond doubt: runs while that is being found out."""
        self.lead_hope = NO_HOPE
        """By how much (log) earlier jobs measured the lead to be faster than the incumbent, and the standard
        deviation of that.
        """
        self.hope = (0.0, 1.0)
        """By how much (log) the trial should be faster than `usual`, and the standard deviation of that."""
        self.is_trusted = False
        """The trial comes from earlier runs: it runs at once and is verified on the side."""
        self.trial_until_units = 0.0
        """Units of evidence on the trial at which it is called a tie."""
        self.n_withdrawn = 0
        """How often steps spoke against what was promoted here."""
        self.n_tried = 0
        """Different candidates that were on trial."""
        self.numbers: dict[Candidate, int] = {}
        """Number of each of them, in the order they were tried, from 1."""
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

    def channels_of(self, candidate: Candidate) -> int:
        """What a setting runs with here, as far as that is known; else 0."""
        if candidate.n_channels or self.default_setting is None:
            return candidate.n_channels
        return self.default_setting.n_channels

    def reopen(self) -> None:
        """Forget verdicts; what runs now stays until evidence speaks against it."""
        self.trial = self.lead = None
        self.is_trusted = False
        self.n_tried = self.n_withdrawn = 0
        self.max_channels = MOST_CHANNELS
        self.banned.clear()
        self.retired.clear()
        self.ties.clear()
        self.numbers.clear()
        self.opinion = None
        self.quiet_until = 0


def compare(evidence: Evidence, first: int, second: int, alpha: float) -> tuple[float, float]:
    """By how much the second slot of a key is faster than the first; always-valid.

    Args:
        evidence: of the regime in force.
        first: slot.
        second: slot of the same key.
        alpha: total probability of being wrong, 0 to 1.

    Returns:
        Gain (log) and half width of its interval.
    """
    gain, pairs, sigma = evidence.contrast(first, second)
    n_th = evidence.n_th_window(first)
    return gain, radius_of_pairs(pairs, sigma, alpha / n_th**2)


def proven_gain(evidence: Evidence, first: int, second: int, gain: float, least: float, alpha: float) -> float | None:
    """Whether a gain is there in neighbouring steps, too.

    Args:
        evidence: of the regime in force.
        first: slot.
        second: slot of the same key.
        gain: of the second over the first (log).
        least: gain (log) that is asked for.
        alpha: total probability of being wrong, 0 to 1.

    Returns:
        Gain (log); None where it is not more than `least`.
    """
    return gain if gain > least and evidence.agrees_nearby(first, second, gain) else None


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
    """Verdict on the trial of a key.

    Args:
        evidence: of the regime in force.
        state: the key.
        false_promotion: probability of a wrong promotion.
        min_gain: least gain (log) that is worth a change.

    Returns:
        Verdict, measured gain (log) and half width of its interval.

    Raises:
        ValueError: it has no trial.
    """
    if state.trial is None:
        raise ValueError("no trial to judge")
    trial = evidence.find(state.index, state.trial)
    incumbent = evidence.find(state.index, state.incumbent)
    if trial is None or incumbent is None or not evidence.n_calls[trial] or not evidence.n_calls[incumbent]:
        return Verdict.open, 0.0, float("inf")
    alpha = 0.2 if state.is_trusted else level(false_promotion, state.numbers.get(state.trial, 1))
    gain, half = compare(evidence, incumbent, trial, alpha)
    if (proven := proven_gain(evidence, incumbent, trial, gain, max(half, min_gain), alpha)) is not None:
        return Verdict.better, proven, half
    n_trial = evidence.units(trial)
    hoped, std = belief(evidence, state)
    if expected_gain(hoped - min_gain, std) < WORTH_GOING_ON:
        return Verdict.not_better, gain, half
    if n_trial >= state.trial_until_units and not state.is_trusted:
        return Verdict.tie if odds(evidence, state, min_gain) > 0.5 else Verdict.not_better, gain, half
    return Verdict.open, gain, half


def judge_lead(
    evidence: Evidence, state: KeyState, *, false_promotion: float, min_gain: float
) -> tuple[Verdict, float, float]:
    """Verdict on the lead of a key against its incumbent.

    What earlier jobs measured may keep a lead, but only what this job measures promotes it.

    Args:
        evidence: of the regime in force.
        state: the key.
        false_promotion: probability of a wrong promotion.
        min_gain: least gain (log) that is worth a change.

    Returns:
        Verdict, measured gain (log) and half width of its interval.

    Raises:
        ValueError: it has no lead.
    """
    if state.lead is None:
        raise ValueError("no lead to judge")
    lead, incumbent = evidence.find(state.index, state.lead), evidence.find(state.index, state.incumbent)
    if lead is None or incumbent is None:
        return Verdict.open, 0.0, float("inf")
    alpha = level(false_promotion, state.numbers.get(state.lead, 1))
    gain, half = compare(evidence, incumbent, lead, alpha)
    if (proven := proven_gain(evidence, incumbent, lead, gain, max(half, min_gain), alpha)) is not None:
        return Verdict.better, proven, half
    believed, _ = weighed(state.lead_hope, evidence, incumbent, lead)
    return Verdict.open if believed > 0 else Verdict.not_better, gain, half


def odds(evidence: Evidence | None, state: KeyState, min_gain: float) -> float:
    """Probability that the trial of a key is faster than what usually runs there.

    Args:
        evidence: of the regime in force; None: before anything was measured.
        state: the key.
        min_gain: by more than this (log).

    Returns:
        0 to 1.
    """
    hoped, std = belief(evidence, state)
    return 0.5 * math.erfc(-(hoped - min_gain) / (std * math.sqrt(2.0)))


def belief(evidence: Evidence | None, state: KeyState) -> tuple[float, float]:
    """By how much (log) the trial of `state` is faster than what runs else, and the standard deviation of that.

    What was hoped for and what was measured so far, weighed by their precisions.
    """
    if evidence is None or state.trial is None:
        return state.hope
    trial, usual = evidence.find(state.index, state.trial), evidence.find(state.index, state.usual)
    return weighed(state.hope, evidence, usual, trial)


def weighed(
    hope: tuple[float, float], evidence: Evidence, first: int | None, second: int | None
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
