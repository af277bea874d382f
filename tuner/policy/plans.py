"""Plans and what is remembered of each: which setting every key was asked to run, and why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from store.records import BASELINE, Candidate, Plan, PlanRow, size_class_range
from tuner.features import Ints
from tuner.policy.evidence import Evidence
from tuner.policy.step_trial import Variant
from tuner.policy.trial import KeyState

KEPT_EPOCHS: Final = 64


class PlanInForce(NamedTuple):
    """What the keys known at that time were asked to run, and which of that was exploration."""

    candidates: list[Candidate]
    is_trial: npt.NDArray[np.bool_]
    plan: Plan
    n_changes: int
    """Promotions so far when the plan was made."""
    variant: Variant | None = None
    """A whole-plan variant on trial, judged by step time."""


class PlanBook:
    """The latest plans by epoch; epoch 0 is the empty plan that every job starts with."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, PlanInForce] = OrderedDict()
        self._plans[0] = PlanInForce([], np.zeros(0, np.bool_), Plan(0), 0)
        self._slots: dict[int, Ints] = {}

    def get(self, epoch: int) -> PlanInForce | None:
        """The plan of `epoch`; None when it is another daemon's, or too old."""
        return self._plans.get(epoch)

    def add(self, entry: PlanInForce, active: int) -> None:
        """Remember a plan; forget the oldest ones, but never the active one."""
        self._plans[entry.plan.epoch] = entry
        while len(self._plans) > KEPT_EPOCHS:
            oldest = next(old for old in self._plans if old != active)
            del self._plans[oldest]
            self._slots.pop(oldest, None)

    def slots(self, epoch: int, states: Sequence[KeyState], evidence: Evidence) -> Ints:
        """Evidence slot of every key under the plan of `epoch`; keys it does not know ran the baseline."""
        slots = self._slots.get(epoch)
        if slots is None or len(slots) < len(states):
            candidates = self._plans[epoch].candidates
            asked = [*candidates, *[BASELINE] * (len(states) - len(candidates))]
            slots = np.array([evidence.slot(at, one) for at, one in enumerate(asked)], dtype=np.int64)
            self._slots[epoch] = slots
        return slots

    def forget_slots(self) -> None:
        """Evidence is another regime's: slots are to be found anew."""
        self._slots.clear()


def rows_of(states: Sequence[KeyState], candidates: Sequence[Candidate], model_id: str) -> tuple[PlanRow, ...]:
    """Rows of a plan: one per key that is not left to NCCL, over its whole size class."""
    return tuple(
        PlanRow(
            state.key.communicator,
            state.key.collective,
            state.key.phase,
            *size_class_range(state.key.size_class),
            candidate,
            state.trial_reason if candidate == state.trial else state.incumbent_reason,
            model_id,
        )
        for state, candidate in zip(states, candidates, strict=True)
        if not candidate.is_baseline
    )


def unchanged(entry: PlanInForce | None, candidates: Sequence[Candidate], gathers_after_step: bool) -> bool:
    """Whether a new plan would say what `entry` says already."""
    if entry is None or entry.plan.gathers_after_step != gathers_after_step:
        return False
    padding = [BASELINE] * (len(candidates) - len(entry.candidates))
    return [*entry.candidates, *padding] == list(candidates)
