"""What calls say that plans save: microseconds per step against NCCL's own choice, and by group of promotions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import BASELINE
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.steps.step_trial import group_of
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Floats, Ints

LEAST_SHARE_CHANGED: Final = 1e-3


class OfPlan(NamedTuple):
    """What one plan saves."""

    saved_us: float
    """Per step."""
    runs_us: dict[str, float]
    """By group, how long those of its promotions run per step that this plan has."""


class _Group(NamedTuple):
    keys: Ints
    slots: Ints
    saved_us: Floats
    runs_us: Floats


class CallSavings:
    """Worked out anew by `refresh`, as evidence and incumbents change; cheap per plan in between."""

    def __init__(self) -> None:
        self._base = np.zeros(0, np.int64)
        """Slot of NCCL's own choice, by key."""
        self._rates: Floats = np.zeros(0)
        self._groups: dict[str, _Group] = {}

    def group_us(self, name: str) -> float:
        """What a group's promotions save per step when all are in force."""
        group = self._groups.get(name)
        return float(group.saved_us.sum()) if group is not None else 0.0

    def refresh(self, states: Sequence[KeyState], evidence: Evidence, rates: Floats) -> dict[str, float]:
        """Look at the incumbents again.

        Args:
            states: of all keys, by key index.
            evidence: of the regime in force.
            rates: calls per step, by key index.

        Returns:
            Groups with other settings than before, and the share of the group's time that these run.
        """
        known = len(self._base)
        more = [evidence.slot(state.index, BASELINE) for state in states[known:]]
        self._base = np.concatenate([self._base, np.array(more, np.int64)])
        self._rates = np.concatenate([rates, np.zeros(max(0, len(states) - len(rates)))])
        members: dict[str, list[KeyState]] = {}
        for state in states:
            if not state.incumbent.is_baseline:
                members.setdefault(group_of(state), []).append(state)
        before, self._groups = self._groups, {}
        changed = {}
        for name, promoted in members.items():
            keys = np.array([state.index for state in promoted], np.int64)
            slots = np.array([evidence.slot(state.index, state.incumbent) for state in promoted], np.int64)
            saved_us = self._saved_us(keys, slots, evidence)
            runs_us = self._runs_us(keys, slots, evidence)
            self._groups[name] = _Group(keys, slots, saved_us, runs_us)
            if name in before:
                is_new = ~np.isin(slots, before[name].slots)
                share = float(runs_us[is_new].sum()) / max(float(runs_us.sum()), 1e-9)
                if share > LEAST_SHARE_CHANGED:
                    changed[name] = share
        return changed

    def of_plan(self, slots: Ints, evidence: Evidence) -> OfPlan:
        """What the plan that asked every key to run `slots` saves."""
        keys = np.arange(min(len(slots), len(self._base)))
        saved_us = float(self._saved_us(keys, slots[keys], evidence).sum())
        runs_us = {
            name: float(group.runs_us[slots[group.keys] == group.slots].sum()) for name, group in self._groups.items()
        }
        return OfPlan(saved_us, runs_us)

    def running_us(self, states: Sequence[KeyState], evidence: Evidence) -> float:
        """How long the incumbents of these keys run per step; nothing where the key is younger than `refresh`."""
        known = [state for state in states if state.index < len(self._rates)]
        keys = np.array([state.index for state in known], np.int64)
        slots = np.array([evidence.slot(state.index, state.incumbent) for state in known], np.int64)
        return float(self._runs_us(keys, slots, evidence).sum())

    def _runs_us(self, keys: Ints, slots: Ints, evidence: Evidence) -> Floats:
        result: Floats = np.nan_to_num(np.exp(evidence.centre(slots))) * self._rates[keys]
        return result

    def _saved_us(self, keys: Ints, slots: Ints, evidence: Evidence) -> Floats:
        """Per step, nothing where it is not known or more is taken: what trials cost is accounted for apart."""
        saved_us = np.exp(evidence.centre(self._base[keys])) - np.exp(evidence.centre(slots))
        result: Floats = np.maximum(np.nan_to_num(saved_us), 0.0) * self._rates[keys]
        return result
