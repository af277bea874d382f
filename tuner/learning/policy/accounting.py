"""Attributes measurements to the requested settings and turns them into evidence, charges and alarms."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....store.records import Candidate
from ...modeling.features import NO_CELL, Floats, Ints
from .change_detection import MIN_SHIFT, ChangeDetector, StepMeans
from .keys import Family, KeyState
from .observations import CLIP, ENOUGH, KEPT, LEAST_NOISE, Calls, StepSums, grouped
from .risk import LOG_CATASTROPHE, Budget
from .surrogate import Surrogate

Flags = npt.NDArray[np.bool_]

CONFIRMED: Final = 2
"""Observations after which an effect is no accident."""
ABSURD: Final = 10.0
"""A call that takes this many times the incumbent's time may be a straggler; the setting's next calls decide."""
STRAGGLER_RATE: Final = 0.005
"""About one setting in twenty is catastrophically slow. If fewer calls than this straggle, one slow call is proof."""


class Catastrophe(NamedTuple):
    """A setting that is not tried again at its key."""

    state: KeyState
    candidate: Candidate
    ratio: float
    """How many times the incumbent's time it takes."""


class TrialAccounting:
    """Feeds one job's evidence; reports catastrophically slow settings and calls whose duration changed."""

    def __init__(self, budget: Budget, surrogate: Surrogate) -> None:
        self._budget = budget
        self._surrogate, self._tables = surrogate, surrogate.tables
        self._catastrophes: list[Catastrophe] = []
        self._changes = ChangeDetector()
        self._means = StepMeans()
        self._held_us: dict[int, float] = {}
        """By slot, the time of its first call above `ABSURD` that was not charged."""
        self._connecting: deque[int] = deque(maxlen=KEPT)
        """Steps that connected something, until their record is here."""
        self._connections_us, self._n_connections = 0.0, 0
        """How long training waited for connections, and their number."""
        self._n_refused: Counter[tuple[Family, tuple[int, int]]] = Counter()
        """By requested algorithm and protocol, the calls that ran another one."""
        self._n_usual, self._n_slow = 0, 0
        """Calls of settings that are not on trial, and how many of them took as long as a catastrophe."""
        self.doubted: set[int] = set()
        """Slots whose next call decides whether the setting is slow."""
        self.extra_us = StepSums()
        """The time that exploration added to each step that was not judged yet."""
        self.n_explored = 0
        """Calls that ran a setting on trial."""
        self.is_suspicious = False
        """The newest calls of settings outside trials take another time than before: comparisons must wait."""

    def reset(self) -> None:
        """A new regime began: deviations are counted afresh."""
        self._changes.reset()
        self._means.reset()
        self._held_us.clear()
        self.doubted.clear()
        self.is_suspicious = False

    @property
    def connection_us(self) -> float:
        """How long training waits for a connection, on average; 0 before the first."""
        return self._connections_us / self._n_connections if self._n_connections else 0.0

    def refused(self, block: npt.NDArray[np.void], slots: Ints) -> Flags:
        """Which calls (MEASUREMENT_FIELDS) ran another algorithm or protocol than their slots (shape [n]) request.

        A setting that NCCL refused `CONFIRMED` times and never ran is not on offer.
        """
        evidence, states = self._surrogate.evidence, self._tables.states
        algorithm, protocol = block["algorithm"], block["protocol"]
        is_known = (evidence.algorithm[slots] != NO_CELL) & (algorithm != NO_CELL) & (protocol != NO_CELL)
        differs: Flags = is_known & ((algorithm != evidence.algorithm[slots]) | (protocol != evidence.protocol[slots]))
        for slot, n_calls in Counter(slots[differs].tolist()).items():
            family = states[int(evidence.key[slot])].family
            cell = int(evidence.algorithm[slot]), int(evidence.protocol[slot])
            before = self._n_refused[family, cell]
            self._n_refused[family, cell] += n_calls
            if before < CONFIRMED <= before + n_calls:
                ran = (evidence.algorithm == cell[0]) & (evidence.protocol == cell[1]) & (evidence.n_calls > 0)
                if not any(states[key].family == family for key in evidence.key[ran].tolist()):
                    self._tables.costs.learn_refused(*family, cell)
        return differs

    def forget_slow_firsts(self, slots: Ints, logs: Floats) -> None:
        """Forget a slot's only call so far if it took over twice as long as these: it connected something."""
        evidence = self._surrogate.evidence
        second = np.flatnonzero(evidence.n_calls[slots] == 1)
        if len(second):
            fell = evidence.centre(slots[second]) - logs[second] > LOG_CATASTROPHE
            evidence.forget(slots[second[fell]])

    def shift(self, calls: Calls, steps: Ints, is_trial: Flags) -> float | None:
        """The log ratio of calls' durations to their earlier ones, once a change is beyond doubt; else None.

        Calls are grouped by slot. `steps` has the step of each call, `is_trial` one flag for each key.
        """
        slots, of, deviation, evidence = calls.slots, calls.of, calls.deviation, self._surrogate.evidence
        keys = evidence.key[slots]
        watched = evidence.n_units[slots] > ENOUGH
        if not watched.all():
            if not watched.any():
                return None
            here = watched[of]
            of, deviation, steps = of[here], deviation[here], steps[here]
        scale = np.maximum(evidence.of_calls.of(slots), LEAST_NOISE)
        of_usual = ~is_trial[keys][of]
        if of_usual.any():
            self._n_usual += int(np.count_nonzero(of_usual))
            self._n_slow += int(np.count_nonzero(deviation[of_usual] > LOG_CATASTROPHE))
            self.is_suspicious = abs(float(np.median((deviation / scale[of])[of_usual]))) > 1.0
        limits = CLIP * scale[of]
        clipped = np.clip(deviation, -limits, limits)
        # The fewer steps a setting has, the less certain is its usual duration.
        clipped /= np.sqrt(1.0 + 1.0 / np.maximum(evidence.n_units[slots], 1))[of]
        for step in sorted(set(steps.tolist())):
            at = steps == step
            units = self._means.add(keys[of[at]], clipped[at], step, evidence.sigma)
            fired = self._changes.update(units)
            if not len(fired):
                continue
            shift = self._changes.shift(fired)
            self._changes.reset()
            if abs(shift) >= MIN_SHIFT:
                self._means.reset()
                return shift
        return None

    def charge(
        self, slots: Ints, logs: Floats, steps: Ints, *, exposed_share: Floats | float, connects: Flags | None = None
    ) -> Flags:
        """Charge calls of settings that are tried or verified, and note at once those that are catastrophically slow.

        Training waited only for the `exposed_share` of their extra time. Incumbents' calls cost nothing. A straggler
        costs at most ten times the incumbent's time.

        `slots`, `logs` (log microseconds) and `steps` have one entry per call. With an `exposed_share` of 0, the step's
        own time is charged instead. Calls that connect something say nothing about the setting. Returns a flag for each
        call that is evidence on its setting.
        """
        is_evidence, evidence = np.ones(len(slots), np.bool_), self._surrogate.evidence
        excess = logs - self._usual_logs(slots)
        known = np.flatnonzero(np.isfinite(excess))
        if not len(known):
            return is_evidence
        slots, logs, steps, excess = slots[known], logs[known], steps[known], excess[known]
        is_new = np.zeros(len(known), np.bool_) if connects is None else connects[known]
        share = np.broadcast_to(exposed_share, len(is_evidence))[known]
        usual_us = share * np.exp(logs - excess)
        extra_us = share * np.exp(logs) - usual_us
        self.extra_us.add(steps, np.maximum(extra_us, 0.0))
        connected = is_new & (excess > LOG_CATASTROPHE)
        self._n_connections += int(np.count_nonzero(connected))
        self._connections_us += float(extra_us[connected].sum())
        self._connecting.extend(sorted(set(steps[is_new].tolist())))
        beyond_us = np.where(is_new, 0.0, extra_us + (1.0 - ABSURD) * usual_us)
        tried = np.unique(slots)
        before_us = np.maximum(evidence.extra_us[tried], 0.0)
        np.add.at(evidence.extra_us, slots, extra_us)
        self._hold(slots, beyond_us)
        is_evidence[known] = ~is_new | (excess <= 0.0)
        # No setting is ten times as slow by itself, but a smaller ratio may be the setting's effect.
        may_be_slow = is_new & (excess > LOG_CATASTROPHE) & (excess <= math.log(ABSURD))
        self.doubted |= {*slots[may_be_slow].tolist()}
        here = is_evidence[known]
        is_evidence[known] &= ~np.isin(slots, self._doubtful(slots[here], excess[here], steps[here]))
        self._budget.spend(float((np.maximum(evidence.extra_us[tried], 0.0) - before_us).sum()))
        return is_evidence

    def catastrophes(self) -> list[Catastrophe]:
        """The catastrophically slow settings found since the last call."""
        found, self._catastrophes = self._catastrophes, []
        return found

    def connected(self, step: int, longer_us: float) -> bool:
        """Whether a step connected something; if so, its extra time beyond the calls' charges is charged now."""
        if step not in self._connecting:
            return False
        self._connecting.remove(step)
        self._budget.spend(longer_us)
        self._connections_us += longer_us
        return True

    # ---- inside ---------------------------------------------------------------------------------------

    def _hold(self, slots: Ints, beyond_us: Floats) -> None:
        """Charge a setting's first call above `ABSURD` times the usual time as if it had taken that."""
        extra_us = self._surrogate.evidence.extra_us
        for slot in sorted(set(slots[beyond_us > 0.0].tolist())):
            absurd_us = beyond_us[(slots == slot) & (beyond_us > 0.0)].tolist()
            extra_us[slot] += self._held_us.get(slot, -absurd_us[0] if len(absurd_us) == 1 else 0.0)
            self._held_us[slot] = 0.0 if slot in self._held_us or len(absurd_us) > 1 else absurd_us[0]

    def _doubtful(self, slots: Ints, excess: Floats, steps: Ints) -> list[int]:
        """Note catastrophically slow settings; return the slots whose calls are no evidence yet.

        Several slow calls are proof, and so is a single one without doubt; else the next call decides. A single call
        leaves doubt if calls straggle by themselves, or if the setting was not slow before.
        """
        doubtful: list[int] = []
        evidence, states = self._surrogate.evidence, self._tables.states
        straggles = self._n_slow > STRAGGLER_RATE * self._n_usual
        for slot in sorted(set(slots.tolist())):
            here = np.flatnonzero(slots == slot)
            ratio = float(np.sort(excess[here])[(len(here) - 1) // 2])
            if ratio <= LOG_CATASTROPHE:
                self.doubted.discard(slot)
                continue
            was_sane = bool(evidence.n_units[slot] >= CONFIRMED)
            is_alone = len(here) == 1 or (was_sane and bool((steps[here] == steps[here[0]]).all()))
            if is_alone and slot not in self.doubted and (was_sane or straggles):
                self.doubted.add(slot)
                if not was_sane:
                    doubtful.append(slot)
                continue
            evidence.extra_us[slot] += self._held_us.get(slot, 0.0)
            self._held_us[slot] = 0.0
            state, candidate = states[int(evidence.key[slot])], evidence.candidates[slot]
            self._catastrophes.append(Catastrophe(state, candidate, math.exp(ratio)))
        return doubtful

    def _usual_logs(self, slots: Ints) -> Floats:
        """Incumbents' durations (log us), shape [n]; NaN if unknown, and for the incumbent itself."""
        evidence, states = self._surrogate.evidence, self._tables.states
        tried, of = grouped(slots, len(evidence))
        usual = np.full(len(tried), np.nan)
        for place, key in enumerate(evidence.key[tried].tolist()):
            incumbent = evidence.find(key, states[key].incumbent)
            if incumbent is not None and incumbent != tried[place]:
                usual[place] = evidence.log_us(incumbent)
        found: Floats = usual[of]
        return found
