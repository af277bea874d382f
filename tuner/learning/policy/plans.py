"""Plans: each one's settings, which is in force, which is on its way, and when the next is due."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ....store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    NextStage,
    Plan,
    PlanRow,
    size_class_range,
)
from ....store.step_times import NEIGHBOURS
from ...modeling.features import Ints
from .keys import KeyState
from .memory import covering
from .observations import ENOUGH, HORIZON_STEPS, CallEvidence
from .overrides import TENTATIVE, Override, Setting
from .risk import RollbackLatency
from .surrogate import Surrogate

Overrides = npt.NDArray[np.int8]

KEPT_EPOCHS: Final = 64
FADING: Final = 0.5
"""The share of its time after which a plan on trial is renewed."""


class Variant(NamedTuple):
    """Other settings for some keys, by key index, judged by step time."""

    name: str
    changes: Mapping[int, Candidate]
    worst_us: float = 0.0
    """Upper 90 % bound of the extra time of a step's calls."""


class PlanInForce(NamedTuple):
    """A plan with the requested setting of every key known at that time, and the reason."""

    candidates: list[Candidate]
    overrides: Overrides
    """`Override` by key index, shape [n_keys]."""
    plan: Plan
    variant: Variant | None = None
    """The variant that it runs."""
    unseen_rows: tuple[PlanRow, ...] = ()
    """Rows for keys that were not known yet."""

    @property
    def is_control(self) -> bool:
        """Whether it is a control window: NCCL's own choice runs everywhere."""
        return bool((self.overrides == Override.control).any())

    @property
    def tentative(self) -> list[int]:
        """Keys, by index, whose settings must end by themselves unless the daemon renews them."""
        found: list[int] = np.flatnonzero(TENTATIVE[self.overrides]).tolist()
        return found

    def why(self, n_keys: int) -> Overrides:
        """`Override` of all keys known now, shape [n_keys]; keys that were not known run NCCL's own choice."""
        return np.append(self.overrides, np.full(n_keys - len(self.overrides), Override.incumbent, np.int8))

    def followed_by(self, after: PlanInForce, n_steps: int) -> PlanInForce:
        """The same plan with the further stage `after`, which follows by itself after `n_steps` of the last stage."""
        before, rows = self.plan.at_last().rows, after.plan.rows
        n_same = 0
        while n_same < min(len(before), len(rows)) and before[-1 - n_same] == rows[-1 - n_same]:
            n_same += 1
        stage = NextStage(n_steps, len(before) - n_same, rows[: len(rows) - n_same])
        return self._replace(plan=msgspec.structs.replace(self.plan, then=(*self.plan.then, stage)))


class Plans:
    """The latest plans by epoch, on their way or in force; epoch 0 is the empty plan of every job's start.

    `latency` learns how long plans are on their way.
    """

    def __init__(self, latency: RollbackLatency, surrogate: Surrogate) -> None:
        self._latency = latency
        self._surrogate, self._tables = surrogate, surrogate.tables
        self._plans: OrderedDict[int, PlanInForce] = OrderedDict()
        self._plans[0] = PlanInForce([], np.zeros(0, np.int8), Plan(0))
        self._slots: dict[int, Ints] = {}
        self._slots_of: CallEvidence | None = None
        self._worked_out: tuple[list[Candidate], Ints] = [], np.zeros(0, np.int64)
        """The last plan's settings of all keys, and their slots; most are the same in the next plan."""
        self.asked: list[Candidate] = []
        """The requested setting of each key, by key index."""
        self._overrides: list[Override] = []
        self._rows: list[PlanRow | None] = []
        self._alike: dict[tuple[CommunicatorClass, Collective, int], list[int]] = {}
        """Indices of keys that differ only by phase."""
        self._active = 0
        """The epoch in force."""
        self._active_since = 0
        self._looks: dict[int, int] = {}
        """Epochs of stages that end by themselves, such as first looks and control windows, and their steps."""
        self._rests: dict[int, int] = {}
        """Epochs of stages that follow a trial if nobody renews it, and the steps until then."""
        self.next = 1
        self.must_repeat = False
        """The last plan is not in force: it expired, was refused or got lost."""
        self.takes_over = False
        """The plan in force came from a daemon that has ended; `propose` has not recorded that yet."""
        self._offered: int | None = None
        """The last epoch of the plan on its way."""
        self._offered_at_step = 0
        self._steps_in_epoch = 0
        self._planned_at_step = -1

    @property
    def latest(self) -> PlanInForce | None:
        """The plan on its way, or else the one in force; None if that came from another daemon."""
        return self._plans.get(self._active if self._offered is None else self._offered)

    def get(self, epoch: int) -> PlanInForce | None:
        """The plan of `epoch`; None if it came from another daemon or is too old."""
        return self._plans.get(epoch)

    def add(self, entry: PlanInForce) -> None:
        """Remember a plan; forget the oldest ones, but never the active one."""
        self._plans[entry.plan.epoch] = entry
        while len(self._plans) > KEPT_EPOCHS:
            oldest = next(old for old in self._plans if old not in (0, self._active))
            del self._plans[oldest]
            self._looks.pop(oldest, None)
            self._slots.pop(oldest, None)

    def slots(self, epoch: int) -> Ints:
        """Slot (`CallEvidence`) of every key under a plan; keys that it does not know ran the baseline."""
        evidence, n_keys = self._surrogate.evidence, len(self._tables.states)
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
        """A key was seen for the first time: note which setting each plan had for it already."""
        for entry in self._plans.values():
            row = covering(entry.unseen_rows, state.key) if entry.unseen_rows else None
            if row is not None:
                entry.candidates.extend([BASELINE] * (state.index - len(entry.candidates)))
                entry.candidates.append(row.candidate)

    def row_of_other_phases(self, key: DecisionKey) -> PlanRow | None:
        """The row that applies to a key not known yet, because it holds in any phase."""
        alike = self._alike.get((key.communicator, key.collective, key.size_class), [])
        is_one = len({self.asked[index] for index in alike}) == 1
        return self._rows[alike[0]] if is_one else None

    @property
    def overrides(self) -> Overrides:
        """Why each key runs its requested setting."""
        return np.array(self._overrides, np.int8)

    def setting(self, index: int) -> Setting:
        """The requested setting of one key, and the reason."""
        return Setting(self.asked[index], self._overrides[index])

    def ask(self, changes: Mapping[int, Setting]) -> bool:
        """Request these settings, by key index, from now on; return whether any differs from before."""
        states, model_id = self._tables.states, self._tables.knowledge.model_id
        for state in states[len(self.asked) :]:
            place = state.key.communicator, state.key.collective, state.key.size_class
            self._alike.setdefault(place, []).append(state.index)
            self.asked.append(BASELINE)
            self._overrides.append(Override.incumbent)
            self._rows.append(None)
        differs = False
        for index, (candidate, why) in changes.items():
            state = states[index]
            differs |= candidate != self.asked[index]
            self.asked[index], self._overrides[index] = candidate, why
            self._rows[index] = None if candidate.is_baseline else _row(state, candidate, model_id)
        return differs

    def rows(self, first: Iterable[int]) -> tuple[PlanRow, ...]:
        """Rows of the requested settings; those of keys `first` (by index) come first.

        Keys that differ only by phase and have the same setting get one row for any phase: it needs no history of the
        communicator.
        """
        states = self._tables.states
        rows: dict[object, PlanRow] = {}
        for index in (*first, *range(len(self._rows))):
            row = self._rows[index]
            if row is None:
                continue
            key = states[index].key
            place = key.communicator, key.collective, key.size_class
            if all(self.asked[other] == row.candidate for other in self._alike[place]):
                if place not in rows:
                    rows[place] = msgspec.structs.replace(row, phase=None)
            else:
                rows[index] = row
        return tuple(rows.values())

    def step_ran(self, epoch: int) -> None:
        """A step has finished under `epoch`."""
        if epoch == self._active:
            self._steps_in_epoch += 1

    def adopted(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        if epoch == 0 < self._active:
            # The ranks heard nothing from this daemon for so long that their plan expired.
            self._active, self._steps_in_epoch, self._offered = 0, 0, None
            self.must_repeat = True
            return
        if epoch < self._active:
            return
        self._active, self._active_since = epoch, step
        # A trial's plan ended by itself because it was not renewed in time: it is offered again.
        self.must_repeat |= epoch in self._rests
        self._latency.adopted(epoch, step)
        self._steps_in_epoch = 0
        if self._offered is not None and epoch >= self._offered:
            self._offered = None
        self.takes_over |= epoch >= self.next
        self.next = max(self.next, epoch + 1)

    def is_fading(self, step: int) -> bool:
        """Whether the plan in force runs a trial and will soon end by itself."""
        lasts_steps = self._rests.get(self._active + 1)
        return lasts_steps is not None and step - self._active_since >= FADING * lasts_steps

    def is_due(self, step: int) -> bool:
        """Whether the next plan may replace the one in force."""
        if self._offered is not None and not self._is_overdue(step):
            return False
        before = self._plans.get(self._active - 1)
        least_steps = NEIGHBOURS if before is not None and before.is_control else 1
        return self._steps_in_epoch >= least_steps and step != self._planned_at_step

    def plan_at(self, step: int) -> None:
        """A plan is considered at `step`; the wait for an overdue plan ends."""
        self._planned_at_step = step
        if self._offered is not None and self._is_overdue(step):
            self._offered, self.must_repeat = None, True
            if self._active in self._looks:
                self._latency.looks_on()

    def offer(self, entry: PlanInForce, step: int) -> None:
        """`entry` is on its way to the ranks."""
        self.add(entry)
        # Wait for the stage that the daemon wants, not for the one that follows if nobody renews it.
        rests_at = entry.plan.last_epoch if entry.plan.last_epoch in self._rests else None
        self._offered = entry.plan.last_epoch if rests_at is None else rests_at - 1
        self._offered_at_step = step
        self.next = entry.plan.last_epoch + 1
        self._latency.offered(entry.plan.epoch)

    def follow(self, after: PlanInForce, after_steps: int) -> None:
        """The stage before `after`, such as a first look, ends by itself after this many steps; `after` follows."""
        self._looks[after.plan.epoch - 1] = after_steps
        self.add(after)

    def rest(self, resting: PlanInForce, after_steps: int) -> None:
        """The stage with trials ends by itself after this many steps; `resting` follows."""
        self._rests[resting.plan.epoch] = after_steps
        self._rests = {epoch: n_steps for epoch, n_steps in self._rests.items() if epoch >= self._active}
        self.add(resting)

    def _is_overdue(self, step: int) -> bool:
        if self._active in self._looks:
            return self._steps_in_epoch > ENOUGH * self._looks[self._active]  # it does not end by itself
        patience_steps = max(HORIZON_STEPS, 2.0 * self._latency.steps)
        return step - self._offered_at_step >= patience_steps


def _row(state: KeyState, candidate: Candidate, model_id: str) -> PlanRow:
    """A key's row over its whole size class."""
    key, reasons = state.key, {state.provisional: state.provisional_reason, state.trial: state.trial_reason}
    reason = reasons.get(candidate, state.incumbent_reason)
    place = key.communicator, key.collective, key.phase
    return PlanRow(*place, *size_class_range(key.size_class), candidate, reason, model_id)
