"""What calls and the channels they hold cost training, learned from steps as plans differ: one linear regression.

Of what a group of keys takes longer, training feels the part that nothing hides, its *exposure*: all of it where it is
waited for, next to nothing behind long computation. And a collective that runs beside computation takes multiprocessors
from it: a *toll* for each channel and the share of a step for which it is held, in part the machine's, in part each
group's own, as channels cost nothing where nobody computes. A Kalman filter over log step times follows all of these
and the level, which may drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import BASELINE
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.steps.kalman_filter import KalmanFilter
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Floats, Ints

SHARED_TOLL: Final = 0.007
"""How much (log) one channel may slow computation down, before any step has spoken: 16 of them about a ninth."""
OWN_TOLL: Final = 0.012
"""How far a group's toll may be from what all have in common."""
EXPOSURE: Final = 0.35
"""How far a group's exposure may be from that of all communication, which is measured."""
EXPOSURE_MEASURED_TO: Final = 0.05
DRIFT: Final = 0.001
"""How far (log) the level of steps moves from one to the next."""
CLIP: Final = 3.0
"""A step further off than this many standard deviations is pulled in."""


class Load(NamedTuple):
    """What a group's calls take of a step, or how much more."""

    calls_us: float = 0.0
    held_us: float = 0.0
    """Channels times how long they are held."""


class TrainingModel:
    """Exposure and toll of groups of keys, by name."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._belief = KalmanFilter()
        """The level; the toll of all groups; then of each group its exposure and toll, as they differ from all's."""
        self._belief.add(1.0, SHARED_TOLL**2)
        self._n_steps = 0

    def know_groups(self, shares: Mapping[str, float]) -> None:
        """Groups and the share of a step they run: where one is more exposed than all together, others are less."""
        if all(name in self._places for name in shares):
            return
        in_all = self._design({name: Load(share) for name, share in shares.items()}, 1.0)
        self._belief.observe(in_all, 0.0, EXPOSURE_MEASURED_TO)

    def step(self, duration_us: float, loads: Mapping[str, Load], exposed_share: float, noise: float) -> None:
        """Take in a step.

        Args:
            duration_us: of the step.
            loads: by group, how much more its calls take than with NCCL's own choices.
            exposed_share: of all communication, between 0 and 1.
            noise: standard deviation of a step (log).
        """
        belief = self._belief
        value = math.log(duration_us) - exposed_share * sum(load.calls_us for load in loads.values()) / duration_us
        design = self._design(loads, duration_us)
        design[0] = 1.0
        if self._n_steps == 0:
            belief.mean[0] = value
        self._n_steps += 1
        belief.covariance[0, 0] += DRIFT**2
        belief.observe(design, value, noise, clip=CLIP)

    def expected(self, loads: Mapping[str, Load], step_us: float, exposed_share: float) -> tuple[float, float]:
        """What a step gains by these loads.

        Args:
            loads: how much more the calls of each group take.
            step_us: of a step without them.
            exposed_share: of all communication, between 0 and 1.

        Returns:
            Mean and standard deviation (log, positive = faster).
        """
        differs, variance = self._belief.expected(self._design(loads, step_us))
        as_if_all = exposed_share * sum(load.calls_us for load in loads.values()) / step_us
        return -math.log1p(max(-0.5, as_if_all)) - differs, math.sqrt(variance)

    def of_group(self, name: str, exposed_share: float) -> tuple[float, float, float]:
        """What a microsecond of a group's calls costs: whatever the channels; for each channel, with its doubt."""
        design = self._design({name: Load(0.0, 1.0)}, 1.0)
        toll, variance = self._belief.expected(design)
        exposure = exposed_share + float(self._belief.mean[self._places[name]])
        return min(max(exposure, 0.0), 1.0), toll, math.sqrt(variance)

    def _design(self, loads: Mapping[str, Load], step_us: float) -> Floats:
        places = [self._place(name) for name in loads]
        design = np.zeros(len(self._belief.mean))
        for place, load in zip(places, loads.values(), strict=True):
            design[1] += load.held_us / step_us
            design[place : place + 2] = load.calls_us / step_us, load.held_us / step_us
        return design

    def _place(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = self._belief.add(EXPOSURE**2, OWN_TOLL**2)
        return self._places[name]


class PlanLoads:
    """What plans' calls take of a step according to measurements; `refresh` now and then, cheap in between."""

    def __init__(self) -> None:
        self._base: Ints = np.zeros(0, np.int64)
        """Slot of NCCL's own choice, by key."""
        self._rates: Floats = np.zeros(0)
        self._groups: list[str] = []
        self._group: Ints = np.zeros(0, np.int64)
        """Of each key, its place among `_groups`."""

    def refresh(self, states: Sequence[KeyState], evidence: CallEvidence, rates: Floats) -> None:
        """Take in new keys.

        Args:
            states: of all keys, by key index.
            evidence: of the regime in force.
            rates: calls per step, by key index.
        """
        for state in states[len(self._base) :]:
            if group_of(state) not in self._groups:
                self._groups.append(group_of(state))
        self._base = np.array([evidence.slot(state.index, BASELINE) for state in states], np.int64)
        self._group = np.array([self._groups.index(group_of(state)) for state in states], np.int64)
        self._rates = np.concatenate([rates, np.zeros(max(0, len(states) - len(rates)))])

    def of_plan(self, slots: Ints, states: Sequence[KeyState], evidence: CallEvidence) -> tuple[float, dict[str, Load]]:
        """What a plan changes of a step against NCCL's own choices.

        Args:
            slots: that it asked every key to run.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            What its faster calls save together (us), and how much more it loads steps with, by group.
        """
        n_keys = min(len(slots), len(self._base))
        differ = np.flatnonzero(slots[:n_keys] != self._base[:n_keys])
        now, base, rates = slots[differ], self._base[differ], self._rates[differ]
        now_us, base_us = (np.exp(evidence.centre(some)) for some in (now, base))
        is_known = np.isfinite(now_us + base_us)
        more_us = np.where(is_known, now_us - base_us, 0.0) * rates
        ran, left = (self._channels(some, states, evidence) for some in (now, base))
        held_us = np.where(is_known, ran * now_us - left * base_us, 0.0) * rates
        by_group = (np.bincount(self._group[differ], some, len(self._groups)) for some in (more_us, held_us))
        loads = {name: Load(*load) for name, *load in zip(self._groups, *by_group, strict=True) if any(load)}
        return float(np.maximum(-more_us, 0.0).sum()), loads

    def _channels(self, slots: Ints, states: Sequence[KeyState], evidence: CallEvidence) -> Ints:
        return np.array(
            [states[int(evidence.key[at])].channels_of(evidence.candidates[at]) for at in slots.tolist()], np.int64
        )

    def running_us(self, states: Sequence[KeyState], evidence: CallEvidence) -> dict[str, float]:
        """How long the incumbents of each group run per step."""
        known = states[: len(self._base)]
        slots = np.array([evidence.slot(state.index, state.incumbent) for state in known], np.int64)
        us = np.nan_to_num(np.exp(evidence.centre(slots))) * self._rates[: len(known)]
        return dict(zip(self._groups, np.bincount(self._group[: len(known)], us, len(self._groups)), strict=True))


def group_of(state: KeyState) -> str:
    """Keys whose calls cost training alike."""
    return f"{state.key.collective.name} in {state.key.phase.name}"
