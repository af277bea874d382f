"""What variants of the whole plan may cost by what is known of calls, and which of them the budget has room for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.steps import step_trial
from zerotune.tuner.learning.policy.steps.channel_caps import FITTED, CapSearch, Fallback, cheapest_within, least_cost
from zerotune.tuner.learning.policy.steps.step_trial import GroupChange, Variant, group_of
from zerotune.tuner.learning.policy.trials.admission import RISK_QUANTILE
from zerotune.tuner.learning.policy.trials.training_cost import TrainingCost
from zerotune.tuner.learning.policy.trials.trial import KeyState

if TYPE_CHECKING:
    from zerotune.tuner.learning.policy.choice import Policy

RISK_SHARE: Final = 0.5
"""Share of the remaining budget that a variant may put at risk."""

FEW_STEPS: Final = 4.0
"""Where what runs can be withdrawn within this many steps, variants may run settings that were never measured."""


class VariantCosts:
    """Asks the policy for its outlook, its traffic and what is left of its budget."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def advance(
        self, search: CapSearch, states: list[KeyState], evidence: Evidence, training_cost: TrainingCost
    ) -> None:
        """Go on with the search for a bounded number of keys.

        Args:
            search: for settings with fewer channels.
            states: of all keys, by key index.
            evidence: of the regime in force.
            training_cost: what calls and channels cost training.
        """

        def fallbacks(state: KeyState, caps: list[int]) -> dict[int, Fallback]:
            incumbent = evidence.find(state.index, state.incumbent)
            if incumbent is None:
                return {}

            def may_run(option: Candidate) -> bool:
                return self._policy.options.may_run(state, option) and option not in state.banned

            mean, spread = state.opinion or self._policy.outlook.posterior(state, states, evidence)
            worst = np.minimum(mean + RISK_QUANTILE * spread, mean + 6.0)
            now_us = math.exp(evidence.log_us(incumbent))
            found = {}
            options = self._policy.outlook.fields.of(state).options
            picked = cheapest_within(options, mean, may_run, caps)
            costs = training_cost.of_group(group_of(state), self._policy.price.exposed_share)
            if costs is not None:
                # Of many guesses the lowest is too low: a doubt counts against it.
                fitted = least_cost(options, mean + spread, costs, (state.n_channels, now_us), may_run)
                picked |= {} if fitted is None else {FITTED: fitted}
            for cap, at in picked.items():
                rate = float(self._policy.price.traffic.per_step[state.index])
                then_us, worst_us = math.exp(mean[at]), math.exp(worst[at])
                released_us = state.n_channels * now_us - options[at].n_channels * then_us
                if math.isfinite(worst_us):
                    found[cap] = Fallback(
                        options[at], (then_us - now_us) * rate, (worst_us - now_us) * rate, released_us * rate
                    )
            return found

        search.advance(fallbacks)

    def fits(self, variant: Variant, evidence: Evidence) -> bool:
        """Whether the budget has room for a variant; never for what nobody has measured, where that runs for long."""
        is_short = self._policy.price.steps_at_risk <= FEW_STEPS
        is_known = is_short or all(evidence.has_measured(index, one) for index, one in variant.changes.items())
        return is_known and variant.risk_us <= self._affordable_us()

    def may_run(self, variant: Variant, states: list[KeyState]) -> bool:
        """Whether device memory allows a variant."""
        settings = {
            (self._policy.options.what_runs(states[index], candidate), states[index].key.communicator)
            for index, candidate in variant.changes.items()
        }
        return self._policy.memory.allows_all(settings)

    def audits(self, states: list[KeyState], evidence: Evidence) -> list[Variant]:
        """Groups of promotions back at NCCL's own choice; all of that was measured."""
        found = []
        for audit in step_trial.audits(states):
            by_group = self.measured(audit, states, evidence)
            risk_us = max(0.0, sum(change.extra_us for change in by_group.values()))
            found.append(audit._replace(by_group=by_group, risk_us=risk_us))
        return found

    def measured(self, variant: Variant, states: list[KeyState], evidence: Evidence) -> dict[str, GroupChange]:
        """What a variant changes, as calls show.

        Args:
            variant: on trial.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            Change by group of keys; settings that were not measured are left out.
        """
        by_group: dict[str, GroupChange] = {}
        for index, candidate in variant.changes.items():
            state = states[index]
            now, then = (evidence.find(index, setting) for setting in (state.incumbent, candidate))
            if now is None or then is None:
                continue
            now_us, then_us = math.exp(evidence.log_us(now)), math.exp(evidence.log_us(then))
            if not math.isfinite(now_us + then_us):
                continue
            rate = float(self._policy.price.traffic.per_step[index])
            before = by_group.get(group_of(state), GroupChange())
            by_group[group_of(state)] = GroupChange(
                before.extra_us + rate * (then_us - now_us),
                before.released_us + rate * (state.n_channels * now_us - state.channels_of(candidate) * then_us),
            )
        return by_group

    def _affordable_us(self) -> float:
        """What a variant may cost per step: only what computation waits for can cost training time."""
        n_steps = 2.0 * self._policy.price.steps_at_risk * self._policy.price.charged_share
        return RISK_SHARE * max(0.0, self._policy.budget.remaining_us) / n_steps
