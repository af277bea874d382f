"""What each mechanism of the policy brings: the same draws with it and without it.

    python -m benchmarks ablation [--data DIR] [--only NAME,...] [--suites NAME,...] [--draws N] [--generated N]
                                  [--jobs N] [--guarded N] [--sealed] [--first SEED] [--json] [--page FILE]
    python -m benchmarks ablation --without NAME,... --run "brain_safety --quick"

Suites, each draw played with everything and without one mechanism after the other, under the same noise: two shipped
fabrics, generated ones, two keys alone, an undescribed machine, a plan at every fourth step only, and recordings
(`--data`). Figures are differences, without minus with: calls until 95 % of all gain, points of regret, points of loss
against NCCL's own choice, and of loss where that is best. Jobs whose communication hides behind computation
(training_reward.py, `--jobs` random fabrics) are judged by what training took: points of step time, mean over the first
300 steps and over 1,000; on every other fabric a plan is asked for at every fourth step only. Jobs that
step time alone tells about (guarded_jobs.py, `--guarded` of each kind) are judged by their losses and false alarms.
Intervals are 90 %, bootstrapped over all draws.
A mechanism is dispensable where every suite's mean stays within the margins: MARGINS, written down before any run.

Every play is kept in build/ablation.jsonl; a run that was interrupted goes on from there (--afresh starts over). What
shows in step time alone is judged by other benchmarks: `--run` carries one out without the mechanisms that are named.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.__main__ import module_of
from benchmarks.lib.argument_types import a_file_to_write, natural, positive
from benchmarks.lib.data.data_sets import (
    GENERATED_BASES,
    DataSet,
    as_undescribed,
    check_sources,
    generated,
    of_folder,
    shipped,
)
from benchmarks.lib.data.generated_fabrics import generate
from benchmarks.lib.reporting import Result, report, say
from benchmarks.policy.guarded_jobs import GUARDED, GUARDED_MARGINS, GuardedJob
from benchmarks.policy.mechanisms import MECHANISMS, without
from benchmarks.policy.policy_regret import FIRST_GENERATED_SEED, judge, where_nccl_is_best
from benchmarks.policy.recorded_figures import SEALED_JOB_SEEDS, SEALED_SEEDS, is_kept_aside
from benchmarks.policy.regret_jobs import Ours, play
from benchmarks.policy.training_reward import FIRST_SEED, whole_job
from zerotune.tuner.learning.knowledge import Knowledge

PLAYS = Path(__file__).parents[2] / "build" / "ablation.jsonl"
JOBS = {"job_of_300_steps": 300, "job_of_1000_steps": 1000}
"""Lengths of jobs whose communication hides."""
MARGINS = {
    **{"calls": 2.0, "regret": 0.05, "loss": 0.05, "loss_where_nccl_is_best": 0.05},
    **dict.fromkeys(JOBS, 0.05),
    **GUARDED_MARGINS,
}
"""Calls, and points of percent: as the policy's aims were set, before any mechanism was taken out."""
METRICS = {
    "calls_to_95_percent_of_all_gain": "calls",
    "regret_mean": "regret",
    "loss_vs_default_worst": "loss",
}
N_CALLS = 200
"""Of each key: those within which policy_regret's aims are set."""
SHIPPED = ("ethernet_boxes", "h100_ib_2")
"""One slow network and one fast."""
ALL = "everything"
CONFIDENCE = 90
"""Percent."""
N_RESAMPLES = 2000
"""So that an interval's ends move by less than a hundredth of its width."""


class Suite(NamedTuple):
    """Draws that have something in common."""

    name: str
    data: DataSet
    looks_every: int = 1

    @property
    def place(self) -> list[str | int]:
        """What tells it from others, beside the seed."""
        n_keys, n_ranks = len(self.data.problems), self.data.problems[0].key.communicator.n_ranks
        return [self.name, self.data.name, n_ranks, n_keys]

    def figures(self, seed: int) -> dict[str, float]:
        """One draw.

        Args:
            seed: of the noise.

        Returns:
            Figures by the names of MARGINS.
        """
        found = {}
        data = self.data
        for problems, prefix in ((data.problems, ""), (where_nccl_is_best(data.problems), "loss_where_nccl_is_best")):
            ours = Ours("ours_cold", problems, data.facts, Knowledge(), self.looks_every)
            for result in judge(data.name, problems, [ours], play(problems, [ours], N_CALLS, seed)):
                metric = METRICS.get(result.metric.split("@")[0])
                if metric is not None and (not prefix or metric == "loss"):
                    found[prefix or metric] = result.value
        return found


class HiddenJobs(NamedTuple):
    """Jobs whose communication hides behind computation."""

    name: str
    fabric: int
    """Seed of a random one."""
    looks_every: int = 1

    @property
    def place(self) -> list[str | int]:
        """What tells it from others, beside the seed."""
        return [self.name, self.fabric]

    def figures(self, seed: int) -> dict[str, float]:
        """One job: as for `Suite`."""
        path = str(generate(self.fabric, GENERATED_BASES[self.fabric % len(GENERATED_BASES)]))
        took = whole_job(path, seed, self.looks_every, JOBS.values())
        return {metric: took[n_steps] for metric, n_steps in JOBS.items()}


def suites(arguments: argparse.Namespace) -> Iterator[Suite | HiddenJobs | GuardedJob]:
    """What is played.

    Args:
        arguments: of the command line.

    Yields:
        Data sets and jobs by suite.
    """
    seeds, job_seeds = SEALED_SEEDS, SEALED_JOB_SEEDS
    if not arguments.sealed:
        seeds, job_seeds = (range(first, first + 1000) for first in (FIRST_GENERATED_SEED, FIRST_SEED))
    if arguments.first is not None:
        seeds = job_seeds = range(arguments.first, arguments.first + 1000)
    yield from (Suite("generated", data) for data in generated(seeds[: arguments.generated], 0.5))
    if not arguments.sealed:
        known = {data.name: data for data in shipped(0.5) if data.name in SHIPPED}
        yield from (Suite("shipped", data) for data in known.values())
        few = known["h100_ib_2"]
        yield Suite("few_keys", few._replace(problems=few.problems[3:5]))
        yield Suite("undescribed", as_undescribed(known["ethernet_boxes"]))
        yield Suite("looks_every_4", known["h100_ib_2"], 4)
    if arguments.data is not None:
        for data in of_folder(arguments.data):
            if is_kept_aside(data.name) == arguments.sealed:
                yield Suite("recorded", data)
    for seed in job_seeds[: arguments.jobs]:
        yield HiddenJobs("hidden_looks_every_4", seed, 4) if seed % 2 else HiddenJobs("hidden", seed)
    yield from (GuardedJob(name, seed) for seed in job_seeds[: arguments.guarded] for name in GUARDED)


def plays(arguments: argparse.Namespace, kept: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Play what is not kept yet, and keep it.

    Args:
        arguments: of the command line.
        kept: figures by what was played earlier.

    Returns:
        Figures by what was to be played, and nothing else that is kept.
    """
    asked = {}
    PLAYS.parent.mkdir(exist_ok=True)
    variants = {ALL: (), **{name: name.split("+") for name in arguments.only or MECHANISMS}}
    found = [suite for suite in suites(arguments) if not arguments.suites or suite.name in arguments.suites]
    everything = [(seed, suite) for seed in range(20, 20 + arguments.draws) for suite in found]
    with PLAYS.open("a") as file:
        for number, (seed, suite) in enumerate(everything, 1):
            say(f"{number} of {len(everything)}: {suite.name} {suite.place[1]}, draw {seed}")
            for variant, names in variants.items():
                label = json.dumps([variant, *suite.place, seed])
                if label not in kept:
                    with without(*names):
                        kept[label] = suite.figures(seed)
                    file.write(json.dumps({"play": label, "figures": kept[label]}) + "\n")
                    file.flush()
                asked[label] = kept[label]
    return asked


def kept_plays() -> dict[str, dict[str, float]]:
    """What earlier runs played; a line that was cut off is none."""
    kept: dict[str, dict[str, float]] = {}
    for line in PLAYS.read_text().splitlines() if PLAYS.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        kept[one["play"]] = one["figures"]
    return kept


def differences(kept: dict[str, dict[str, float]], variant: str) -> dict[str, dict[str, list[float]]]:
    """Without minus with, of the plays that were played both ways.

    Args:
        kept: figures by what was played.
        variant: what was taken out.

    Returns:
        Paired differences by metric and suite.
    """
    found: dict[str, dict[str, list[float]]] = {metric: {} for metric in MARGINS}
    for label, figures_without in kept.items():
        name, *rest = json.loads(label)
        figures_with = kept.get(json.dumps([ALL, *rest]))
        if name != variant or figures_with is None:
            continue
        for metric in MARGINS:
            if metric in figures_without and metric in figures_with:
                difference = figures_without[metric] - figures_with[metric]
                found[metric].setdefault(rest[0], []).append(difference)
    return found


def summary(kept: dict[str, dict[str, float]], variants: Sequence[str]) -> Iterator[Result]:
    """What each mechanism brings.

    Args:
        kept: figures by what was played.
        variants: what was taken out.

    Yields:
        The mean of each difference, its interval's ends, and whether the mechanism is dispensable.
    """
    rng = np.random.default_rng(0)
    for variant in variants:
        by_metric = differences(kept, variant)
        is_dispensable = True
        for metric, by_suite in by_metric.items():
            every = np.array(list(chain(*by_suite.values())))
            if not len(every):
                continue
            means = rng.choice(every, (N_RESAMPLES, len(every))).mean(axis=1)
            low, high = np.percentile(means, [(100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2])
            worst = max(float(np.mean(values)) for values in by_suite.values())
            is_dispensable &= worst <= MARGINS[metric]
            unit = "calls" if metric == "calls" else "points"
            yield Result(f"{metric}_without@{variant}", float(every.mean()), unit)
            yield Result(f"{metric}_without_low@{variant}", float(low), unit)
            yield Result(f"{metric}_without_high@{variant}", float(high), unit)
            yield Result(f"{metric}_without_worst_suite@{variant}", worst, unit)
        yield Result(f"is_dispensable@{variant}", float(is_dispensable), "yes or no")


PAGE = """\
# What each mechanism of the policy brings

The same draws with everything and without one mechanism after the other: what is worse without it, in calls until 95 %
of all gain is there, and in points of percent. Each cell has the mean over all draws, its 90 % interval, and the mean
of the suite that suffers most. Written by `{command}`: {n_draws} draws of {n_suites} suites. Margins, written before
any run: {margins}. A mechanism within them in every suite is dispensable by these suites.

| without | {columns} | dispensable |
|---|{rules}---|
"""


def write_page(path: Path, results: Sequence[Result], kept: dict[str, dict[str, float]]) -> None:
    """The results as a page of the documentation; the sections below them, which people wrote, stay.

    Args:
        path: to write to.
        results: of `summary`.
        kept: the plays they come from.
    """
    values = {result.metric: result.value for result in results}
    variants = list(dict.fromkeys(result.metric.split("@")[1] for result in results))
    columns = [metric for metric in MARGINS if f"{metric}_without@{variants[0]}" in values]
    played = [json.loads(label) for label in kept if json.loads(label)[0] == ALL]
    text = PAGE.format(
        command=" ".join(["python -m benchmarks ablation", *sys.argv[1:]]),
        n_draws=len(played),
        n_suites=len({suite for _, suite, *_ in played}),
        margins=", ".join(f"{metric} {MARGINS[metric]:g}" for metric in columns),
        columns=" | ".join(columns),
        rules="---|" * len(columns),
    )
    for variant in variants:
        cells = []
        for metric in columns:
            names = (f"{metric}_without{end}@{variant}" for end in ("", "_low", "_high", "_worst_suite"))
            cells.append("{:+.2f} ({:+.2f} to {:+.2f}), {:+.2f}".format(*(values[name] for name in names)))
        dispensable = "yes" if values[f"is_dispensable@{variant}"] else "no"
        text += f"| {variant} | {' | '.join(cells)} | {dispensable} |\n"
    _, section, by_hand = path.read_text().partition("\n## ") if path.exists() else ("", "", "")
    path.write_text(text + section + by_hand)


def run_another(names: Sequence[str], words: str) -> None:
    """Another benchmark, without these mechanisms."""
    name, *options = shlex.split(words)
    sys.argv = [f"python -m benchmarks {name}", *options]
    with without(*names):
        runpy.run_module(module_of(name), run_name="__main__", alter_sys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names: dict[str, Any] = {"type": lambda text: text.split(","), "default": [], "metavar": "NAME,..."}
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    parser.add_argument("--data", type=Path, help="folder of recordings, see policy_regret")
    parser.add_argument("--only", help=f"of {', '.join(MECHANISMS)}; NAME+NAME: both at once", **names)
    parser.add_argument("--suites", help="all that are there, else", **names)
    parser.add_argument("--draws", type=positive, default=1, metavar="N", help="of noise")
    parser.add_argument("--generated", type=positive, default=3, metavar="N", help="random fabrics")
    parser.add_argument("--jobs", type=natural, default=2, metavar="N", help="random fabrics on which calls hide")
    parser.add_argument("--guarded", type=natural, default=0, metavar="N", help="jobs of each kind that is guarded")
    parser.add_argument("--first", type=natural, metavar="SEED", help="of fabrics and jobs, instead of the usual ones")
    parser.add_argument("--sealed", action="store_true", help="on what is kept aside, and on nothing else")
    parser.add_argument("--afresh", action="store_true", help="forget what was played before")
    parser.add_argument("--page", type=a_file_to_write, metavar="FILE", help="write the results as Markdown")
    parser.add_argument("--without", help="mechanisms that `--run` does without", **names)
    parser.add_argument("--run", metavar="WORDS", help="another benchmark, with its options")
    arguments = parser.parse_args()
    named = {*chain(*(name.split("+") for name in [*arguments.only, *arguments.without]))}
    if unknown := named - set(MECHANISMS):
        parser.error(f"there is no mechanism {sorted(unknown)[0]!r}; there are {', '.join(MECHANISMS)}")
    check_sources(parser, None, arguments.data)
    if arguments.run:
        try:
            run_another(arguments.without, arguments.run)
        except KeyError as error:
            parser.error(f"no benchmark is called {error}; `python -m benchmarks` lists them")
        return
    if arguments.afresh:
        PLAYS.unlink(missing_ok=True)
    played = plays(arguments, kept_plays())
    results = list(summary(played, arguments.only or [*MECHANISMS]))
    if arguments.page is not None:
        write_page(arguments.page, results, played)
    report("ablation", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
