"""Measurements attributed to what was asked, and turned into evidence, charges and alarms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.store.records import Algorithm, Candidate, CommunicatorClass
from zerotune.tuner.learning.policy.change_detection import MIN_SHIFT, ChangeDetector, StepMeans
from zerotune.tuner.learning.policy.keys import Family, KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence, Calls, grouped
from zerotune.tuner.learning.policy.risk import Budget
from zerotune.tuner.modeling.features import NO_CELL, CostPrior, Floats, Ints

ENOUGH_SANE: Final = 3
"""So many other measurements of the same setting must be sane."""


@dataclass
class _Seen:
    n_sane: int
    n_absurd: int = 0
    beyond_us: float = 0.0
    given_back_us: float = 0.0


class Stragglers:
    """Tells what of the charges so far is to be given back, or taken back again; `slot` stands for a setting."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def reset(self) -> None:
        """Slots have another meaning from now on."""
        self._seen.clear()

    def corrections(self, slots: Ints, beyond_us: Floats, n_before: Ints) -> dict[int, float]:
        """What to add to the charges of some slots, mostly nothing.

        Args:
            slots: of each measurement.
            beyond_us: what each was charged beyond the limit; 0 or less where it was sane.
            n_before: how often each one's setting had been measured before.

        Returns:
            Microseconds by slot.
        """
        is_absurd = beyond_us > 0
        if not self._seen and not is_absurd.any():
            return {}
        found: dict[int, float] = {}
        for slot in {*self._seen, *slots[is_absurd].tolist()}.intersection(slots.tolist()):
            here = slots == slot
            seen = self._seen.setdefault(slot, _Seen(int(n_before[here][0])))
            n_absurd = int(np.count_nonzero(is_absurd[here]))
            seen.n_sane += int(np.count_nonzero(here)) - n_absurd
            seen.n_absurd += n_absurd
            seen.beyond_us += float(np.maximum(beyond_us[here], 0.0).sum())
            is_straggler = seen.n_absurd == 1 and seen.n_sane >= ENOUGH_SANE
            given_back_us = seen.beyond_us if is_straggler else 0.0
            if given_back_us != seen.given_back_us:
                found[slot] = seen.given_back_us - given_back_us
                seen.given_back_us = given_back_us
        return found


MOST_OPEN: Final = 64
"""Steps of which no record has come."""
LEAST_SHARE: Final = 0.1
"""A step that connects something took longer for that by this much of its time at least; less may be noise."""
ENOUGH_STEPS: Final = 4
"""So many steps say how long one usually takes."""


class Connections:
    """Charges the budget what steps say of them, and remembers how much a connection takes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._charged_us: dict[int, float] = {}
        """What the calls that connected something were charged, by step, until the step's record is here."""
        self._total_us, self._n = 0.0, 0

    @property
    def typical_us(self) -> float:
        """What training waits for one, as far as seen; 0 before the first."""
        return self._total_us / self._n if self._n else 0.0

    def made(self, step: int, charged_us: float) -> None:
        """Calls of `step` connected something, and were charged `charged_us` for what they took longer."""
        if step not in self._charged_us:
            self._n += 1
        self._charged_us[step] = self._charged_us.get(step, 0.0) + charged_us
        self._total_us += charged_us
        while len(self._charged_us) > MOST_OPEN:
            del self._charged_us[next(iter(self._charged_us))]

    def finished(self, step: int, left_us: float, usual_us: list[float]) -> bool:
        """Whether a step connected something; what it took longer besides what calls were charged is charged now.

        Args:
            step: the step.
            left_us: its duration without what exploration is known to have added.
            usual_us: durations of other steps.

        Returns:
            True if the step connected something.
        """
        if self._charged_us.pop(step, None) is None:
            return False
        if len(usual_us) >= ENOUGH_STEPS:
            usual = median(usual_us)
            if left_us - usual > LEAST_SHARE * usual:
                self._budget.spend(left_us - usual)
                self._total_us += left_us - usual
        return True


CERTAIN_CALLS: Final = 2
"""After this many such calls, and none that ran as asked, it is not offered."""

Flags = npt.NDArray[np.bool_]


class Refusals:
    """One job's, by family (communicator class and collective), algorithm and protocol."""

    def __init__(self) -> None:
        self._n_calls: Counter[tuple[Family, tuple[int, int]]] = Counter()

    def ran_something_else(self, block: npt.NDArray[np.void], slots: Ints, evidence: CallEvidence) -> Flags:
        """Which calls ran another algorithm or protocol than was asked for.

        Args:
            block: measurements (MEASUREMENT_FIELDS), shape [n].
            slots: that were asked for, shape [n].
            evidence: says what each slot asks.

        Returns:
            True for those calls, shape [n].
        """
        algorithm, protocol = block["algorithm"], block["protocol"]
        is_told = (evidence.algorithm[slots] != NO_CELL) & (algorithm != NO_CELL) & (protocol != NO_CELL)
        differs: Flags = is_told & ((algorithm != evidence.algorithm[slots]) | (protocol != evidence.protocol[slots]))
        return differs

    def learn(self, refused: Ints, states: Sequence[KeyState], evidence: CallEvidence, costs: CostPrior) -> None:
        """Tell `costs` what turns out not to be offered.

        Args:
            refused: slots that were asked for and did not run, one per call.
            states: of all keys, by key index.
            evidence: of the regime in force.
            costs: told of refused algorithms and protocols.
        """
        for slot, n_calls in zip(*(one.tolist() for one in np.unique(refused, return_counts=True)), strict=True):
            family = states[int(evidence.key[slot])].family
            cell = int(evidence.algorithm[slot]), int(evidence.protocol[slot])
            before = self._n_calls[family, cell]
            self._n_calls[family, cell] += n_calls
            if before < CERTAIN_CALLS <= before + n_calls and not self._has_run(family, cell, states, evidence):
                costs.learn_refused(*family, cell)

    @staticmethod
    def _has_run(family: Family, cell: tuple[int, int], states: Sequence[KeyState], evidence: CallEvidence) -> bool:
        alike = (evidence.algorithm == cell[0]) & (evidence.protocol == cell[1]) & (evidence.n_calls > 0)
        return any(states[key].family == family for key in evidence.key[alike].tolist())


MIN_RIPE_UNITS = 4
"""Steps of evidence before a slot's own noise may call a deviation a change."""
LEAST_SCALE = 0.01
STRAGGLES = 4.0
"""What a single call may say, in noise scales, about what calls take."""
ABSURD = 10.0
"""A call of this many times the incumbent's time may be a straggler: other calls of the same setting will tell."""
SANE_UNITS: Final = 2
"""After this many steps of evidence a single slow step is no verdict on a setting, however many calls it has."""
STRAGGLER_RATE: Final = 0.005
"""One setting in twenty is catastrophically slow. Where fewer calls straggle, a single slow one is as good as proof."""
SUSPICIOUS = 1.0
"""Half of the calls deviate by more than this many noise scales: the network may have changed just now."""


class Attribution:
    """Feeds one job's evidence; says what was catastrophically slow and what calls no longer take what they took.

    `extra_of_step` holds the microseconds that exploration added to each recent step.
    """

    def __init__(
        self,
        budget: Budget,
        catastrophic_ratio: float,
        on_catastrophe: Callable[[KeyState, Candidate, float], None],
    ) -> None:
        self._budget = budget
        self._log_catastrophe = math.log(catastrophic_ratio)
        self._on_catastrophe = on_catastrophe
        self._changes = ChangeDetector()
        self._means = StepMeans()
        self._stragglers = Stragglers()
        self.connections = Connections(budget)
        self._n_usual, self._n_slow = 0, 0
        """Calls of settings that are not on trial, and how many of them were slow as a catastrophe."""
        self._met: set[tuple[CommunicatorClass, int, int, Algorithm | None]] = set()
        """Algorithms that were on trial, by what they were tried for."""
        self.doubted_us: dict[int, float] = {}
        """What the slow call of a slot was charged about which the next one will tell whether the setting is slow."""
        self.extra_of_step: dict[int, float] = {}
        self.n_explored = 0
        """Calls that ran a setting on trial."""
        self.is_suspicious = False
        """The newest calls of settings that are not on trial are not what they were: no time to compare with before."""

    def reset(self) -> None:
        """A new regime began: deviations are counted afresh."""
        self._changes.reset()
        self._means.reset()
        self._stragglers.reset()
        self.doubted_us.clear()
        self.is_suspicious = False

    def forget_slow_firsts(self, slots: Ints, logs: Floats, evidence: CallEvidence) -> None:
        """Forget the only call of a slot that took more than twice as long as these: it connected something.

        Args:
            slots: of each call, shape [n].
            logs: log microseconds, shape [n].
            evidence: without these calls; changed in place.
        """
        second = np.flatnonzero(evidence.n_calls[slots] == 1)
        if len(second):
            fell = evidence.centre(slots[second]) - logs[second] > self._log_catastrophe
            evidence.forget(slots[second[fell]])

    def shift(self, calls: Calls, steps: Ints, is_trial: npt.NDArray[np.bool_], evidence: CallEvidence) -> float | None:
        """How much calls deviate from what they used to take, once that is beyond doubt.

        Args:
            calls: grouped by slot.
            steps: in which each ran, shape [n].
            is_trial: keys that run a trial, shape [n_keys].
            evidence: without these calls.

        Returns:
            Log ratio; None as long as it is not beyond doubt.
        """
        slots, of, deviation = calls.slots, calls.of, calls.deviation
        keys = evidence.key[slots]
        watched = evidence.n_units[slots] >= MIN_RIPE_UNITS
        if not watched.all():
            if not watched.any():
                return None
            here = watched[of]
            of, deviation, steps = of[here], deviation[here], steps[here]
        scale = np.maximum(evidence.call_sigma(slots), LEAST_SCALE)
        of_usual = ~is_trial[keys][of]
        if of_usual.any():
            self._n_usual += int(np.count_nonzero(of_usual))
            self._n_slow += int(np.count_nonzero(deviation[of_usual] > self._log_catastrophe))
            self.is_suspicious = abs(float(np.median((deviation / scale[of])[of_usual]))) > SUSPICIOUS

        def sigma(of_keys: Ints) -> Floats:
            result: Floats = np.maximum(evidence.sigma(of_keys), LEAST_SCALE)
            return result

        limits = STRAGGLES * scale[of]
        clipped = np.clip(deviation, -limits, limits)
        # What a setting used to take is the less certain the fewer its steps.
        clipped /= np.sqrt(1.0 + 1.0 / np.maximum(evidence.n_units[slots], 1))[of]
        for step in np.unique(steps).tolist():
            at = steps == step
            units = self._means.add(keys[of[at]], clipped[at], step, sigma)
            fired = self._changes.update(*units)
            if not len(fired):
                continue
            shift = self._changes.shift(fired)
            self._changes.reset()
            if abs(shift) >= MIN_SHIFT:
                self._means.reset()
                return shift
        return None

    def charge(
        self,
        states: list[KeyState],
        slots: Ints,
        logs: Floats,
        steps: Ints,
        evidence: CallEvidence,
        *,
        exposed_share: float,
        connects: Flags | None = None,
    ) -> Flags:
        """Account for calls of what is tried or verified, and report at once what is catastrophically slow.

        Only the `exposed_share` of what they took longer was waited for. Calls of incumbents among them cost nothing;
        of a straggler no more counts than ten times the incumbent's time.

        Args:
            states: all keys.
            slots: of each call, shape [n], as the next two.
            logs: log microseconds.
            steps: in which it ran.
            evidence: without these calls.
            exposed_share: of the time of calls.
            connects: which of them connected something: how long they took says nothing about the setting.

        Returns:
            Which calls say something about their setting.
        """
        says = np.ones(len(slots), np.bool_)
        tried, inverse = grouped(slots, len(evidence))
        usual = np.full(len(tried), np.nan)
        for place, key in enumerate(evidence.key[tried].tolist()):
            incumbent = evidence.find(key, states[key].incumbent)
            if incumbent is not None and incumbent != tried[place]:
                usual[place] = evidence.log_us(incumbent)
        known = np.flatnonzero(np.isfinite(usual)[inverse])
        if not len(known):
            return says
        inverse, logs, steps = inverse[known], logs[known], steps[known]
        extra = exposed_share * (np.exp(logs) - np.exp(usual[inverse]))
        when, of_step = np.unique(steps, return_inverse=True)
        for step, extra_us in zip(when.tolist(), np.bincount(of_step, np.maximum(extra, 0.0)), strict=True):
            self.extra_of_step[step] = self.extra_of_step.get(step, 0.0) + float(extra_us)
        before = np.maximum(evidence.extra_us[tried], 0.0)
        charged = np.bincount(inverse, extra, minlength=len(tried))
        of_call, is_new = tried[inverse], np.zeros(len(known), np.bool_)
        if connects is not None:
            is_new = connects[known]
            for step, extra_us in zip(steps[is_new].tolist(), extra[is_new].tolist(), strict=True):
                self.connections.made(step, max(extra_us, 0.0))
            for slot in tried[np.unique(inverse[is_new])].tolist():
                self._met.add(_place(states[int(evidence.key[slot])], evidence.candidates[slot]))
        # What connected something is no straggler, nor is what may have.
        later = ~is_new
        for place, first in zip(*(one.tolist() for one in np.unique(inverse, return_index=True)), strict=True):
            slot = int(tried[place])
            if not evidence.n_calls[slot] and self._may_connect(
                states[int(evidence.key[slot])], evidence.candidates[slot]
            ):
                later[first] = False
        beyond = exposed_share * (np.exp(logs) - ABSURD * np.exp(usual[inverse]))
        corrections = self._stragglers.corrections(of_call[later], beyond[later], evidence.n_calls[of_call[later]])
        for slot, correction_us in corrections.items():
            charged[np.searchsorted(tried, slot)] += correction_us
        evidence.extra_us[tried] += charged
        self._budget.spend(float((np.maximum(evidence.extra_us[tried], 0.0) - before).sum()))
        excess = logs - usual[inverse]
        says[known] = ~is_new | (excess <= 0.0)
        # Nothing is ten times as slow by itself, but less than that may be the setting's own doing.
        may_be_slow = is_new & (excess > self._log_catastrophe) & (excess <= math.log(ABSURD))
        for slot in np.unique(of_call[may_be_slow]).tolist():
            self.doubted_us[slot] = float(extra[may_be_slow & (of_call == slot)].sum())
        for place in np.unique(inverse).tolist():
            here = np.flatnonzero((inverse == place) & says[known])
            if len(here):
                self._look(
                    int(tried[place]), known[here], excess[here], steps[here], extra[here], states, evidence, says
                )
        return says

    def _look(
        self,
        slot: int,
        places: Ints,
        excess: Floats,
        steps: Ints,
        extra_us: Floats,
        states: list[KeyState],
        evidence: CallEvidence,
        says: Flags,
    ) -> None:
        """Ban what is catastrophically slow.

        At once where several calls show it, or a single one without doubt; else when the next call shows it, too. That
        call costs as much again, so it waits until that may be spent. A single call leaves a doubt where calls straggle
        by themselves, where the setting was not slow before, and where it may have connected something.
        """
        state, candidate = states[int(evidence.key[slot])], evidence.candidates[slot]
        is_first = self._may_connect(state, candidate)
        self._met.add(_place(state, candidate))
        ratio = float(np.sort(excess)[(len(excess) - 1) // 2])
        if ratio <= self._log_catastrophe:
            self.doubted_us.pop(slot, None)
            return
        units = evidence.n_units[slot]
        was_sane = bool(units >= SANE_UNITS)
        is_alone = len(excess) == 1 or (was_sane and bool((steps == steps[0]).all()))
        is_doubtful = was_sane or is_first or self._n_slow > STRAGGLER_RATE * self._n_usual
        cost_us = float(np.maximum(extra_us, 0.0).sum())
        if is_alone and is_doubtful and slot not in self.doubted_us:
            self.doubted_us[slot] = cost_us
            if not was_sane:
                says[places] = False
            return
        if candidate in (state.trial, state.lead):
            self._on_catastrophe(state, candidate, math.exp(ratio))

    def catastrophes(
        self,
        changes: Mapping[int, Candidate],
        states: list[KeyState],
        slots: Ints,
        logs: Floats,
        evidence: CallEvidence,
    ) -> list[tuple[KeyState, Candidate, float]]:
        """What is catastrophically slow of a plan on trial, compared with what usually runs.

        Steps say what the plan costs, so nothing is charged. Two calls must agree where a single one leaves a doubt.

        Args:
            changes: by key, what the plan on trial runs there.
            states: all keys.
            slots: of each call, shape [n], without those that connected something.
            logs: log microseconds, shape [n].
            evidence: without these calls.

        Returns:
            Key, setting and how many times as long it takes.
        """
        found, met = [], set()
        ran, of = np.unique(slots, return_inverse=True)
        for place in np.flatnonzero(evidence.n_units[ran] < SANE_UNITS).tolist():
            slot = int(ran[place])
            state, candidate = states[int(evidence.key[slot])], evidence.candidates[slot]
            usual = evidence.find(state.index, state.incumbent)
            if changes.get(state.index) != candidate or usual in (None, slot):
                continue
            excess = logs[of == place] - evidence.log_us(usual)
            if not np.isfinite(excess).all():
                continue
            was_slow = evidence.n_calls[slot] and evidence.log_us(slot) - evidence.log_us(usual) > self._log_catastrophe
            is_doubtful = self._may_connect(state, candidate) or self._n_slow > STRAGGLER_RATE * self._n_usual
            met.add(_place(state, candidate))  # any of them may have been the first
            ratio = float(np.sort(excess)[(len(excess) - 1) // 2])
            if ratio > self._log_catastrophe and (len(excess) > 1 or was_slow or not is_doubtful):
                found.append((state, candidate, math.exp(ratio)))
        self._met |= met
        return found

    def _may_connect(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether it is the first of its algorithm on trial for what it does: that may have its own communicator."""
        default = state.default_setting
        is_usual = default is not None and default.algorithm == candidate.algorithm
        return not is_usual and _place(state, candidate) not in self._met


def _place(state: KeyState, candidate: Candidate) -> tuple[CommunicatorClass, int, int, Algorithm | None]:
    key = state.key
    return key.communicator, int(key.collective), int(key.phase), candidate.algorithm
