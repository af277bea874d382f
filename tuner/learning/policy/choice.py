"""Chooses the candidate that every key runs in the next window.

A key has an *incumbent* (the baseline until evidence says otherwise), at most one *trial* and perhaps a *provisional*
setting: a trial that ended faster than the incumbent, but not beyond doubt. Trials are chosen by expected improvement.
One begins only if the rest of the budget covers the risk of all trials. A trial or provisional setting becomes the
incumbent only by always-valid comparison of interleaved windows. The Brain makes plans of these settings.

The work of one window is bounded for any number of keys: AT_ONCE trials are judged, and MAX_NEW_TRIALS keys are
looked at for a new one. The others wait for a later window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from ....store.records import BASELINE, SIZE_CLASSES_PER_OCTAVE, Candidate, DecisionKind
from ..explaining.words import comparison, saved
from ..knowledge import Promising
from .acquisition import TRIAL_STEPS, Option, Options, TrialVerdict, judge
from .keys import NO_PREDICTION, KeyState, WindowOwner
from .memory import MemoryGate
from .observations import AT_ONCE, CallEvidence
from .overrides import Setting, Window, usual, what_runs
from .risk import FIRST_LOOK_STEPS, LOG_CATASTROPHE, Budget, TrialCost
from .surrogate import Surrogate

MAX_NEW_TRIALS: Final = 8
"""Keys looked at for a trial in one window."""
PROVEN_GAIN: Final = (0.03, 0.03)
"""Expected gain (log) of settings that earlier jobs proved, and its standard deviation: the network may have changed.
"""
UNLUCKY_Z: Final = 2.33
"""One trial in a hundred is slower than predicted by more than this many standard deviations."""
NEVER_STEP: Final = 2**62
NOT_OFFERED: Final = "NCCL does not offer it here"


class Event(NamedTuple):
    """One decision, for the store and for people."""

    state: KeyState
    candidate: Candidate
    kind: DecisionKind
    reason: str
    step: int | None = None
    """The step that led to the decision; None: the newest."""


class WindowInput(NamedTuple):
    """Facts on the next window beside the keys' own states."""

    forced: Mapping[int, Setting]
    """By key index: the setting that a variant or an experiment requests; no trial is judged there."""
    provisionals_rest_at: Collection[int] | None
    """While steps are compared, the keys without provisional settings; those of other keys run in all windows."""
    may_start: bool
    """Trials may begin."""
    may_promote: bool
    """False while calls differ from before at every key: that may be why a trial looks faster."""
    canaries_only: bool
    """Only trials of recommended settings may begin."""
    needs_looks: bool
    """A trial without measurements ends by itself after its first look."""


class Policy:
    """Decides settings; knows neither plans nor epochs."""

    def __init__(
        self, surrogate: Surrogate, budget: Budget, memory: MemoryGate, report: Callable[[Event], None]
    ) -> None:
        self.surrogate, self.tables = surrogate, surrogate.tables
        self.budget = budget
        self.memory = memory
        self._report = report
        self.trial_cost = TrialCost()
        self.options = Options(surrogate, budget, memory, self.trial_cost)
        self.trials: dict[int, KeyState] = {}
        """Keys that have a trial, by index, those judged longest ago first."""
        self.provisionals: dict[int, KeyState] = {}
        """Keys that have a provisional setting, by index, those judged longest ago first."""
        self._touched: set[int] = set()
        """Keys whose setting may differ from the last window, beside those with a trial or a provisional setting."""
        self._next_key = 0
        self._n_in_vain = 0
        """How many keys in a row had nothing to try when they were looked at."""
        self.has_settled = False
        """No key has a trial, and no key has a candidate that is worth one now."""

    def register(self, state: KeyState) -> None:
        """A key was seen for the first time."""
        tables = self.tables
        decided, provisional = tables.knowledge.decided(state.key), tables.knowledge.promising(state.key)
        if decided is not None and self.options.may_run(state, decided[0]):
            candidate = tables.named(state, decided[0])
            self.begin_provisional(state, Promising(candidate, PROVEN_GAIN, decided[1], is_proven=True))
        elif decided is None and provisional is not None and self.budget.fraction > 0:
            candidate = tables.named(state, provisional.candidate)
            if self.options.may_try(state, candidate):
                self.begin_provisional(state, provisional._replace(candidate=candidate))

    # ---- one window ---------------------------------------------------------------------------------

    @property
    def states(self) -> list[KeyState]:
        """The states of all keys, by key index."""
        return self.tables.states

    @property
    def evidence(self) -> CallEvidence:
        """The evidence of the regime in force."""
        return self.surrogate.evidence

    def next_window(self, step: int, now: WindowInput) -> dict[int, Setting]:
        """Judge trials, begin trials, and choose the settings of the next window, by key index.

        Keys that are left out run the setting of the last window.
        """
        for running, provisionals in ((self.trials, False), (self.provisionals, True)):
            for state in list(islice(running.values(), AT_ONCE)):
                running[state.index] = running.pop(state.index)
                if state.index not in now.forced:
                    self._settle(state, provisionals=provisionals, may_promote=now.may_promote)
        self.has_settled = False
        for state in self._unmeasured():
            if not self.trial_cost.traffic.is_expected[state.index]:
                self.end_trial(state)
        self.tables.follow()
        if now.may_start and self.budget.free_us[0] > 0:
            self._start_trials(step, canaries_only=now.canaries_only)
        alternating = {*self.trials, *self.provisionals}
        for index in alternating:
            provisionals_rest = None if now.provisionals_rest_at is None else index in now.provisionals_rest_at
            self.states[index].begin_window(provisionals_rest=provisionals_rest)
        alternating.update(now.forced)
        touched, self._touched = self._touched | alternating, alternating
        looks = self.budget.reserved if now.needs_looks else ()
        window = Window(now.forced, looks, is_overspent=self.budget.remaining_us < 0)
        return {index: what_runs(self.states[index], window) for index in touched}

    def usual(self, keys: Iterable[int] | None = None) -> dict[int, Setting]:
        """The settings without trials at these keys, by index; by default at all keys whose setting may differ."""
        asked = {*self.trials, *self.provisionals, *self._touched} if keys is None else keys
        return {index: usual(self.states[index]) for index in asked}

    # ---- what changes a key's state -------------------------------------------------------------------

    def _begin_trial(self, state: KeyState, option: Option) -> None:
        """From the next window on, the candidate alternates with the usual setting."""
        candidate, slot = option.candidate, self.evidence.find(state.index, option.candidate)
        state.trial_order.setdefault(candidate, len(state.trial_order) + 1)
        state.retired.pop(candidate, None)
        state.trial, state.trial_reason, state.window_owner = candidate, option.reason, WindowOwner.incumbent
        state.predicted_gain = option.predicted_gain
        state.trial_until_units = TRIAL_STEPS + (self.evidence.units(slot) if slot is not None else 0.0)
        self.memory.promise(candidate, state.key.communicator)
        self.trials[state.index] = state
        if not self.evidence.has_measured(state.index, candidate):
            self.budget.reserve(state.index, option.risk_us, option.once_us)
        self._report(Event(state, candidate, DecisionKind.explore, option.reason))

    def end_trial(self, state: KeyState) -> None:
        """The incumbent runs alone again."""
        state.trial = None
        self.trials.pop(state.index, None)
        self.budget.release(state.index)

    def begin_provisional(self, state: KeyState, provisional: Promising) -> None:
        """The setting runs in nearly all windows without a trial; the incumbent runs in the others.

        A setting that earlier jobs or smaller messages proved runs at once and is verified on the side.
        """
        candidate, predicted_gain, reason, is_proven = provisional
        state.trial_order.setdefault(candidate, len(state.trial_order) + 1)
        state.provisional_reason = state.retired[candidate] = reason
        state.provisional, state.provisional_gain, state.provisional_is_proven = candidate, predicted_gain, is_proven
        state.n_provisional_windows = 0
        self.memory.promise(candidate, state.key.communicator)
        self.provisionals[state.index] = state
        words = reason if is_proven else f"{reason}; it runs in most steps until that is known"
        self._report(Event(state, candidate, DecisionKind.prior if is_proven else DecisionKind.provisional, words))

    def end_provisional(self, state: KeyState, why: str = "") -> None:
        """The incumbent runs again in windows without a trial; `why` is "" if another decision explains it."""
        provisional, state.provisional = state.provisional, None
        self.provisionals.pop(state.index, None)
        if why:
            self._report(Event(state, state.incumbent, DecisionKind.keep, f"{provisional}: {why}: it runs no longer"))

    def set_incumbent(self, event: Event) -> None:
        """From the next window on, the event's candidate is its key's incumbent."""
        state = event.state
        state.incumbent, state.incumbent_reason = event.candidate, event.reason
        self._touched.add(state.index)
        self.end_provisional(state)
        self._report(event)

    def reopen(self) -> None:
        """The regime changed: every verdict is open again. Settings stay until measurements speak against them."""
        for state in self.states:
            self.end_trial(state)
            state.reopen()

    def drop(
        self, state: KeyState, candidate: Candidate, reason: str, *, ban: bool, before: Candidate = BASELINE
    ) -> None:
        """End a trial, a provisional setting or an incumbent: `candidate` is one of these.

        With `ban` it is not tried again in this regime; otherwise it is tried again after all others.
        """
        (state.banned if ban else state.retired)[candidate] = reason
        if candidate == state.trial:
            self.end_trial(state)
        if candidate == state.provisional:
            self.end_provisional(state)
        words, kind = f"{candidate}: {reason}", DecisionKind.rollback if ban else DecisionKind.keep
        if candidate == state.incumbent:
            self.set_incumbent(Event(state, before, kind, words))
        else:
            self._report(Event(state, state.usual, kind, words))

    def withdraw_what_is_not_offered(self) -> None:
        """Withdraw settings that NCCL does not offer, at all keys: a live cost table may come late."""
        for state in self.states:
            for setting in (state.trial, state.provisional, state.incumbent):
                if setting is not None and not self.tables.offers(state.family, setting):
                    self.drop(state, setting, NOT_OFFERED, ban=True)

    # ---- inside ---------------------------------------------------------------------------------------

    def _settle(self, state: KeyState, *, provisionals: bool, may_promote: bool) -> None:
        candidate = state.provisional if provisionals else state.trial
        if candidate is None:
            return
        verdict, gain, half = judge(self.evidence, state, provisionals=provisionals)
        if verdict is TrialVerdict.open:
            return
        measured = f"measured {comparison(gain)} than {state.incumbent}"
        if verdict is TrialVerdict.better and may_promote:
            if not provisionals:
                self.end_trial(state)
            reason = f"{measured} (at least {saved(max(gain - half, 0.0))}, all looks counted)"
            self.set_incumbent(Event(state, candidate, DecisionKind.promote, reason))
        elif verdict is TrialVerdict.not_better and provisionals:
            self.end_provisional(state, f"{measured} by now")
        elif verdict is TrialVerdict.not_better:
            words = comparison(gain) + (", too little to tell," if gain >= 0 else "")
            self.drop(state, candidate, f"measured {words} than {state.incumbent}", ban=False)
        elif verdict is TrialVerdict.tie:
            self.end_trial(state)
            # The trial is not slower than the earlier provisional setting, if there was one.
            self.begin_provisional(state, Promising(candidate, NO_PREDICTION, f"{measured}, too little to be sure yet"))

    def _start_trials(self, step: int, *, canaries_only: bool) -> None:
        """Begin trials as long as the budget covers the sum of their risks.

        The smallest risk comes first: small messages show whether a setting is good before a large one pays for it.
        """
        states, evidence = self.states, self.evidence
        picked: list[tuple[KeyState, Option]] = []
        n_looked_at = 0
        for _ in range(len(states)):
            if n_looked_at >= MAX_NEW_TRIALS:
                break
            state = states[self._next_key % len(states)]
            self._next_key += 1
            is_cooling_down = step < state.cooldown_until or not self.trial_cost.traffic.is_expected[state.index]
            if state.trial is not None or is_cooling_down:
                self._n_in_vain += 1
            elif (at := evidence.find(state.index, state.incumbent)) is None or evidence.units(at) < FIRST_LOOK_STEPS:
                continue
            elif not canaries_only or self.tables.knowledge.canary(state.key) is not None:
                n_looked_at += 1
                found = self.options.best(state, canaries_only=canaries_only)
                if found is not None:
                    picked.append((state, found))
                elif not canaries_only:
                    self._n_in_vain += 1
                    state.cooldown_until = step + max(TRIAL_STEPS, 2 * len(states) // MAX_NEW_TRIALS)
        if picked or self.trials or canaries_only:
            self._n_in_vain = 0
        self.has_settled = self._n_in_vain >= len(states)
        for state, found in sorted(picked, key=lambda one: one[1].risk_us):
            is_paid = self.budget.affords(found.risk_us, found.once_us)
            if is_paid and self.options.may_run(state, found.candidate) and not self._has_twin(state, found):
                self._begin_trial(state, found)

    def _unmeasured(self) -> list[KeyState]:
        """Keys whose trial waits for its first measurement; reservations of other keys are free again."""
        for index in self.budget.reserved:
            trial = self.states[index].trial
            if trial is None or self.evidence.has_measured(index, trial):
                self.budget.release(index)
        return [self.states[index] for index in self.budget.reserved]

    def _has_twin(self, state: KeyState, option: Option) -> bool:
        """Whether a candidate that may be catastrophic is on trial already at a similar size."""
        gain, std = option.predicted_gain
        return UNLUCKY_Z * std - gain > LOG_CATASTROPHE and any(
            other.trial == option.candidate
            and other.key.communicator == state.key.communicator
            and abs(other.key.size_class - state.key.size_class) <= 2 * SIZE_CLASSES_PER_OCTAVE
            for other in self._unmeasured()
        )

    def connect_nothing(self) -> None:
        """End trials and provisional settings that would take memory that is no longer there."""
        for state in [*self.trials.values()]:
            if state.trial is not None and self.options.would_connect(state, state.trial):
                self.end_trial(state)
        for state in [*self.provisionals.values()]:
            if (provisional := state.provisional) is not None and self.options.would_connect(state, provisional):
                self.end_provisional(state, "there is no memory left to connect it")
        self.memory.take_back()
