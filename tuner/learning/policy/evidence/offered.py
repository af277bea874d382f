"""Settings that NCCL turns out not to offer: a live cost table may come after a key was tuned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from zerotune.store.records import BASELINE
from zerotune.tuner.learning.policy.choice import Event, Policy
from zerotune.tuner.learning.policy.trials.trial import KeyState

NOT_OFFERED: Final = "NCCL does not offer it here"


def withdraw_what_is_not_offered(policy: Policy, states: Sequence[KeyState], report: Callable[[Event], None]) -> None:
    """Withdraw trials, leads and incumbents that NCCL does not offer any more, and ban them.

    Args:
        policy: whose settings are looked at.
        states: of all keys.
        report: takes decisions.
    """
    offers = policy.outlook.fields.offers
    for state in states:
        for setting in (state.trial, state.lead):
            if setting is not None and not offers(state.family, setting):
                policy.drop(state, setting, NOT_OFFERED, ban=True)
        if not offers(state.family, state.incumbent):
            words = f"{state.incumbent}: {NOT_OFFERED}"
            state.banned[state.incumbent] = NOT_OFFERED
            policy.set_incumbent(state, BASELINE, "rollback", words)
            report(Event(state, BASELINE, "rollback", words))
