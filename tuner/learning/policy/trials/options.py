"""What may be tried at one key, and which of it is worth it now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.evidence.outlook import Outlook
from zerotune.tuner.learning.policy.memory import MemoryGate
from zerotune.tuner.learning.policy.settings import PolicySettings
from zerotune.tuner.learning.policy.trials.admission import (
    Option,
    Room,
    best_option,
    unpaid_odds,
)
from zerotune.tuner.learning.policy.trials.budget import Budget
from zerotune.tuner.learning.policy.trials.price import Price
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Floats


class Options:
    """Asks what NCCL offers, what memory and the budget allow, and what is expected of it."""

    def __init__(
        self, settings: PolicySettings, outlook: Outlook, budget: Budget, memory: MemoryGate, price: Price
    ) -> None:
        self._settings = settings
        self._outlook = outlook
        self._budget = budget
        self._memory = memory
        self._price = price

    def best(
        self, state: KeyState, states: list[KeyState], evidence: Evidence, room_us: float
    ) -> Option | None:
        """The best trial of one key that fits.

        Args:
            state: the key.
            states: of all keys, by key index.
            evidence: of the regime in force.
            room_us: what is left of the budget.

        Returns:
            The trial; None if there is none.
        """
        opinion = self._outlook.posterior(state, states, evidence)
        incumbent = evidence.find(state.index, state.incumbent)
        if incumbent is None:
            return None
        usual = evidence.find(state.index, state.usual)
        options = self._outlook.fields.of(state).options

        def ask(is_paid: bool) -> Option | None:
            return best_option(
                options,
                opinion,
                state.usual,
                evidence.log_us(incumbent if usual is None else usual),
                self._price.stakes(state, 0.0 if is_paid else self._unpaid_odds()),
                Room(room_us, self._budget.advance_us),
                self._settings,
                lambda candidate: self.may_try(state, candidate),
                {*state.ties, *state.retired},
                self._memory.least_gain(options, state.n_channels),
                self._connections_us(state, options),
            )

        found = ask(self._budget.is_paid)
        if self._budget.is_paid and found is not None and found.risk_us > self._budget.gained_us:
            found = ask(is_paid=False)  # gains pay for what was tried so far, not for this
        return found

    def may_try(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether a trial of it may begin at all."""
        if candidate in (state.incumbent, state.lead) or candidate in state.banned:
            return False
        if candidate.n_channels > state.max_channels:
            return False
        return self.may_run(state, candidate)

    def may_run(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether NCCL offers it and device memory allows it."""
        if not self._outlook.fields.offers(state.family, candidate):
            return False
        return self._memory.allows(self.what_runs(state, candidate), state.key.communicator)

    def would_connect(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether it would take memory that it has not taken yet, or may not run at all."""
        return not self._memory.is_connected(candidate, state.key.communicator) or not self.may_run(state, candidate)

    @staticmethod
    def what_runs(state: KeyState, candidate: Candidate) -> Candidate:
        """The setting that is meant, NCCL's own where that is known."""
        return state.default_setting or candidate if candidate.is_baseline else candidate

    def _unpaid_odds(self) -> float:
        budget = self._budget
        if not budget.training_us:
            return 0.0
        return unpaid_odds(budget.n_steps, self._price.calls_us * budget.n_steps / budget.training_us)

    def _connections_us(self, state: KeyState, options: Sequence[Candidate]) -> Floats | float:
        """What each option would cost once, to be connected."""
        if not self._price.connection_us:
            return 0.0
        place = state.key.communicator
        is_new = [not self._memory.is_connected(self.what_runs(state, option), place) for option in options]
        return self._price.connection_us * np.array(is_new, np.float64)
