"""Results of the policy on grids of real machines, all taken together.

One recording in three is kept aside: nothing is tuned on it. Its figures (`sealed_`) are taken once per release of the
policy, beside those of the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.data.data_sets import Problem
from benchmarks.lib.reporting import Result

KEPT_ASIDE_ONE_IN = 3
"""Recordings, by the hash of their names."""
LEAST_GAIN = 0.02
"""Of all calls' time: with less to gain, the reached share has little meaning."""
JUDGED_CALLS = 200
"""Of each key: the aims are set for these."""
WINDOW_STEPS = 200
"""The budget is a bound over every so many steps after the first ones."""
N_CALLS = JUDGED_CALLS + 2 * WINDOW_STEPS


def is_kept_aside(name: str) -> bool:
    """Nothing may be tuned on such a recording."""
    return zlib.crc32(name.encode()) % KEPT_ASIDE_ONE_IN == 0


@dataclass(frozen=True)
class Recorded:
    """One recording's figures, in shares of time."""

    gain: float
    """Gain of the best settings over NCCL's own choices."""
    has_reached_95: bool
    """From some call within the first 200 on, the calls have 95 % of that gain."""
    loss: float
    """Of the first 200 calls against NCCL's own choices."""
    regret: float
    """Of the last quarter of these, over keys."""
    worst_window: float
    """Share of a job's time spent on slower settings than NCCL's own: the worst 200 steps after the first 200."""


def recorded(problems: Sequence[Problem], arms: NDArray[np.int64], comm_share_of_step: float) -> Recorded:
    """Judge one policy on one recording.

    Args:
        problems: keys with true times.
        arms: the choices, shape (n_keys, n_calls); N_CALLS or more.
        comm_share_of_step: of a step's time with NCCL's own choices.
    """
    default_us = np.array([problem.truth_us[0] for problem in problems])
    best_us = np.array([min(problem.truth_us) for problem in problems])
    us = np.array([np.array(problem.truth_us)[arms[key]] for key, problem in enumerate(problems)])
    judged = us[:, :JUDGED_CALLS]
    saved = default_us.sum() - judged.sum(axis=0)
    attainable = float(default_us.sum() - best_us.sum())
    last_quarter = judged[:, -JUDGED_CALLS // 4 :].mean(axis=1)
    spent = np.maximum(us - default_us[:, None], 0.0).sum(axis=0)[JUDGED_CALLS:]
    windows = np.convolve(spent, np.ones(WINDOW_STEPS), mode="valid")
    step_us = default_us.sum() / comm_share_of_step
    return Recorded(
        gain=attainable / float(default_us.sum()),
        has_reached_95=reached_95(saved, attainable),
        loss=max(0.0, float(judged.sum() / (default_us.sum() * JUDGED_CALLS)) - 1.0),
        regret=float((last_quarter / best_us - 1.0).mean()),
        worst_window=float(windows.max() / (WINDOW_STEPS * step_us)),
    )


def reached_95(saved: NDArray[np.float64], attainable: float) -> bool:
    """From some call on, the calls save 95 % of the attainable.

    Args:
        saved: by call.
        attainable: by a call of the best settings.
    """
    from_here_on = np.cumsum(saved[::-1])[::-1] / np.arange(len(saved), 0, -1)
    return bool((from_here_on[:-10] >= 0.95 * attainable).any())  # the last ten calls alone may be lucky


def together(found: Sequence[Recorded]) -> Iterator[Result]:
    """Shares of recordings and of time."""
    promising = [one for one in found if one.gain >= LEAST_GAIN]
    yield Result("recorded_grids", len(found), "recordings")
    if promising:
        share = sum(one.has_reached_95 for one in promising) / len(promising)
        yield Result("recorded_reached_95_share", share, "share", ">= 0.9")
    yield Result("recorded_loss_worst", max(one.loss for one in found), "share", "<= 0.005")
    yield Result("recorded_regret_mean", float(np.mean([one.regret for one in found])), "share", "<= 0.003")
    yield Result("budget_worst_window", max(one.worst_window for one in found), "share", "<= 0.01")
