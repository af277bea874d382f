"""Which trial of a key, if any, may begin: worth it by expected improvement, and covered by what has been earned.

Two bounds on what a trial may cost until it can be withdrawn, in microseconds of training time: its *risk* (what it
costs on average over the cases in which it is slower and those in which it is not), which the trials of one window
share, and its *surprise* (the 99 % bound, within limits), to which a new job may add what its first steps will earn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.evidence.posterior import expected_excess, expected_improvement, odds_above
from zerotune.tuner.learning.policy.settings import PolicySettings
from zerotune.tuner.modeling.features import Floats

RISK_QUANTILE: Final = 1.3
SURPRISE_QUANTILE: Final = 2.33
MOST_SURPRISE: Final = 10.0
"""One trial in a hundred is slower than predicted by SURPRISE_QUANTILE standard deviations: that is expected, up to
MOST_SURPRISE times the present duration.
"""
UNPAID_ODDS: Final = 0.4
UNPAID_ODDS_STEPS: Final = 200
UNPAID_ODDS_SHARE: Final = 0.1
"""As long as exploration has cost more than it has gained, a trial must be as likely as UNPAID_ODDS to be faster:
perhaps nothing is to be gained, and what nobody has measured may be thirty times slower. Less will do in a job of more
than UNPAID_ODDS_STEPS, by the square, and where calls are less than UNPAID_ODDS_SHARE of a step.
"""


def unpaid_odds(n_steps: int, calls_share: float) -> float:
    """How likely a trial must be to be faster, while no gains pay for exploration.

    Args:
        n_steps: steps so far.
        calls_share: share of a step that is charged for calls.

    Returns:
        Probability.
    """
    of_steps = min(1.0, (UNPAID_ODDS_STEPS / max(1, n_steps)) ** 2)
    return UNPAID_ODDS * of_steps * min(1.0, calls_share / UNPAID_ODDS_SHARE)


class Option(NamedTuple):
    """A trial that may begin."""

    worth_us: float
    """Expected gain per step."""
    risk_us: float
    surprise_us: float
    candidate: Candidate
    hope: tuple[float, float]
    """By how much (log) it should be faster than what usually runs, and the standard deviation of that."""
    reason: str


class Room(NamedTuple):
    """What there is to lose."""

    budget_us: float
    """All that is left."""
    advance_us: float
    """What surprises may take of what will be earned."""


class Stakes(NamedTuple):
    """What depends on one key."""

    calls_per_step: float
    calls_at_risk: float
    """Calls that a trial may run before it can be withdrawn."""
    charged_share: float
    """Share of a call's extra time that the budget pays for."""
    least_odds: float = 0.0
    """A trial must be as likely as that to be faster."""


def best_option(
    options: Sequence[Candidate],
    opinion: tuple[Floats, Floats],
    usual: Candidate,
    log_now: float,
    stakes: Stakes,
    room: Room,
    settings: PolicySettings,
    may_try: Callable[[Candidate], bool],
    ties: Container[Candidate],
    least_gain: Floats | float = 0.0,
    once_us: Floats | float = 0.0,
) -> Option | None:
    """The best trial that fits, if any.

    Args:
        options: candidates, shape [n].
        opinion: mean (log us) and standard deviation (log) of each, shape [n].
        usual: what mostly runs at the key.
        log_now: its log duration.
        stakes: what a trial at the key puts at risk.
        room: what there is to lose.
        settings: of the policy.
        may_try: whether a candidate is allowed at all.
        ties: candidates that were on trial without a verdict; others go first.
        least_gain: what each option must gain (log) besides what the settings ask of all.
        once_us: what each option costs besides, once: to be connected.

    Returns:
        The trial; None if there is none.
    """
    mean, spread = opinion
    duration_us = math.exp(log_now)
    log_catastrophe = math.log(settings.catastrophic_ratio)
    improvement = expected_improvement(log_now - mean - settings.min_gain - least_gain, spread)
    exposed_us = duration_us * stakes.calls_at_risk * stakes.charged_share
    excess = expected_excess(mean - log_now, spread)
    risk_us = excess * exposed_us + once_us
    log_surprise = mean + SURPRISE_QUANTILE * spread - log_now
    surprise_us = np.expm1(np.clip(log_surprise, log_catastrophe, math.log(MOST_SURPRISE))) * exposed_us
    surprise_us += once_us - room.advance_us
    # Where that is doubtful the budget decides: what nobody looks at is never learned of.
    surely_slow = mean - spread - log_now > log_catastrophe
    is_worth_it = (improvement >= settings.worthwhile) & (odds_above(log_now - mean, spread) >= stakes.least_odds)
    order = [int(index) for index in np.argsort(-improvement) if is_worth_it[index]]
    for index in sorted(order, key=lambda index: options[index] in ties):
        if surely_slow[index] or not may_try(options[index]):
            continue
        if max(risk_us[index], surprise_us[index]) > room.budget_us:
            continue
        log_us, std = float(mean[index]), float(spread[index])
        low, high = math.exp(log_us - 1.645 * std), math.exp(log_us + 1.645 * std)
        return Option(
            worth_us=float(improvement[index]) * duration_us * stakes.calls_per_step,
            risk_us=float(risk_us[index]),
            surprise_us=float(surprise_us[index]),
            candidate=options[index],
            hope=(log_now - log_us, std),
            reason=f"predicted {math.exp(log_us):.1f} us (90 %: {low:.1f} to {high:.1f})"
            f" against {duration_us:.1f} us of {usual}",
        )
    return None
