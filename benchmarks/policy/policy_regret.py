"""How much each policy loses against the best setting, on equal terms: same keys, same calls, same noise.

    python -m benchmarks policy_regret [--quick] [--json] [--store FILE] [--data DIR] [--generated N] [--only TEXT]
                                       [--draws N] [--calls N] [--looks-every N] [--undescribed] [--ours-only]
                                       [--recorded-only] [--sealed]
    python -m benchmarks policy_regret --family [--sealed] [--data DIR] [--quick] [--json]

Data sets: every shipped fabric, `--generated` random ones, every fabric of a store (`--store`), and everything measured
below `--data`: tuner CSVs and published nccl-tests grids; each also with nothing to gain (A/A, NCCL best). A training
step makes one call per key; with NCCL's own choices communication is 30 % of it. Computation takes as long whatever
the communication takes, but for 1 % noise. Ours is asked for a plan after each step, or `--looks-every` so many, as
the daemon is where steps are short; it is adopted at the next step. Figures, per data set and policy:

    regret_mean, regret_worst       of the last quarter of the calls, over keys
    loss_vs_default_worst           of all calls' time against NCCL's default; 0 when there was a gain
    worst_key_loss                  the same of the key that lost most
    calls_to_95_percent_gain        per key with more than 1 % to gain, median: from then on nine in ten calls have it
    calls_to_95_percent_of_all_gain from then on the calls of all keys together have 95 % of what can be saved
    calls_to_tell_two_settings_apart a floor of the calls per key: those of two settings whose names are known, median
    loss_where_nccl_is_best         ours, had NCCL's own choice been 3 % faster at every key than anything else
    budget_spent                    exploration in percent of training time, as the policy accounts for it

Peers and ours meet one draw of noise; `--draws N` plays ours under N others, and tells the mean and the worst of each
figure. Recordings (`--data`) are also judged together: `recorded_*`, `budget_worst_window`. One in three of them, and
a range of seeds, are kept aside: `--sealed` judges on those, too, with `sealed_` before each figure; that is done once
per release of the policy. `--curves FILE` writes regret by call of every policy, which `learning_pictures.py` draws.

`--family` judges on random machines that are like recorded ones instead, by pairs of jobs (`family_figures`); of a
`--data` folder its figures are `recorded_`. It takes about ten minutes on two cores, and as long again if `--sealed`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from benchmarks.lib.argument_types import a_file_to_write, natural, positive
from benchmarks.lib.data.data_sets import (
    DataSet,
    add_sources,
    as_undescribed,
    check_sources,
    generated,
    of_folder,
    of_store,
    shipped,
)
from benchmarks.lib.reporting import Result, report
from benchmarks.policy.family_figures import family_results
from benchmarks.policy.recorded_figures import N_CALLS, SEALED_SEEDS, Recorded, is_kept_aside, recorded, together
from benchmarks.policy.regret_jobs import COMM_SHARE_OF_STEP, Ours, play, warm_knowledge
from benchmarks.policy.regret_policies import Default, Problem, peers
from zerotune.tuner.learning.knowledge import Knowledge

ONE_IN_TEN_WRONG = 1.282
"""Standard deviations (normal, one-sided)."""
FIRST_GENERATED_SEED = 1000
"""Generated fabrics below this seed were looked at while the policy was made."""
QUICK_S = 45
"""With --quick no data set is begun after so many seconds."""
OF_FAMILY = ("family", "sealed", "data", "quick", "json", "seed")
"""Options that may be given with --family."""
BEST_BY = 0.97
"""What NCCL's own choice takes of the time of the best other setting, where nothing is to be gained."""


def judge(name: str, problems: Sequence[Problem], policies: Sequence[Default], arms: np.ndarray) -> Iterator[Result]:
    """The figures of every policy on one data set.

    Args:
        name: of the data set.
        problems: keys with true times.
        policies: that have played.
        arms: what `play` returned, shape (n_policies, n_keys, n_calls).

    Yields:
        Regret, losses, and calls until the gain.
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
        ours = policy.name.startswith("ours")
        yield Result(f"regret_mean@{label}", 100 * float(np.mean(late)), "%", "<= 2" if ours else "")
        yield Result(f"regret_worst@{label}", 100 * float(np.max(late)), "%", "<= 10" if ours else "")
        yield Result(
            f"loss_vs_default_worst@{label}",
            100 * max(0.0, total / default_total - 1),
            "%",
            "<= 0.5" if ours else "",
        )
        yield Result(f"worst_key_loss@{label}", 100 * max(0.0, float(np.max(cost))), "%")
        if attainable > 0.01 * default_total / n_calls:
            from_here_on = np.cumsum(saved[::-1])[::-1] / np.arange(n_calls, 0, -1)
            there = np.flatnonzero(from_here_on >= 0.95 * attainable)
            calls = float(there[0]) if len(there) else float(n_calls)
            yield Result(f"calls_to_95_percent_of_all_gain@{label}", calls, "calls")
        if until:
            target = {"ours_warm": "<= 20", "ours_cold": "<= 60"}.get(policy.name, "")
            yield Result(f"calls_to_95_percent_gain@{label}", float(np.median(until)), "calls", target)


def least_calls(data: DataSet) -> Iterator[Result]:
    """What a test would need that was told which two settings to compare: the best, and the best of those without
    95 % of the gain; one in ten wrong. Half of the keys with something to gain need no more.
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


def over_draws(data: DataSet, n_calls: int, n_draws: int, looks_every: int) -> Iterator[Result]:
    """Our policy again under other noise, also in the earlier job.

    Args:
        data: the fabric's keys.
        n_calls: per key.
        n_draws: of noise.
        looks_every: steps between two questions for a plan.

    Yields:
        Mean and worst of each figure of `judge`.
    """
    found: dict[str, list[Result]] = {}
    for seed in range(10, 10 + n_draws):
        known = warm_knowledge(data.problems, data.facts, n_calls, 100 + seed, looks_every)
        ours = [
            Ours("ours_cold", data.problems, data.facts, Knowledge(), looks_every),
            Ours("ours_warm", data.problems, data.facts, known, looks_every),
        ]
        judged = judge(data.name, data.problems, ours, play(data.problems, ours, n_calls, seed))
        for result in chain(judged, loss_where_nccl_is_best(data, n_calls, seed, looks_every)):
            found.setdefault(result.metric, []).append(result)
    for metric, results in found.items():
        values = [result.value for result in results]
        yield replace(results[0], metric=f"mean_of_{n_draws}:{metric}", value=float(np.mean(values)))
        yield replace(results[0], metric=f"worst_of_{n_draws}:{metric}", value=max(values))


def regret_by_call(
    problems: Sequence[Problem], policies: Sequence[Default], arms: np.ndarray
) -> dict[str, list[float]]:
    """Mean regret over keys at every call, in percent.

    Args:
        problems: keys with true times.
        policies: that have played.
        arms: what `play` returned, shape (n_policies, n_keys, n_calls).

    Returns:
        Percent at each call, by policy.
    """
    found = {}
    for at, policy in enumerate(policies):
        regrets = [np.array(p.truth_us)[arms[at, key]] / min(p.truth_us) - 1 for key, p in enumerate(problems)]
        found[policy.name] = np.round(100 * np.mean(regrets, axis=0), 3).tolist()
    return found


def recordings(arguments: argparse.Namespace, *, sealed: bool) -> Iterator[DataSet]:
    """Grids that somebody measured, those that are kept aside or the others."""
    if arguments.data is not None:
        yield from (one for one in of_folder(arguments.data) if is_kept_aside(one.name) == sealed)


def all_data_sets(arguments: argparse.Namespace, *, sealed: bool = False) -> Iterator[DataSet]:
    """What the arguments ask for: of what is kept aside, or of the others."""
    n_generated = arguments.generated
    seeds = SEALED_SEEDS[:n_generated] if sealed else range(arguments.seed, arguments.seed + n_generated)
    parts = [
        shipped(0.5 if arguments.quick else 1.0) if not (sealed or arguments.recorded_only) else iter(()),
        generated(seeds),
        of_store(arguments.store) if arguments.store is not None and not sealed else iter(()),
        recordings(arguments, sealed=sealed),
    ]
    found = (one for one in chain(*parts) if arguments.only in one.name)
    return (as_undescribed(one) for one in found) if arguments.undescribed else found


def check_only(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message (2) that names all data sets where `--only` leaves none."""
    if next(all_data_sets(arguments), None) is None:
        everything = argparse.Namespace(**{**vars(arguments), "only": ""})
        names = ", ".join(one.name for one in all_data_sets(everything))
        parser.error(f"--only {arguments.only}: no data set's name holds that; there are {names}")


def false_promotions(data: DataSet, n_calls: int, n_rounds: int, looks_every: int) -> tuple[int, int]:
    """How many keys are promoted where every candidate takes as long as NCCL's choice.

    Args:
        data: the fabric's keys.
        n_calls: per key.
        n_rounds: of noise.
        looks_every: steps between two questions for a plan.

    Returns:
        Keys of all rounds, and how many of them were promoted.
    """
    flat = [
        Problem(p.key, p.message_bytes, p.candidates, p.ran_by_default, (p.truth_us[0],) * len(p.truth_us), p.noise)
        for p in data.problems
    ]
    n_keys = n_promoted = 0
    for seed in range(n_rounds):
        same = Ours("ours_cold", flat, data.facts, Knowledge(), looks_every)
        play(flat, [same], n_calls, seed=2 + seed)
        n_keys += len(flat)
        n_promoted += len({one.key for one in same.brain.decisions() if one.kind == "promote"})
    return n_keys, n_promoted


def where_nccl_is_best(problems: Sequence[Problem]) -> list[Problem]:
    """These keys with nothing to be gained: everything takes longer than NCCL's own choice."""
    return [
        replace(one, truth_us=(BEST_BY * min(one.truth_us[1:], default=one.truth_us[0]), *one.truth_us[1:]))
        for one in problems
    ]


def loss_where_nccl_is_best(data: DataSet, n_calls: int, seed: int, looks_every: int = 1) -> Iterator[Result]:
    """What exploration costs where nothing pays it back.

    Args:
        data: the fabric's keys.
        n_calls: per key.
        seed: of the noise.
        looks_every: steps between two questions for a plan.

    Yields:
        The loss, and the budget that was spent.
    """
    problems = where_nccl_is_best(data.problems)
    ours = Ours("ours_cold", problems, data.facts, Knowledge(), looks_every)
    arms = play(problems, [ours], n_calls, seed)
    wanted = {f"loss_vs_default_worst@{data.name}:ours_cold": f"loss_where_nccl_is_best@{data.name}:ours_cold"}
    for result in judge(data.name, problems, [ours], arms):
        if result.metric in wanted:
            yield replace(result, metric=wanted[result.metric])
    spent = ours.brain.spent_percent
    yield Result(f"budget_spent_where_nccl_is_best@{data.name}:ours_cold", spent, "% of step time", "<= 1")


def judge_recordings(arguments: argparse.Namespace, looks_every: int, *, sealed: bool) -> Iterator[Recorded]:
    """Our policy on each recording, for longer than elsewhere.

    Args:
        arguments: of the command line.
        looks_every: steps between two questions for a plan.
        sealed: on what is kept aside, or on the others.

    Yields:
        Each recording's figures.
    """
    for data in recordings(arguments, sealed=sealed):
        if arguments.only in data.name:
            print(f"{data.name}: together with the other recordings", file=sys.stderr, flush=True)
            ours = Ours("ours_cold", data.problems, data.facts, Knowledge(), looks_every)
            (arms,) = play(data.problems, [ours], N_CALLS, seed=0)
            yield recorded(data.problems, arms, COMM_SHARE_OF_STEP)


def judge_all(
    arguments: argparse.Namespace, curves: dict[str, dict[str, list[float]]], *, sealed: bool
) -> Iterator[Result]:
    """All figures on what the arguments ask for: on what is kept aside, or on the others.

    Args:
        arguments: of the command line.
        curves: regret by call of each data set and policy; is filled.
        sealed: which of the two.

    Yields:
        The figures of each data set, then those of all recordings and of all keys together.
    """
    n_calls, looks_every = arguments.calls or (100 if arguments.quick else 200), arguments.looks_every
    n_keys = n_promoted = 0
    started = time.monotonic()
    for data in all_data_sets(arguments, sealed=sealed):
        if arguments.quick and time.monotonic() - started > QUICK_S / (1 + arguments.sealed):
            break
        print(f"{data.name}: {len(data.problems)} keys", file=sys.stderr, flush=True)
        known = warm_knowledge(data.problems, data.facts, n_calls, looks_every=looks_every)
        ours = [
            Ours("ours_cold", data.problems, data.facts, Knowledge(), looks_every),
            Ours("ours_warm", data.problems, data.facts, known, looks_every),
        ]
        policies = [*(() if arguments.ours_only else peers(data.problems, np.random.default_rng(0))), *ours]
        arms = play(data.problems, policies, n_calls, seed=0)
        yield from judge(data.name, data.problems, policies, arms)
        for policy in ours:
            spent = policy.brain.spent_percent
            yield Result(f"budget_spent@{data.name}:{policy.name}", spent, "% of step time", "<= 1")
        yield from least_calls(data)
        yield from over_draws(data, n_calls, arguments.draws, looks_every) if arguments.draws else ()
        curves[data.name] = regret_by_call(data.problems, policies, arms)
        yield from loss_where_nccl_is_best(data, n_calls, 5, looks_every)
        same = false_promotions(data, n_calls, 1 if arguments.quick else 3, looks_every)
        n_keys, n_promoted = n_keys + same[0], n_promoted + same[1]
    if found := list(judge_recordings(arguments, looks_every, sealed=sealed)):
        yield from together(found)
    yield Result("aa_keys", n_keys, "keys")
    yield Result("aa_false_promotion_rate", 100 * n_promoted / max(1, n_keys), "% of keys", "<= 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and calls; ends within 60 s")
    add_sources(parser, "store", "data", "generated", "only", "undescribed")
    parser.add_argument("--seed", type=natural, default=FIRST_GENERATED_SEED, help="of the first of these fabrics")
    parser.add_argument(
        "--draws", type=natural, default=0, metavar="N", help="ours under so many other draws of noise, too"
    )
    parser.add_argument("--ours-only", action="store_true", help="no peers, which take most of the time")
    parser.add_argument("--calls", type=positive, metavar="N", help="of each key (200; with --quick 100)")
    parser.add_argument("--looks-every", type=positive, default=1, metavar="N", help="steps between two plans of ours")
    parser.add_argument("--recorded-only", action="store_true", help="leave the shipped fabrics out")
    parser.add_argument("--sealed", action="store_true", help="beside them, on what is kept aside")
    parser.add_argument(
        "--family", action="store_true", help="on machines that are like recorded ones, by pairs of jobs"
    )
    parser.add_argument("--curves", type=a_file_to_write, metavar="FILE", help="write regret by call as JSON")
    arguments = parser.parse_args()
    check_sources(parser, arguments.store, arguments.data)
    if arguments.sealed and arguments.data is None and not (arguments.generated or arguments.family):
        parser.error("--sealed: nothing shipped is kept aside; add --data DIR, --generated N or --family")
    if arguments.recorded_only and arguments.data is None:
        parser.error("--recorded-only without --data leaves nothing to judge on")
    if arguments.family:
        for name, value in vars(arguments).items():
            if name not in OF_FAMILY and value != parser.get_default(name):
                option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                parser.error(f"{option}: not with --family, which has machines and jobs of its own; leave it out")
        options = {"is_quick": arguments.quick, "with_sealed": arguments.sealed}
        found = family_results(arguments.seed, partial(recordings, arguments), **options)
        report("policy_regret", list(found), as_json=arguments.json)
        return
    check_only(parser, arguments)
    curves: dict[str, dict[str, list[float]]] = {}
    results = list(judge_all(arguments, curves, sealed=False))
    if arguments.sealed:
        kept_aside = judge_all(arguments, curves, sealed=True)
        results += [replace(one, metric=f"sealed_{one.metric}") for one in kept_aside]
    if arguments.curves is not None:
        arguments.curves.write_text(json.dumps(curves))
    report("policy_regret", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
