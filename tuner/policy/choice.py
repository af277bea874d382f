"""Which candidate every key runs in the next window.

Per key: an *incumbent* (the baseline until evidence says otherwise) and at most one *trial*. Trials are
picked by expected improvement under the posterior, admitted only while the risk of all running trials
together fits what is left of the exploration budget, and judged by always-valid comparison of interleaved
windows. What is decided here is a setting per key; turning it into a plan is the Brain's part.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from agent.nccl.catalog import CHANNEL_LADDER
from agent.nccl.cost_model import channels_used
from store.records import BASELINE, Candidate, Collective
from tuner.features import NO_CELL, CostPrior, Floats, cell_of
from tuner.knowledge import Knowledge, Prior
from tuner.policy.budget import Budget
from tuner.policy.evidence import Evidence
from tuner.policy.posterior import MAX_POINTS, Settings, condition
from tuner.policy.step_trial import Variant
from tuner.policy.trial import PROMISING, KeyState, Verdict, judge

MIN_BASELINE_UNITS: Final = 2
MAX_NEW_TRIALS: Final = 12
MAX_NEW_PRIORS: Final = 48
"""Keys looked at for a trial, and starting guesses worked out, in one window: both bound its time."""
RISK_QUANTILE: Final = 1.3
RISK_SHARE: Final = 0.5
"""Share of the remaining budget that the trials of one window may put at risk."""
RETRY_STEPS: Final = 25
"""Steps before a key whose trials did not fit the budget, or had nothing to offer, is looked at again."""


class PolicySettings(NamedTuple):
    """What a user may want to change about how bold the policy is."""

    false_promotion: float = 0.01
    min_gain: float = 0.005
    worthwhile: float = 0.003
    catastrophic_ratio: float = 2.0
    memory_threshold: float = 0.92
    steps_per_window: float = 3.0


class Event(NamedTuple):
    """One decision to be explained: kind as in `Decision.kind`."""

    state: KeyState
    candidate: Candidate
    kind: str
    reason: str


class Policy:
    """Decides settings; knows neither plans nor epochs. Evidence is passed in: it changes with the regime."""

    def __init__(
        self,
        settings: PolicySettings,
        costs: CostPrior,
        budget: Budget,
        report: Callable[[Event], None],
    ) -> None:
        self.settings = settings
        self.costs = costs
        self.budget = budget
        self.knowledge = Knowledge.empty()
        self._report = report
        self.memory_pressure = 0.0
        self.exposed_share = 1.0
        """Share of communication time that computation waits for."""
        self.connected: set[int] = set()
        """Algorithms that have run in this job: only they are free to use under memory pressure."""
        self._families: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        """(size class, key index) of a communicator's keys of one collective, sorted."""
        self._next_key = 0
        self._priors_left = MAX_NEW_PRIORS

    def register(self, states: list[KeyState], state: KeyState) -> None:
        """A key was seen for the first time."""
        insort(self._families.setdefault(_family(state), []), (state.key.size_class, state.index))
        decided = self.knowledge.decided(state.key)
        if decided is not None:
            candidate, reason = decided
            state.trial, state.trial_reason, state.is_trusted = candidate, reason, True
            self._report(Event(state, candidate, "prior", reason))

    def next_window(
        self, states: list[KeyState], evidence: Evidence, step: int, *, may_start: bool = True
    ) -> list[Candidate]:
        """The setting of every key for the next window, shape [n_keys]."""
        self._priors_left = MAX_NEW_PRIORS
        risk_left_us = RISK_SHARE * max(0.0, self.budget.remaining_us)
        for state in states:
            if state.trial is not None:
                self._settle(state, states, evidence)
            if state.trial is not None and not state.is_trusted:
                risk_left_us -= self._risk_us(state, evidence)
        if may_start and risk_left_us > 0:
            self._start_trials(states, evidence, step, risk_left_us)
        return [self._runs(state) for state in states]

    def channel_caps(self, states: list[KeyState], evidence: Evidence) -> tuple[list[Variant], bool]:
        """Variants with fewer channels, the mildest first; and whether all of them fit the budget."""
        running = [self._channels(state) for state in states]
        most = max(running, default=0)
        caps = [rung for rung in reversed(CHANNEL_LADDER) if rung < most]
        opinions = {
            state.index: self.posterior(state, states, evidence)[0]
            for state, n_channels in zip(states, running, strict=True)
            if caps and n_channels > min(caps)
        }
        found = []
        all_fit = True
        for cap in caps:
            changes: dict[int, Candidate] = {}
            risk_us = 0.0
            for state, n_channels in zip(states, running, strict=True):
                if n_channels <= cap:
                    continue
                mean = opinions[state.index]
                incumbent = evidence.find(state.index, state.incumbent)
                fewer = [
                    (float(mean[index]), option)
                    for index, option in enumerate(state.options)
                    if 0 < option.n_channels <= cap and option not in state.banned and np.isfinite(mean[index])
                    if self.memory_pressure <= self.settings.memory_threshold or self._may_try(state, option)
                ]
                if not fewer or incumbent is None:
                    continue
                log_us, option = min(fewer)
                extra_us = math.exp(log_us) - math.exp(evidence.log_us(incumbent))
                if math.isfinite(extra_us):
                    changes[state.index] = option
                    risk_us += max(0.0, extra_us) * state.calls_per_step
            n_steps = 2.0 * self.settings.steps_per_window
            if not changes:
                continue
            # Only what computation waits for can cost training time.
            risk_us *= min(1.0, self.exposed_share + 0.1)
            if risk_us * n_steps <= RISK_SHARE * max(0.0, self.budget.remaining_us):
                found.append(Variant(f"at most {cap} channels", changes, cap))
            else:
                all_fit = False
        return found, all_fit

    def _channels(self, state: KeyState) -> int:
        if state.incumbent.n_channels:
            return state.incumbent.n_channels
        return state.default_setting.n_channels if state.default_setting is not None else 0

    def drop_trial(self, state: KeyState, reason: str, *, ban: bool) -> None:
        """End a trial at once, outside of the usual verdicts."""
        candidate = state.trial
        if candidate is None:
            return
        (state.banned if ban else state.retired)[candidate] = reason
        state.trial = None
        state.is_trusted = False
        self._report(Event(state, state.incumbent, "rollback" if ban else "keep", f"{candidate}: {reason}"))

    def posterior(self, state: KeyState, states: list[KeyState], evidence: Evidence) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log duration of every option of `state`, the baseline first."""
        rows = self._rows(state)
        table = np.array([rows[option] for option in state.options])
        cells = table[:, 2:4].astype(np.int64)
        own = np.full(len(table), state.index, dtype=np.int64)
        targets = Settings(table[:, 0], table[:, 1], cells[:, 0], cells[:, 1], own)
        guess, std = table[:, 4], table[:, 5]
        usable = np.isfinite(guess)
        mean, spread = condition(
            np.where(usable, guess, 0.0), std, targets, *self._measured_near(state, states, evidence)
        )
        return np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)

    def forget_priors(self, states: Iterable[KeyState]) -> None:
        """Costs or knowledge changed: work the starting guesses out again."""
        for state in states:
            state.prior = None
            state.quiet_until = 0

    def _runs(self, state: KeyState) -> Candidate:
        if state.trial is None:
            return state.incumbent
        state.n_windows += 1
        if self.budget.remaining_us < 0 and not state.is_trusted:
            return state.incumbent  # paused until the budget has recovered
        period = 4 if state.is_trusted else 3 if "promising" in state.trial_reason else 2
        return state.incumbent if state.n_windows % period == 0 else state.trial

    def _settle(self, state: KeyState, states: list[KeyState], evidence: Evidence) -> None:
        trial = state.trial
        if trial is None:
            return
        verdict, gain, half = judge(
            evidence,
            state,
            false_promotion=self.settings.false_promotion,
            min_gain=self.settings.min_gain,
        )
        if verdict is Verdict.better:
            reason = (
                f"measured {_percent(gain)} faster than {state.incumbent}"
                f" (at least {_percent(max(gain - half, 0.0))}, all looks counted)"
            )
            state.previous = state.incumbent
            state.incumbent, state.incumbent_kind, state.incumbent_reason = trial, "promote", reason
            state.trial, state.is_trusted = None, False
            self._report(Event(state, trial, "promote", reason))
        elif verdict is Verdict.not_better:
            words = "slower" if gain < 0 else "faster, too little to tell,"
            reason = f"measured {_percent(abs(gain))} {words} than {state.incumbent}"
            state.retired[trial] = reason
            state.trial, state.is_trusted = None, False
            self._report(Event(state, state.incumbent, "keep", f"{trial}: {reason}"))

    def _start_trials(self, states: list[KeyState], evidence: Evidence, step: int, risk_left_us: float) -> None:
        picked: list[tuple[float, float, KeyState, Candidate, str]] = []
        n_looked_at = 0
        for offset in range(len(states)):
            state = states[(self._next_key + offset) % len(states)]
            if state.trial is not None or step < state.quiet_until:
                continue
            incumbent = evidence.find(state.index, state.incumbent)
            if incumbent is None or evidence.units(incumbent) < MIN_BASELINE_UNITS:
                continue
            n_looked_at += 1
            found = self._best_option(state, states, evidence, risk_left_us)
            if found is None:
                state.quiet_until = step + RETRY_STEPS
            else:
                picked.append((*found[:2], state, *found[2:]))
            if n_looked_at >= MAX_NEW_TRIALS:
                self._next_key = (self._next_key + offset + 1) % len(states)
                break
        for _, risk_us, state, candidate, reason in sorted(picked, key=lambda one: -one[0]):
            if risk_us > max(risk_left_us, 0.0):
                continue
            risk_left_us -= risk_us
            state.trial, state.trial_reason = candidate, reason
            state.n_tried += 1
            state.n_windows = 0
            self._report(Event(state, candidate, "explore", reason))

    def _best_option(
        self, state: KeyState, states: list[KeyState], evidence: Evidence, risk_left_us: float
    ) -> tuple[float, float, Candidate, str] | None:
        """(worth in us per step, risk in us, candidate, reason) of the best trial that fits, if any."""
        mean, spread = self.posterior(state, states, evidence)
        incumbent = evidence.find(state.index, state.incumbent)
        if incumbent is None:
            return None
        log_now = evidence.log_us(incumbent)
        duration_us = math.exp(log_now)
        edge = log_now - mean - self.settings.min_gain
        improvement = _expected_improvement(edge, spread)
        worst = np.maximum(np.exp(np.minimum(mean + RISK_QUANTILE * spread - log_now, 6.0)) - 1.0, 0.0)
        n_calls = state.calls_per_step * self.settings.steps_per_window
        risk = worst * duration_us * n_calls
        likely_slow = mean + 0.5 * spread - log_now > math.log(self.settings.catastrophic_ratio)
        best: tuple[float, float, Candidate, str] | None = None
        for index in np.argsort(-improvement):
            candidate = state.options[index]
            if improvement[index] < self.settings.worthwhile:
                break
            if likely_slow[index] or risk[index] > max(risk_left_us, 0.0):
                continue
            if not self._may_try(state, candidate):
                continue
            gain = 1.0 - math.exp(float(mean[index]) - log_now)
            word = "promising: " if gain > PROMISING else ""
            reason = (
                f"{word}predicted {math.exp(mean[index]):.1f} us"
                f" (90 %: {math.exp(mean[index] - 1.645 * spread[index]):.1f}"
                f" to {math.exp(mean[index] + 1.645 * spread[index]):.1f})"
                f" against {duration_us:.1f} us of {state.incumbent}"
            )
            worth = float(improvement[index]) * duration_us * state.calls_per_step
            best = (worth, float(risk[index]), candidate, reason)
            break
        return best

    def _may_try(self, state: KeyState, candidate: Candidate) -> bool:
        if candidate == state.incumbent or candidate in state.banned or candidate in state.retired:
            return False
        if candidate.n_channels > state.max_channels:
            return False
        if self.memory_pressure <= self.settings.memory_threshold:
            return True
        if candidate.algorithm is not None and int(candidate.algorithm) not in self.connected:
            return False
        now = self._channels(state)
        return not now or 0 < candidate.n_channels <= now

    def _risk_us(self, state: KeyState, evidence: Evidence) -> float:
        """What one more window of a running trial may cost, from what it has cost so far."""
        trial, incumbent = state.trial, evidence.find(state.index, state.incumbent)
        slot = evidence.find(state.index, trial) if trial is not None else None
        if slot is None or incumbent is None or not evidence.n_calls[slot]:
            return 0.0
        extra = math.exp(evidence.log_us(slot)) - math.exp(evidence.log_us(incumbent))
        return max(0.0, extra) * state.calls_per_step * self.settings.steps_per_window

    def _prior(self, state: KeyState) -> Prior:
        if not isinstance(state.prior, Prior):
            self._priors_left -= 1
            state.options = self._options(state)
            state.rows = {}
            state.prior = self.knowledge.prior(state.key, state.message_bytes, state.options, self.costs)
        return state.prior

    def _options(self, state: KeyState) -> tuple[Candidate, ...]:
        """Baseline and the candidates that differ from it and from one another once NCCL has clamped them."""
        key = state.key
        seen: set[tuple[int, int, int]] = set()
        default = state.default_setting
        if default is not None and default.n_channels:
            seen.add((*cell_of(default), default.n_channels))
        kept = [BASELINE]
        for candidate in self.costs.candidates(key.communicator, key.collective):
            if candidate.algorithm is None or candidate.protocol is None:
                continue
            used = channels_used(
                Collective(key.collective), candidate.protocol, int(state.message_bytes), candidate.n_channels
            )
            effect = (*cell_of(candidate), used)
            if effect not in seen:
                seen.add(effect)
                kept.append(candidate)
        if state.incumbent not in kept:
            kept.append(state.incumbent)
        return tuple(kept)

    def _rows(self, state: KeyState) -> dict[Candidate, tuple[float, ...]]:
        """(log2 bytes, log2 channels, algorithm, protocol, prior mean, prior std) of every option."""
        prior = self._prior(state)
        if not state.rows:
            n_available = self.costs.max_channels(state.key.communicator)
            log2_bytes = math.log2(state.message_bytes)
            for index, candidate in enumerate(state.options):
                shown = candidate
                if candidate.algorithm is None and state.default_setting is not None:
                    shown = state.default_setting
                state.rows[candidate] = (
                    log2_bytes,
                    math.log2(shown.n_channels or n_available),
                    *cell_of(shown),
                    float(prior.mean[index]),
                    float(prior.std[index]),
                )
        return state.rows

    def _near(self, state: KeyState) -> Iterator[int]:
        """Key indices of the family, nearest size class first."""
        family = self._families.get(_family(state), [])
        right = bisect_left(family, (state.key.size_class, -1))
        left = right - 1
        while left >= 0 or right < len(family):
            below = state.key.size_class - family[left][0] if left >= 0 else math.inf
            above = family[right][0] - state.key.size_class if right < len(family) else math.inf
            if above <= below:
                yield family[right][1]
                right += 1
            else:
                yield family[left][1]
                left -= 1

    def _measured_near(
        self, state: KeyState, states: list[KeyState], evidence: Evidence
    ) -> tuple[Settings, Floats, Floats, Floats]:
        """Settings, starting-guess std, residual and noise variance of the slots measured near `state`."""
        slots: list[int] = []
        table: list[tuple[float, ...]] = []
        for other in self._near(state):
            if other != state.index and states[other].prior is None and self._priors_left <= 0:
                continue
            rows = self._rows(states[other])
            for slot in evidence.slots_of(other):
                row = rows.get(evidence.candidates[slot])
                if row is not None and evidence.n_calls[slot] and math.isfinite(row[4]):
                    slots.append(slot)
                    table.append((*row, other))
            if len(slots) >= MAX_POINTS:
                break
        index = np.array(slots, dtype=np.int64)
        values = np.array(table, dtype=np.float64).reshape(-1, 7)
        keys = values[:, 6].astype(np.int64)
        cells = values[:, 2:4].astype(np.int64)
        place = Settings(values[:, 0], values[:, 1], cells[:, 0], cells[:, 1], keys)
        units = evidence.n_units[index] + 1.0
        return place, values[:, 5], evidence.centre(index) - values[:, 4], evidence.sigma(keys) ** 2 / units


def _expected_improvement(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, edge + spread * normal)]."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        density = np.exp(-0.5 * np.minimum(scaled**2, 700.0)) / math.sqrt(2.0 * math.pi)
        below = 0.5 * (1.0 + _erf(scaled / math.sqrt(2.0)))
        result: Floats = np.where(np.isfinite(edge), edge * below + spread * density, 0.0)
    return result


def _erf(x: Floats) -> Floats:
    """Error function, Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7."""
    sign, x = np.sign(x), np.abs(np.clip(x, -6.0, 6.0))
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    result: Floats = sign * (1.0 - series * np.exp(-x * x))
    return result


def _family(state: KeyState) -> tuple[object, ...]:
    return state.key.communicator, state.key.collective


def _percent(log_ratio: float) -> str:
    return f"{100.0 * (1.0 - math.exp(-log_ratio)):.1f} %"


__all__ = ["NO_CELL", "Event", "Policy", "PolicySettings"]
