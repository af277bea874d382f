"""How much the policy loses against the best setting.

python -m benchmarks policy_regret [--family] [--data DIR] [--sealed] [--quick] [--json]

Data: shipped fabrics, or grids below DIR, or with `--family` random machines; `sealed_`: data that nothing was tuned
on, to be judged once per release. `ours_cold` begins with nothing, `ours_warm` after another job. `regret` is that of
the last quarter of the calls. `calls_to_95_percent_gain`: per key, until nine in ten calls have it; `..._of_all_gain`:
all keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lib.argument_types import a_folder
from benchmarks.lib.data.data_sets import DataSet, Problem, of_folder, shipped
from benchmarks.lib.reporting import Result, options_of, report, say
from benchmarks.policy.family_figures import family_results
from benchmarks.policy.recorded_figures import N_CALLS, Recorded, is_kept_aside, recorded, together
from benchmarks.policy.regret_jobs import COMM_SHARE_OF_STEP, Ours, play, warm_knowledge
from zerotune.tuner.learning.knowledge import Knowledge

ONE_IN_TEN_WRONG = 1.282
"""Standard deviations (normal, one-sided)."""
QUICK_S = 45
"""With --quick no data set is begun after so many seconds."""
BEST_BY = 0.97
"""Time of NCCL's own choice over the best other setting's, if nothing is to be gained."""


def judge(name: str, problems: Sequence[Problem], policies: Sequence[Ours], arms: np.ndarray) -> Iterator[Result]:
    """The figures of jobs on one data set.

    Args:
        problems: keys with true times.
        policies: that have played.
        arms: the result of `play`, shape (n_policies, n_keys, n_calls).
    """
    n_calls = arms.shape[2]
    for at, policy in enumerate(policies):
        late, cost, until = [], [], []
        total = default_total = attainable = 0.0
        saved = np.zeros(n_calls)
        for key, problem in enumerate(problems):
            truth = np.array(problem.truth_us)
            us = truth[arms[at, key]]
            best, default = truth.min(), truth[0]
            late.append(us[-n_calls // 4 :].mean() / best - 1)
            cost.append(us.mean() / default - 1)
            total, default_total = total + us.sum(), default_total + default * n_calls
            if default / best > 1.01:
                reached = default - us >= 0.95 * (default - best)
                # From here on nine in ten calls have the gain (the rest may be exploration elsewhere).
                share = np.cumsum(reached[::-1])[::-1] / np.arange(n_calls, 0, -1)
                found = np.flatnonzero((share >= 0.9) & reached)
                until.append(float(found[0]) if len(found) else float(n_calls))
            saved += default - us
            attainable += default - best
        label = f"{name}:{policy.name}"
        yield Result(f"regret_mean@{label}", 100 * float(np.mean(late)), "%", "<= 2")
        yield Result(f"regret_worst@{label}", 100 * float(np.max(late)), "%", "<= 10")
        loss = 100 * max(0.0, total / default_total - 1)
        yield Result(f"loss_vs_default_worst@{label}", loss, "%", "<= 0.5")
        yield Result(f"worst_key_loss@{label}", 100 * max(0.0, float(np.max(cost))), "%")
        if attainable > 0.01 * default_total / n_calls:
            from_here_on = np.cumsum(saved[::-1])[::-1] / np.arange(n_calls, 0, -1)
            there = np.flatnonzero(from_here_on >= 0.95 * attainable)
            calls = float(there[0]) if len(there) else float(n_calls)
            yield Result(f"calls_to_95_percent_of_all_gain@{label}", calls, "calls")
        if until:
            target = {"ours_warm": "<= 20", "ours_cold": "<= 60"}[policy.name]
            yield Result(f"calls_to_95_percent_gain@{label}", float(np.median(until)), "calls", target)


def least_calls(data: DataSet) -> Iterator[Result]:
    """Calls of a test that knows which two settings to compare: the best, and the best without 95 % of the gain.

    One in ten is wrong. Half of the keys with something to gain need no more.
    """
    needed = []
    for problem in data.problems:
        truth = np.array(problem.truth_us)
        best, default = truth.min(), truth[0]
        if default / best > 1.01:
            too_slow = truth[default - truth < 0.95 * (default - best)].min()
            needed.append((2 * ONE_IN_TEN_WRONG * problem.noise / math.log(too_slow / best)) ** 2)
    if needed:
        yield Result(f"calls_to_tell_two_settings_apart@{data.name}", float(np.median(needed)), "calls")


def recordings(folder: Path | None, sealed: bool) -> Iterator[DataSet]:
    """Published grids: those that are kept aside, or the others."""
    if folder is not None:
        yield from (one for one in of_folder(folder) if is_kept_aside(one.name) == sealed)


def false_promotions(data: DataSet, n_calls: int, n_rounds: int) -> tuple[int, int]:
    """Keys of all rounds, and the number of those promoted although every candidate takes as long as NCCL's choice.

    Args:
        n_calls: per key.
        n_rounds: of noise.
    """
    flat = [
        Problem(p.key, p.message_bytes, p.candidates, p.ran_by_default, (p.truth_us[0],) * len(p.truth_us), p.noise)
        for p in data.problems
    ]
    n_keys = n_promoted = 0
    for seed in range(n_rounds):
        same = Ours("ours_cold", flat, data.facts, Knowledge())
        play(flat, [same], n_calls, seed=2 + seed)
        n_keys += len(flat)
        n_promoted += len({one.key for one in same.brain.decisions() if one.kind == "promote"})
    return n_keys, n_promoted


def where_nccl_is_best(problems: Sequence[Problem]) -> list[Problem]:
    """These keys, but every other setting takes longer than NCCL's own choice."""
    return [
        replace(one, truth_us=(BEST_BY * min(one.truth_us[1:], default=one.truth_us[0]), *one.truth_us[1:]))
        for one in problems
    ]


def loss_where_nccl_is_best(data: DataSet, n_calls: int, seed: int) -> Iterator[Result]:
    """The loss of exploration that cannot pay, and the budget that was spent; `n_calls` is per key."""
    problems = where_nccl_is_best(data.problems)
    ours = Ours("ours_cold", problems, data.facts, Knowledge())
    arms = play(problems, [ours], n_calls, seed)
    wanted = {f"loss_vs_default_worst@{data.name}:ours_cold": f"loss_where_nccl_is_best@{data.name}:ours_cold"}
    for result in judge(data.name, problems, [ours], arms):
        if result.metric in wanted:
            yield replace(result, metric=wanted[result.metric])
    spent = ours.brain.spent_percent
    yield Result(f"budget_spent_where_nccl_is_best@{data.name}:ours_cold", spent, "% of step time", "<= 1")


def judge_recordings(folder: Path, *, sealed: bool) -> Iterator[Recorded]:
    """Our policy on each recording, those that are kept aside or the others, for longer than elsewhere."""
    for data in recordings(folder, sealed):
        say(f"{data.name}: together with the other recordings")
        ours = Ours("ours_cold", data.problems, data.facts, Knowledge())
        (arms,) = play(data.problems, [ours], N_CALLS, seed=0)
        yield recorded(data.problems, arms, COMM_SHARE_OF_STEP)


def judge_all(folder: Path | None, *, is_quick: bool, sealed: bool, until_s: float) -> Iterator[Result]:
    """The figures of each data set, then those of all recordings and of all keys together.

    Args:
        folder: of recordings; None: shipped fabrics.
        is_quick: fewer sizes and calls.
        sealed: on recordings that are kept aside, or on the others.
        until_s: no data set is begun after that (`time.monotonic`).
    """
    n_calls, n_keys, n_promoted = 100 if is_quick else 200, 0, 0
    for data in shipped(0.5 if is_quick else 1.0) if folder is None else recordings(folder, sealed):
        if time.monotonic() > until_s:
            break
        say(f"{data.name}: {len(data.problems)} keys")
        ours = [
            Ours("ours_cold", data.problems, data.facts, Knowledge()),
            Ours("ours_warm", data.problems, data.facts, warm_knowledge(data, n_calls)),
        ]
        yield from judge(data.name, data.problems, ours, play(data.problems, ours, n_calls, seed=0))
        for policy in ours:
            spent = policy.brain.spent_percent
            yield Result(f"budget_spent@{data.name}:{policy.name}", spent, "% of step time", "<= 1")
        yield from least_calls(data)
        yield from loss_where_nccl_is_best(data, n_calls, 5)
        same = false_promotions(data, n_calls, 1 if is_quick else 3)
        n_keys, n_promoted = n_keys + same[0], n_promoted + same[1]
    if folder is not None and (found := list(judge_recordings(folder, sealed=sealed))):
        yield from together(found)
    yield Result("aa_keys", n_keys, "keys")
    yield Result("aa_false_promotion_rate", 100 * n_promoted / max(1, n_keys), "% of keys", "<= 1")


def main() -> None:
    parser = options_of(__doc__, quick="fewer sizes and calls; ends within 60 s")
    parser.add_argument("--data", type=a_folder, help="judge on the grids below this folder")
    parser.add_argument("--sealed", action="store_true", help="beside them, on what is kept aside")
    parser.add_argument("--family", action="store_true", help="on machines that are like recorded ones")
    arguments = parser.parse_args()
    if arguments.sealed and arguments.data is None and not arguments.family:
        parser.error("--sealed: nothing shipped is kept aside; add --data DIR or --family")
    if arguments.data is not None and next(of_folder(arguments.data), None) is None:
        parser.error(f"--data {arguments.data}: no table below it has NCCL's own choice and a forced setting")
    if arguments.family:
        found = family_results(
            partial(recordings, arguments.data), is_quick=arguments.quick, with_sealed=arguments.sealed
        )
        report("policy_regret", list(found), as_json=arguments.json)
        return
    results: list[Result] = []
    for prefix in ("", "sealed_") if arguments.sealed else ("",):
        until_s = time.monotonic() + QUICK_S / (1 + arguments.sealed) if arguments.quick else math.inf
        found = judge_all(arguments.data, is_quick=arguments.quick, sealed=bool(prefix), until_s=until_s)
        results += [replace(one, metric=prefix + one.metric) for one in found]
    report("policy_regret", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
