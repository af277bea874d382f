"""Whether the stated gain of a job is true: intervals against simulated jobs whose gain is known.

python -m benchmarks gain_interval [--jobs N] [--quick] [--json]

Jobs have 100 to 5,000 steps, heavy-tailed noise of 0.3 to 6 %, disturbances by chance, and a gain of -2 to 30 %; a
third has none. Claims are counted over jobs without a gain, coverage over all jobs with a figure, costs over jobs with
a gain. Costs of `short` jobs stand apart: their first windows are never repaid.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.lib.reporting import Result, report
from zerotune.store.records import StepRecord
from zerotune.store.step_times import NEIGHBOURS, SideBySide
from zerotune.tuner.learning.policy.control import ControlWindows
from zerotune.tuner.learning.policy.risk import FIRST_LOOK_STEPS

N_JOBS = 2400
N_QUICK = 400
SHARE = 0.001
"""Most of step time that control windows may lose, as in the daemon."""
GAINS = (-0.02, -0.01, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
REPAID = 2500
"""Jobs of so many steps have mostly repaid their first windows; with 30 % to gain it takes 3,600."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """One job: its gain, its interval, the steps until a figure, and the cost of the figure."""

    gain: float
    low: float
    high: float
    """Infinite if there was no figure."""
    first_figure: float
    """Steps after a setting came into force; infinite if there was no figure."""
    n_steps: int
    cost_share: float
    """Of step time."""

    @property
    def is_told(self) -> bool:
        return math.isfinite(self.first_figure)


def noise(chance: np.random.Generator, n_steps: int) -> Floats:
    """Log step times of a job without settings, about a level of its own."""
    scale = math.exp(chance.uniform(math.log(0.003), math.log(0.06)))
    shared = chance.choice([0.0, 0.5, 0.9, 0.98])
    shocks = chance.standard_t(3, n_steps) * scale / math.sqrt(3.0)
    wander = np.zeros(n_steps)
    for step in range(1, n_steps):
        wander[step] = shared * wander[step - 1] + chance.normal(0.0, scale * math.sqrt(1.0 - shared**2))
    log_us = (shocks + (wander if shared else 0.0)) / (math.sqrt(2.0) if shared else 1.0)
    happens = chance.random(5) < (0.4, 0.3, 0.3, 0.3, 0.4)
    if happens[0]:
        log_us += chance.uniform(-0.0005, 0.0005) * np.arange(n_steps)
    if happens[1]:  # another batch size, now and then
        for step in chance.integers(0, n_steps, 3):
            log_us[step:] += chance.uniform(-0.5, 0.5)
    if happens[2]:  # checkpoints
        period = int(chance.choice([20, 50, 100, 250]))
        log_us[int(chance.integers(0, period)) :: period] += math.log(chance.uniform(1.5, 20.0))
    if happens[3]:  # bursts of a neighbour
        for step in chance.integers(0, n_steps, max(1, n_steps // 100)):
            log_us[step : step + int(chance.integers(3, 30))] += chance.uniform(0.02, 0.5)
    if happens[4]:  # a busy host
        begin = int(chance.integers(0, n_steps))
        busy = slice(begin, begin + 1000)
        log_us[busy] = math.log(2.0) + 10.0 * np.minimum(scale, 0.02) / scale * log_us[busy]
    return log_us


def job(seed: int) -> Judged:
    chance = np.random.default_rng(seed)
    n_steps = round(math.exp(chance.uniform(math.log(100), math.log(5000))))
    gain = 0.0 if chance.random() < 1 / 3 else float(chance.choice(GAINS))
    log_us, adopted_at = noise(chance, n_steps), int(chance.integers(14, 40))
    guess = gain * math.exp(chance.normal(0.0, 0.1))
    windows, together = ControlWindows(SHARE, seed=seed), SideBySide()
    controls: set[int] = set()
    lost = total = 0.0
    first_figure = math.inf
    for step, log_base in enumerate(log_us.tolist()):
        is_own = step < adopted_at or step in controls
        log_step = log_base - (math.log(1.0 - gain) if is_own else 0.0)
        total += math.exp(log_step)
        if step >= adopted_at:
            together.add(StepRecord(step, 1, math.exp(log_step)), is_control=step in controls)
        if step in controls:
            lost += math.exp(log_step) * gain
        if math.isinf(first_figure) and step % 5 == 0 and together.saved() is not None:
            first_figure = step - adopted_at
        if windows.is_due(step):
            if step < adopted_at:
                windows.put_off(step)
            elif windows.is_calm(step, "adopted"):
                windows.begun(step, guess)
                begin = step + 1 + NEIGHBOURS
                controls.update(range(begin, begin + FIRST_LOOK_STEPS))
    saved = together.saved()
    if saved is None:
        return Judged(gain, -math.inf, math.inf, math.inf, n_steps, lost / total)
    return Judged(gain, saved.low_share, saved.high_share, first_figure, n_steps, lost / total)


def figures(judged: list[Judged]) -> list[Result]:
    told = [one for one in judged if one.is_told]
    none = [one for one in told if one.gain == 0.0]
    late = [one.first_figure for one in judged if one.n_steps >= 250]
    held = np.mean([one.low <= one.gain <= one.high for one in told])
    widths = [one.high - one.low for one in told if one.n_steps >= 1000]
    seen = [one.low > 0 for one in told if one.gain >= 0.05]
    gaining = [one for one in judged if one.gain > 0.0]  # in others windows lose nothing
    long = [one.cost_share for one in gaining if one.n_steps >= REPAID]
    short = [one.cost_share for one in gaining if one.n_steps < REPAID]
    return [
        Result("gain_interval_coverage", float(held), "ratio", ">= 0.93"),
        Result("gain_claimed_where_none", float(np.mean([one.low > 0 for one in none])), "ratio", "<= 0.01"),
        Result("loss_claimed_where_none", float(np.mean([one.high < 0 for one in none])), "ratio", "<= 0.01"),
        Result("first_figure_steps", max(late), "steps", "<= 100"),
        Result("gain_interval_width", float(np.median(widths)), "ratio"),
        Result("gain_of_5_percent_seen", float(np.mean(seen)), "ratio"),
        Result("control_cost_share", float(np.mean(long)), "ratio", f"<= {SHARE}"),
        Result("control_cost_share_worst", max(long), "ratio", f"<= {SHARE}"),
        Result("control_cost_share_short", float(np.mean(short)), "ratio", f"<= {SHARE}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=N_JOBS, help=f"how many are played; usually {N_JOBS}")
    parser.add_argument("--quick", action="store_true", help=f"{N_QUICK} jobs")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    n_jobs = N_QUICK if arguments.quick else arguments.jobs
    report("gain_interval", figures([job(seed) for seed in range(n_jobs)]), as_json=arguments.json)


if __name__ == "__main__":
    main()
