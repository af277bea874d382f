"""Chooses the next job's change from the step times of earlier jobs.

A job's log step time is the sum of a level that drifts from day to day, the effects of the changes in force, and noise
between jobs. A Kalman filter estimates level and effects. The noise is estimated, too (its variance is inverse gamma),
so all posteriors are Student's t. The rules are:

- Each job tries one change, in addition to kept ones or instead of another value of its variable. The usual environment
runs first, and again after two trials. - The best trial has the highest expected gain over `HORIZON_JOBS`, less its own
expected loss. - Trials may lose a share of the time of all jobs, or of as many as the horizon has. The expected loss
counts even if the actual one was smaller: otherwise trials would go on until a large loss exceeds the share several
times. - A change is kept once its gain is certain, but never after a single job. Error levels over all changes and
looks sum to `FALSE_SHARE`. A change is dropped if it turns out to be slower. - If a job fails under a change, the
change is never tried again. - An untried change promises its effect on calls of other nodes, if a book has that. Half
of a gain is expected to reach the step, and all of a loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from scipy.special import ndtr, stdtrit

from ..modeling.kalman_filter import KalmanFilter
from .candidates import Candidate

USUAL: Final = ""
HORIZON_JOBS: Final = 12
LOSS_SHARE: Final = 0.02
FALSE_SHARE: Final = 0.02
TRIALS_IN_A_ROW: Final = 2
"""After this many trials the usual environment runs again, since the level may have drifted."""
MOST_SILENT: Final = 2
"""After this many jobs without a step time, a change is no longer tried."""
DAY_S: Final = 86400.0
MOST_DAYS: Final = 365.0
STEP_US: Final = (1.0, 1e12)
MOST_STEPS, MOST_STD_LOG = 10**12, 10.0
"""Larger values are not measurements."""

NOISE, NOISE_FREEDOM = 0.008, 4.0
"""Prior standard deviation (log) between equal jobs, and its weight in jobs; there are no recordings of it."""
DRIFT_PER_DAY: Final = 0.005
"""Drift (log) of the level in a day, if equal jobs differ by `NOISE`."""
EXPOSED: Final = 0.5
"""Share of calls' gain that steps are expected to have before they are measured, as in `learning/policy`."""
PRIOR_GAIN, PRIOR_LOSS, PRIOR_TRIALS = 0.02, 0.15, 2.0
"""Prior gain of an untried change if it is kept, and its loss while it is tried, as shares of a step; and the prior's
weight in trials. The loss is that of machines like recorded ones: half of the changes lose almost nothing, a few much
(`benchmarks/lib/data/environment_family.py`).
"""


class Outcome(Enum):
    """How a job ended."""

    ended = "ended"
    failed = "failed"
    """It did not start, hung in its first steps, or ended early."""
    unknown = "unknown"


class JobResult(msgspec.Struct, frozen=True):
    """One job of a training on a machine."""

    change: str
    """The variables in force, separated by spaces; empty: the usual environment."""
    step_us: float | None
    std_log: float
    """Standard deviation of its steps' log times."""
    n_steps: int
    started_at_s: float
    outcome: Outcome


class Choice(msgspec.Struct, frozen=True):
    """The next job's variables, and the reason."""

    change: str
    why: str


class Finding(msgspec.Struct, frozen=True):
    """The results of one change."""

    change: str
    gain_share: float
    """Gain as a share of step time; NaN before a job with it was measured."""
    low_share: float
    high_share: float
    """The 90 % interval is from `low_share` to this."""
    n_jobs: int
    is_banned: bool
    is_kept: bool
    why: str


Elsewhere = Mapping[str, tuple[float, float]]
"""How much longer (log) calls took on other nodes under a change, and the standard deviation; by change, in small
letters."""


def next_job(
    history: Sequence[JobResult],
    candidates: Iterable[Candidate],
    loss_share: float = LOSS_SHARE,
    elsewhere: Elsewhere = MappingProxyType({}),
) -> Choice:
    """The next job's variables; equal for equal history and candidates.

    The history has the oldest job first; candidates come in the order of trials. `loss_share` is the share of jobs'
    time that trials may lose.
    """
    return _Evidence(history, elsewhere).choice([str(one) for one in candidates], loss_share)


def kept(history: Sequence[JobResult]) -> str:
    """The proven variables in force, separated by spaces."""
    return _Evidence(history).base


def findings(history: Sequence[JobResult]) -> list[Finding]:
    """The results of each change that was ever in force, in the order of their first jobs."""
    evidence = _Evidence(history)
    return [evidence.finding(change) for change in evidence.n_jobs]


class _Evidence:
    """The evidence of a history, taken in job by job."""

    def __init__(self, history: Sequence[JobResult], elsewhere: Elsewhere = MappingProxyType({})) -> None:
        self._elsewhere = elsewhere
        self.n_jobs: Counter[str] = Counter()
        """Measured jobs by change, in the order of their first jobs; 0: the job failed before a measurement."""
        self.banned: set[str] = set()
        self._kept: list[str] = []
        self._filter = KalmanFilter()
        self._filter.add(1.0)
        self._places: dict[str, int] = {}
        self._surprises, self._freedom = NOISE_FREEDOM, NOISE_FREEDOM
        self._origin = self._last_s = math.nan
        self._total_us = self._lost_us = self._staked_us = 0.0
        self._first_losses: list[float] = []
        self._n_measured = self._trials_in_a_row = 0
        self._has_base = False
        self._looked_at: list[str] = []
        self._silent: Counter[str] = Counter()
        for job in history:
            self._take_in(job)

    @property
    def base(self) -> str:
        """The kept variables, in the form of `JobResult.change`."""
        return _together(self._kept)

    def _take_in(self, job: JobResult) -> None:
        changes = sorted(set(job.change.split()))
        tried = [one for one in changes if one not in self._kept]
        for one in changes:
            self.n_jobs.setdefault(one, 0)
        if job.outcome is Outcome.failed:
            self.banned.update(tried or changes)
            self._kept = [one for one in self._kept if one not in self.banned]
        elif job.outcome is Outcome.ended and _is_measured(job):
            self._measure(job, changes, tried)
            self._judge()
        else:
            self._silent.update(tried)

    def _measure(self, job: JobResult, changes: Sequence[str], tried: Sequence[str]) -> None:
        assert job.step_us is not None
        log_us = math.log(job.step_us)
        stake = sum(self._promise(one)[1] for one in tried)
        if not self._n_measured:
            self._origin = log_us
        if math.isfinite(job.started_at_s):
            if math.isfinite(self._last_s):
                days = (job.started_at_s - self._last_s) / DAY_S
                self._filter.covariance[0, 0] += DRIFT_PER_DAY**2 * min(max(0.0, days), MOST_DAYS)
            self._last_s = job.started_at_s
        is_new = not self._n_measured
        for one in changes:
            if one not in self._places:
                self._places[one] = self._filter.add(1.0)
                is_new = True
        noise = math.hypot(NOISE, job.std_log / math.sqrt(job.n_steps))
        surprise, variance = self._filter.observe(self._design(changes), log_us - self._origin, noise)
        if not is_new:
            self._surprises += surprise**2 / variance
            self._freedom += 1.0
        self._n_measured += 1
        self.n_jobs.update(changes)
        ratio = math.exp(sum(self._effect(one, self._replaced(one))[0] for one in tried))
        time_us = job.n_steps * job.step_us
        self._total_us += time_us
        self._staked_us += time_us / ratio * stake
        self._lost_us += time_us * max(0.0, 1.0 - 1.0 / ratio)
        if len(tried) == 1 and self.n_jobs[tried[0]] == 1:
            self._first_losses.append(max(0.0, ratio - 1.0))
        self._trials_in_a_row = self._trials_in_a_row + 1 if tried else 0
        self._has_base |= not tried

    def _judge(self) -> None:
        """Keep proven changes, in place of another value of the same variable, and drop those that became slower."""
        self._kept = [one for one in self._kept if self._effect(one)[0] < 0.0]
        self._looked_at += [one for one, n_jobs in self.n_jobs.items() if n_jobs > 1 and one not in self._looked_at]
        for order, one in enumerate(self._looked_at, 1):
            looks = self.n_jobs[one] - 1
            if one not in self._kept and one not in self.banned:
                share = FALSE_SHARE / (order * (order + 1) * looks * (looks + 1))
                mean, sd = self._effect(one, self._replaced(one))
                if mean + sd * stdtrit(self._freedom, 1.0 - share) < 0.0:
                    self._kept = self._with(one)

    def _replaced(self, change: str) -> list[str]:
        """The kept change of the same variable."""
        return [one for one in self._kept if _variable(one) == _variable(change)]

    def _with(self, change: str) -> list[str]:
        """The kept changes with this one."""
        return [one for one in self._kept if _variable(one) != _variable(change)] + [change]

    def _design(self, changes: Iterable[str]) -> np.ndarray:
        design = np.zeros(len(self._filter.mean))
        design[[0, *(self._places[one] for one in changes)]] = 1.0
        return design

    def _effect(self, change: str, instead_of: Iterable[str] = ()) -> tuple[float, float]:
        """Mean and scale (log) of a change's effect on the step time, alone or relative to others."""
        design = self._design([change]) - self._design(instead_of)
        mean, variance = self._filter.expected(design)
        return mean, math.sqrt(variance * self._surprises / self._freedom)

    def choice(self, candidates: Sequence[str], loss_share: float) -> Choice:
        """The next job's variables, and the reason."""
        if not self._has_base or self._trials_in_a_row >= TRIALS_IN_A_ROW:
            return Choice(self.base, "others are compared with it")
        closed = {*self.banned, *self._kept, *(one for one, n in self._silent.items() if n >= MOST_SILENT)}
        open_ = [one for one in candidates if one not in closed]
        promises = {one: self._promise(one) for one in open_}
        allowed = [one for one in open_ if promises[one][0] > 0.0 and self._may_lose(promises[one][1], loss_share)]
        if not open_:
            return Choice(self.base, "no change is left to try")
        if not allowed:
            return Choice(self.base, "what a trial may lose now is more than it promises, or than trials may cost")
        best = max(allowed, key=lambda one: promises[one][0])
        n_jobs = self.n_jobs[best]
        jobs = f"in {n_jobs} job{'s'[: n_jobs > 1]}"
        is_known = best.lower() in self._elsewhere
        first = "calls were faster with it on other nodes" if is_known else "tried for the first time"
        why = f"{best} looked faster {jobs}" if n_jobs else first
        return Choice(_together(self._with(best)), why)

    def _promise(self, change: str) -> tuple[float, float]:
        """The value of a trial and its expected loss, in jobs' time."""
        if not self.n_jobs[change] and change.lower() in self._elsewhere:
            mean, sd = self._elsewhere[change.lower()]
            gain, loss = _expected_above(-mean, sd), _expected_above(mean, sd)
            return EXPOSED * (HORIZON_JOBS * gain - loss), loss
        if not self.n_jobs[change]:
            n_trials = PRIOR_TRIALS + len(self._first_losses)
            loss = (PRIOR_TRIALS * PRIOR_LOSS + sum(self._first_losses)) / n_trials
            return HORIZON_JOBS * PRIOR_GAIN, loss
        mean, sd = self._effect(change, self._replaced(change))
        gain, loss = _expected_above(-mean, sd), _expected_above(mean, sd)
        return HORIZON_JOBS * gain - loss, max(0.0, mean)

    def _may_lose(self, loss: float, loss_share: float) -> bool:
        job_us = self._total_us / self._n_measured
        budget_us = loss_share * max(self._total_us + job_us, HORIZON_JOBS * job_us)
        return max(self._lost_us, self._staked_us) + loss * job_us <= budget_us

    def finding(self, change: str) -> Finding:
        """The measured effect of a change."""
        is_banned, is_kept = change in self.banned, change in self._kept
        why = "a job failed under it" if is_banned else "proven" if is_kept else ""
        if self._silent[change] >= MOST_SILENT:
            why = why or f"{self._silent[change]} jobs under it left no step time"
        if not self.n_jobs[change]:
            return Finding(change, math.nan, math.nan, math.nan, 0, is_banned, is_kept, why)
        mean, sd = self._effect(change)
        off = sd * float(stdtrit(self._freedom, 0.95))
        gain, low, high = (-math.expm1(one) for one in (mean, mean + off, mean - off))
        why = why or ("slower" if low < 0 and high < 0 else "not certain yet")
        return Finding(change, gain, low, high, self.n_jobs[change], is_banned, is_kept, why)


def _is_measured(job: JobResult) -> bool:
    return (
        job.step_us is not None
        and STEP_US[0] <= job.step_us <= STEP_US[1]
        and 0 < job.n_steps <= MOST_STEPS
        and 0.0 <= job.std_log <= MOST_STD_LOG
    )


def _variable(change: str) -> str:
    return change.partition("=")[0]


def _together(changes: Iterable[str]) -> str:
    return " ".join(sorted(changes))


def _expected_above(mean: float, sd: float) -> float:
    """Mean of the positive part of a normal quantity."""
    if sd <= 0.0:
        return max(0.0, mean)
    z = mean / sd
    return float(mean * ndtr(z) + sd * math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi))
