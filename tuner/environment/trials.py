"""Which change the next job runs under, from the step times of the jobs before it.

A job's log step time is a level, which wanders from day to day, plus the effects of the changes in force, plus what
differs from job to job. A Kalman filter knows level and effects; by how much jobs differ is learned beside it (its
scale is inverse gamma), so all doubt is Student's t. Of this follow the rules:

- One change at a time, on top of what is kept or instead of another value of its variable. The usual runs first, and
  again after two trials.
- The trial that promises most: the gain that is expected over `HORIZON_JOBS`, less the loss that is expected in it.
- Trials may lose a share of the time of all jobs, or of as many as the horizon has. What was expected to be lost counts
  as lost even where luck was better: else a job would go on until its luck ends, and lose a multiple.
- A change is kept once its gain is certain at a level that, over all changes and all looks, adds up to `FALSE_SHARE`;
  never after a single job. It is dropped if it turns out to be slower.
- A job that failed under a change bans it for good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
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
"""Then the usual runs again: the level may have wandered."""
MOST_SILENT: Final = 2
"""A change under which so many jobs left no step time is tried no more."""
DAY_S: Final = 86400.0
MOST_DAYS: Final = 365.0
STEP_US: Final = (1.0, 1e12)
MOST_STEPS, MOST_STD_LOG = 10**12, 10.0
"""What is beyond was not measured."""

NOISE, NOISE_FREEDOM = 0.008, 4.0
"""How far (log) jobs alike differ before any are known, and how many jobs this is worth: no recording tells."""
DRIFT_PER_DAY: Final = 0.005
"""How far (log) the level wanders in a day, if jobs alike differ by `NOISE`."""
PRIOR_GAIN, PRIOR_LOSS, PRIOR_TRIALS = 0.02, 0.15, 2.0
"""What a change that nobody tried gains if it is kept and loses while it is tried, in shares of a step; and how many
trials this is worth. Machines that are like recorded ones lose so much: half of the changes next to nothing, a few all
the more (`benchmarks/lib/data/environment_family.py`).
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
    """What was in force, apart by blanks; empty: the usual."""
    step_us: float | None
    std_log: float
    """Of its steps' log times."""
    n_steps: int
    started_at_s: float
    outcome: Outcome


class Choice(msgspec.Struct, frozen=True):
    """What the next job runs under."""

    change: str
    why: str


class Finding(msgspec.Struct, frozen=True):
    """What is known of one change."""

    change: str
    gain_share: float
    """Of step time; NaN while no job under it has been measured."""
    low_share: float
    high_share: float
    """With `low_share` the 90 % interval."""
    n_jobs: int
    is_banned: bool
    is_kept: bool
    why: str


def next_job(
    history: Sequence[JobResult], candidates: Iterable[Candidate], loss_share: float = LOSS_SHARE
) -> Choice:
    """What the next job runs under; the same for the same history and candidates.

    Args:
        history: jobs of one training on one machine, the oldest first.
        candidates: in the order in which they should be tried.
        loss_share: of the time of jobs, that trials may lose.
    """
    return _Evidence(history).choice([str(one) for one in candidates], loss_share)


def kept(history: Sequence[JobResult]) -> str:
    """What is proven and in force, apart by blanks."""
    return _Evidence(history).base


def findings(history: Sequence[JobResult]) -> list[Finding]:
    """What is known of each change that was ever in force, in the order of their first jobs."""
    evidence = _Evidence(history)
    return [evidence.finding(change) for change in evidence.n_jobs]


class _Evidence:
    """What a history says, taken in job by job."""

    def __init__(self, history: Sequence[JobResult]) -> None:
        self.n_jobs: Counter[str] = Counter()
        """Measured ones by change, in the order of their first jobs; 0: it failed before it was."""
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
        """What is kept, as a job's change has it."""
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
        """Keep what is proven, in the place of another value of the same variable, and drop what became slower."""
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
        """What is kept of the same variable."""
        return [one for one in self._kept if _variable(one) == _variable(change)]

    def _with(self, change: str) -> list[str]:
        """What is kept, with this change."""
        return [one for one in self._kept if _variable(one) != _variable(change)] + [change]

    def _design(self, changes: Iterable[str]) -> np.ndarray:
        design = np.zeros(len(self._filter.mean))
        design[[0, *(self._places[one] for one in changes)]] = 1.0
        return design

    def _effect(self, change: str, instead_of: Iterable[str] = ()) -> tuple[float, float]:
        """Mean and scale (log) of what a change does to the step time, alone or against others."""
        design = self._design([change]) - self._design(instead_of)
        mean, variance = self._filter.expected(design)
        return mean, math.sqrt(variance * self._surprises / self._freedom)

    def choice(self, candidates: Sequence[str], loss_share: float) -> Choice:
        """What the next job runs under."""
        if not self._has_base or self._trials_in_a_row >= TRIALS_IN_A_ROW:
            return Choice(self.base, "the usual, to compare with")
        closed = {*self.banned, *self._kept, *(one for one, n in self._silent.items() if n >= MOST_SILENT)}
        open_ = [one for one in candidates if one not in closed]
        promises = {one: self._promise(one) for one in open_}
        allowed = [one for one in open_ if promises[one][0] > 0.0 and self._may_lose(promises[one][1], loss_share)]
        if not allowed:
            return Choice(self.base, "nothing that is open promises more than a trial may lose")
        best = max(allowed, key=lambda one: promises[one][0])
        n_jobs = self.n_jobs[best]
        jobs = f"in {n_jobs} job{'s'[: n_jobs > 1]}"
        why = f"{best} may be faster, as it looked {jobs}" if n_jobs else f"{best} is tried for the first time"
        return Choice(_together(self._with(best)), why)

    def _promise(self, change: str) -> tuple[float, float]:
        """What a trial is worth, and what it is expected to lose, in jobs' time."""
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
        """What is known of a change."""
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
    """Mean of a normal quantity where it is positive, counted as 0 where it is not."""
    if sd <= 0.0:
        return max(0.0, mean)
    z = mean / sd
    return float(mean * ndtr(z) + sd * math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi))
