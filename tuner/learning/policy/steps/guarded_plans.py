"""Withdraws what is tried, leads or was promoted lately where steps are slower with it, and charges what it cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from zerotune.tuner.learning.policy.choice import Policy
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.plans import PlanBook, PlanInForce
from zerotune.tuner.learning.policy.steps.step_effects import StepEffects
from zerotune.tuner.learning.policy.steps.step_guard import Slow, StepGuard
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Ints

WATCH_STEPS: Final = 60
"""Steps in which what was promoted is still compared with what ran before it."""


class GuardedPlans:
    """Feeds a `StepGuard` with what each step ran beside what was usual.

    Args:
        policy: whose trials and leads pause and are withdrawn.
        plans: what ran under which epoch.
        rest_steps: a key whose trial slowed steps down tries nothing for this long, then for twice as long, and so on.
    """

    def __init__(self, policy: Policy, plans: PlanBook, rest_steps: int) -> None:
        self._policy = policy
        self._plans = plans
        self._rest_steps = rest_steps
        self._guard = StepGuard()
        self._usual: Ints = np.zeros(0, np.int64)
        """By key, the slot that what is tried there is compared with."""
        self._promoted: dict[int, tuple[int, int]] = {}
        """By key whose incumbent is still compared with the one before: its slot, and for how many steps by now."""

    @property
    def effects(self) -> StepEffects:
        """The regression of step time."""
        return self._guard.effects

    @property
    def is_asking(self) -> bool:
        """It is being found out what slows steps down."""
        return bool(self._guard.suspects)

    @property
    def shown(self) -> Mapping[int, int | None]:
        """What runs in the next step by key: one of the suspects, or what ran before it (None)."""
        return self._guard.shown

    @property
    def promoted(self) -> Collection[int]:
        """Keys at which something was promoted lately."""
        return self._promoted.keys()

    def reset(self) -> None:
        """All is asked anew."""
        self._guard.reset()
        self._usual = np.zeros(0, np.int64)
        self._promoted.clear()
        self._policy.show({}, ())

    def step(
        self,
        in_force: PlanInForce,
        step: int,
        duration_us: float,
        states: Sequence[KeyState],
        evidence: CallEvidence,
        unsaved_shift: float,
        *,
        arm: int | None = None,
    ) -> float | None:
        """Take in one step.

        Args:
            in_force: plan of the step.
            step: its number.
            duration_us: as recorded.
            states: of all keys, by key index.
            evidence: of the regime in force.
            unsaved_shift: as in `StepGuard.paced`.
            arm: name of the variant on trial, if there is one.

        Returns:
            By how much (log) training's own pace has changed, if it has.
        """
        explored = self._explored(in_force, states, evidence)
        if arm is not None:
            self._guard.compare(math.log(duration_us), explored, arm if in_force.variant is not None else None)
            return None
        shift = self._guard.paced(math.log(duration_us), explored, unsaved_shift)
        usual = {name: evidence.log_us(int(self._usual[key])) for name, key in explored.items()}
        slow_calls = {name for name in explored if evidence.log_us(name) > usual[name]}
        slow = self._guard.step(math.log(duration_us), explored, slow_calls)
        if slow is not None:
            self._withdraw(slow, step, states, evidence)
        self._show_suspects(states, evidence)
        return shift

    # ---- inside ---------------------------------------------------------------------------------------

    def _explored(self, in_force: PlanInForce, states: Sequence[KeyState], evidence: CallEvidence) -> dict[int, int]:
        """What a plan tries, and at which key."""
        n_keys = len(states)
        new = [evidence.slot(state.index, state.incumbent) for state in states[len(self._usual) :]]
        if new:
            self._usual = np.concatenate([self._usual, np.array(new, np.int64)])
        slots = self._plans.slots(in_force.plan.epoch, n_keys, evidence)[:n_keys]
        tries = self._policy.verified(n_keys)
        tries[: len(in_force.is_trial)] |= in_force.is_trial[:n_keys]
        differs = slots != self._usual
        if in_force.variant is not None:
            differs[[*in_force.variant.changes]] = False
        for key in np.flatnonzero(differs & ~tries).tolist():
            if self._promoted.get(key, (-1, 0))[0] != slots[key]:
                self._promoted[key] = int(slots[key]), 0
        for key, (slot, n_steps) in [*self._promoted.items()]:
            if evidence.candidates[slot] != states[key].incumbent:
                del self._promoted[key]  # something else has withdrawn it, or followed it
                continue
            self._promoted[key] = slot, n_steps + 1
            before = evidence.candidates[int(self._usual[key])]
            if n_steps >= WATCH_STEPS or not self._policy.surrogate.fields.offers(states[key].family, before):
                del self._promoted[key]
                self._guard.became_usual(slot, key)
                self._usual[key], differs[key] = slot, slot != slots[key]
        tried = np.flatnonzero(differs)
        return dict(zip(slots[tried].tolist(), tried.tolist(), strict=True))

    def _show_suspects(self, states: Sequence[KeyState], evidence: CallEvidence) -> None:
        """Let keys run in the next step what the experiment asks for."""
        over = []
        for name in self._guard.suspects:
            state, candidate = states[int(evidence.key[name])], evidence.candidates[name]
            if candidate not in (state.trial, state.lead, state.incumbent):
                over.append(name)
        self._guard.dismiss(over)
        may_try = self._policy.budget.remaining_us >= 0
        shown = {key: name if may_try else None for key, name in self._guard.shown.items()}
        self._policy.show(
            {key: evidence.candidates[self._usual[key] if name is None else name] for key, name in shown.items()},
            [
                key
                for key, name in shown.items()
                if name is not None and evidence.candidates[name] != states[key].incumbent
            ],
        )

    def _withdraw(self, slow: Slow, step: int, states: Sequence[KeyState], evidence: CallEvidence) -> None:
        self._policy.budget.spend(slow.excess_us)
        rest = len(slow.names) - 1
        words = f"steps were {slow.percent:.1f} % slower with it"
        if rest:
            words += f" and {rest} more that ran at the same time"
        words += f" than without ({slow.n_with} steps against {slow.n_without}, compared in turns)"
        for name in slow.names:
            state, candidate = states[int(evidence.key[name])], evidence.candidates[name]
            if candidate in (state.trial, state.lead, state.incumbent):
                state.n_withdrawn += 1
                if candidate == state.incumbent:
                    self._promoted.pop(state.index, None)
                    before = evidence.candidates[int(self._usual[state.index])]
                    self._policy.set_incumbent(state, before, "rollback", f"{candidate}: {words}")
                self._policy.withdraw(state, candidate, words, step + self._rest_steps * 2 ** (state.n_withdrawn - 1))
