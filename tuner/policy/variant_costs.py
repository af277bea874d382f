"""What variants of the whole plan may cost by what is known of calls, and which of them the budget has room for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from store.records import Candidate
from tuner.policy.admission import RISK_QUANTILE
from tuner.policy.channel_caps import CapSearch, Fallback, cheapest_within
from tuner.policy.evidence import Evidence
from tuner.policy.step_trial import Variant
from tuner.policy.trial import KeyState

if TYPE_CHECKING:
    from tuner.policy.choice import Policy

RISK_SHARE: Final = 0.5
"""Share of the remaining budget that a variant may put at risk."""


class VariantCosts:
    """Asks the policy for its outlook, its rates and what is left of its budget."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def advance(self, search: CapSearch, states: list[KeyState], evidence: Evidence) -> None:
        """Go on with the search for a bounded number of keys."""

        def fallbacks(state: KeyState, caps: list[int]) -> dict[int, Fallback]:
            incumbent = evidence.find(state.index, state.incumbent)
            if incumbent is None:
                return {}

            def may_run(option: Candidate) -> bool:
                allowed = self._policy.memory.allows(option, state.n_channels, state.key.communicator)
                return allowed and option not in state.banned

            mean, spread = state.opinion or self._policy.outlook.posterior(state, states, evidence)
            worst = np.minimum(mean + RISK_QUANTILE * spread, mean + 6.0)
            now_us = math.exp(evidence.log_us(incumbent))
            found = {}
            options = self._policy.outlook.fields.of(state).options
            for cap, at in cheapest_within(options, mean, may_run, caps).items():
                extra_us = (math.exp(worst[at]) - now_us) * float(self._policy.rates[state.index])
                if math.isfinite(extra_us):
                    found[cap] = Fallback(options[at], extra_us)
            return found

        search.advance(fallbacks)

    def fitting(self, search: CapSearch) -> tuple[list[Variant], bool]:
        """Variants whose risk fits the budget; and whether all of them do."""
        return search.variants(self._affordable_us())

    def fits(self, variant: Variant, states: list[KeyState], evidence: Evidence) -> bool:
        """Whether the budget has room for a variant of settings that were all measured before."""
        extra_us = 0.0
        for index, candidate in variant.changes.items():
            now = evidence.find(index, states[index].incumbent)
            then = evidence.find(index, candidate)
            if now is not None and then is not None:
                extra = math.exp(evidence.log_us(then)) - math.exp(evidence.log_us(now))
                extra_us += max(0.0, extra) * float(self._policy.rates[index])
        return extra_us <= self._affordable_us()

    def _affordable_us(self) -> float:
        """What a variant may cost per step: only what computation waits for can cost training time."""
        n_steps = 2.0 * self._policy.steps_at_risk * self._policy.charged_share
        return RISK_SHARE * max(0.0, self._policy.budget.remaining_us) / n_steps
