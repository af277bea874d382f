"""Plans: what every key was asked to run under each, which is in force, which on its way, and when the next is due."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from zerotune.store.records import BASELINE, Candidate, FirstLook, Plan, PlanRow, size_class_range
from zerotune.tuner.learning.policy.keys import KeyState
from zerotune.tuner.learning.policy.memory import covering
from zerotune.tuner.learning.policy.observations import ENOUGH, HORIZON_STEPS, CallEvidence
from zerotune.tuner.learning.policy.risk import FIRST_LOOK_STEPS, Withdrawal
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.modeling.features import Ints

KEPT_EPOCHS: Final = 64
PLAN_EXPIRES_AFTER: Final = 1000


class Variant(NamedTuple):
    """Another setting for some keys, by key index, that is judged by step time."""

    name: str
    changes: Mapping[int, Candidate]
    worst_us: float = 0.0
    """By how much a step's calls take longer at worst (90 %)."""


class PlanInForce(NamedTuple):
    """What the keys known at that time were asked to run, and which of that was exploration."""

    candidates: list[Candidate]
    is_trial: npt.NDArray[np.bool_]
    plan: Plan
    variant: Variant | None = None
    """What it runs instead of what keys would by themselves."""
    ahead: tuple[PlanRow, ...] = ()
    """What was asked for keys that were not known yet."""

    @property
    def lasts_for(self) -> int:
        """Boundaries for which it outlives its daemon: what is on trial must not run unwatched."""
        return 1 if self.variant is not None or self.is_trial.any() else PLAN_EXPIRES_AFTER

    def ending_by_itself(self, after: PlanInForce, keys: Sequence[int]) -> PlanInForce:
        """As a first look at these keys, whose rows come first in both plans, that gives way to the plan `after`."""
        n_rows, n_after = (sum(not plan.candidates[at].is_baseline for at in keys) for plan in (self, after))
        look = FirstLook(FIRST_LOOK_STEPS, n_rows, after.plan.rows[:n_after], after.plan.expires_after)
        return self._replace(plan=msgspec.structs.replace(self.plan, first_look=look))


class Plans:
    """The latest plans by epoch, from being offered to being in force; epoch 0 is the empty plan of every job's start.

    `withdrawal` is told how long they are on their way.
    """

    def __init__(self, withdrawal: Withdrawal, surrogate: Surrogate) -> None:
        self._withdrawal = withdrawal
        self._surrogate = surrogate
        self._plans: OrderedDict[int, PlanInForce] = OrderedDict()
        self._plans[0] = PlanInForce([], np.zeros(0, np.bool_), Plan(0))
        self._slots: dict[int, Ints] = {}
        self._slots_of: CallEvidence | None = None
        self._worked_out: tuple[list[Candidate], Ints] = [], np.zeros(0, np.int64)
        """What a plan asks of all keys, and their slots: most of it holds for the next one, too."""
        self.asked: list[Candidate] = []
        """What each key shall run now, by key index."""
        self._rows: list[PlanRow | None] = []
        self._active = 0
        """The epoch in force."""
        self.next = 1
        """The epoch of the next plan."""
        self.must_repeat = False
        """What was last asked for is not in force: it expired, was refused or got lost."""
        self.takes_over = False
        """The plan in force is of a daemon that is gone, and that has not been told yet."""
        self._offered: int | None = None
        """The last epoch of the plan on its way."""
        self._offered_at_step = 0
        self._steps_in_epoch = 0
        self._planned_at_step = -1

    @property
    def latest(self) -> PlanInForce | None:
        """The plan on its way, or else the one in force; None when that is another daemon's."""
        return self._plans.get(self._active if self._offered is None else self._offered)

    def get(self, epoch: int) -> PlanInForce | None:
        """The plan of `epoch`; None when it is another daemon's, or too old."""
        return self._plans.get(epoch)

    def add(self, entry: PlanInForce) -> None:
        """Remember a plan; forget the oldest ones, but never the active one."""
        self._plans[entry.plan.epoch] = entry
        while len(self._plans) > KEPT_EPOCHS:
            oldest = next(old for old in self._plans if old != self._active)
            del self._plans[oldest]
            self._slots.pop(oldest, None)

    def slots(self, epoch: int) -> Ints:
        """CallEvidence slot of every key under a plan; keys that it does not know ran the baseline."""
        evidence, n_keys = self._surrogate.evidence, len(self._surrogate.fields.states)
        if evidence is not self._slots_of:
            self._slots, self._slots_of, self._worked_out = {}, evidence, ([], np.zeros(0, np.int64))
        if epoch not in self._slots or len(self._slots[epoch]) < n_keys:
            candidates, (before, slots) = self._plans[epoch].candidates[:n_keys], self._worked_out
            asked = [*candidates, *[BASELINE] * (n_keys - len(candidates))]
            slots = np.append(slots, np.zeros(n_keys - len(slots), np.int64))
            differs = [key for key, (one, other) in enumerate(zip_longest(asked, before)) if one is not other]
            slots[differs] = [evidence.slot(key, asked[key]) for key in differs]
            self._slots[epoch], self._worked_out = slots, (asked, slots)
        return self._slots[epoch]

    def meet(self, state: KeyState) -> None:
        """A key was seen for the first time: note what each plan had asked of it already."""
        for entry in self._plans.values():
            row = covering(entry.ahead, state.key) if entry.ahead else None
            if row is not None:
                entry.candidates.extend([BASELINE] * (state.index - len(entry.candidates)))
                entry.candidates.append(row.candidate)

    def ask(self, changes: Mapping[int, Candidate]) -> bool:
        """Note what keys, by index, shall run from now on; whether anything differs from before."""
        states, model_id = self._surrogate.fields.states, self._surrogate.fields.knowledge.model_id
        missing = len(states) - len(self.asked)
        self.asked += [BASELINE] * missing
        self._rows += [None] * missing
        differs = False
        for index, candidate in changes.items():
            state = states[index]
            differs |= candidate != self.asked[index]
            self.asked[index] = candidate
            self._rows[index] = None if candidate.is_baseline else _row(state, candidate, model_id)
        return differs

    def rows(self, first: Sequence[int]) -> tuple[PlanRow, ...]:
        """What is asked for now; the rows of keys `first` come first."""
        others = self._rows.copy()
        for index in first:
            others[index] = None
        return (*filter(None, [self._rows[index] for index in first]), *filter(None, others))

    def step_ran(self, epoch: int) -> None:
        """A step has finished under `epoch`."""
        if epoch == self._active:
            self._steps_in_epoch += 1

    def adopted(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        if epoch == 0 < self._active:
            # They heard nothing of this daemon for so long that their plan expired.
            self._active, self._steps_in_epoch, self._offered = 0, 0, None
            self.must_repeat = True
            return
        if epoch < self._active:
            return
        self._active = epoch
        self._withdrawal.adopted(epoch, step)
        self._steps_in_epoch = 0
        if self._offered is not None and epoch >= self._offered:
            self._offered = None
        self.takes_over |= epoch >= self.next
        self.next = max(self.next, epoch + 1)

    def is_due(self, step: int) -> bool:
        """Whether the next plan may replace the one in force."""
        if self._offered is not None and not self._is_overdue(step):
            return False
        return self._steps_in_epoch > 0 and step != self._planned_at_step

    def plan_at(self, step: int) -> None:
        """A plan is thought of; what should have been adopted long ago is waited for no longer."""
        self._planned_at_step = step
        if self._offered is not None and self._is_overdue(step):
            self._offered, self.must_repeat = None, True
            if self._is_looking:
                self._withdrawal.looks_on()

    def offer(self, entry: PlanInForce, step: int) -> None:
        """`entry` is on its way to the ranks."""
        self.add(entry)
        self._offered, self._offered_at_step = entry.plan.last_epoch, step
        self.next = entry.plan.last_epoch + 1
        self._withdrawal.offered(entry.plan.epoch)

    def _is_overdue(self, step: int) -> bool:
        if self._is_looking:
            return self._steps_in_epoch > ENOUGH * self._withdrawal.first_steps  # it does not end by itself
        patience_steps = max(HORIZON_STEPS, 2.0 * self._withdrawal.steps)
        return step - self._offered_at_step >= patience_steps

    @property
    def _is_looking(self) -> bool:
        """A first look is in force."""
        in_force = self._plans.get(self._active)
        return in_force is not None and in_force.plan.first_look is not None


def _row(state: KeyState, candidate: Candidate, model_id: str) -> PlanRow:
    """A key's row over its whole size class."""
    key, reasons = state.key, {state.lead: state.lead_reason, state.trial: state.trial_reason}
    reason = reasons.get(candidate, state.incumbent_reason)
    place = key.communicator, key.collective, key.phase
    return PlanRow(*place, *size_class_range(key.size_class), candidate, reason, model_id)
