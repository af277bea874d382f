"""Two runs of one benchmark beside each other: what a change to the code did to the same draws.

    python -m benchmarks compare BEFORE AFTER [--json]

BEFORE and AFTER are files with what a benchmark printed with `--json`, or what `record` wrote. A policy is compared
with the one before it that way: both play `policy_regret --data benchmarks/recordings --recorded-only --sealed --json`,
each from its own checkout. Of each figure that both have: the mean over what it was taken on (data sets, machines), and
the mean difference with its standard error. Every figure whose target was met before and is missed now has a line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev

from benchmarks.lib.reporting import Result, figure, options_of, report


def figures_in(text: str) -> dict[str, Result]:
    """What a file holds, by metric.

    Raises:
        argparse.ArgumentTypeError: it is no file of figures.
    """
    try:
        written = Path(text).read_text()
        try:
            document = json.loads(written)
        except ValueError:
            document = json.loads(written.strip().splitlines()[-1])
        return {one["metric"]: Result(**one) for one in document["results"]}
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        raise argparse.ArgumentTypeError(
            f"{text} holds no figures; name a file that `--json` or `record` wrote"
        ) from None


def differences(before: Mapping[str, Result], after: Mapping[str, Result]) -> Iterator[Result]:
    """What has changed."""
    both = [metric for metric in before if metric in after]
    groups: dict[tuple[str, str], list[str]] = {}
    for metric in both:
        name, _, where = metric.partition("@")
        policy = where.rpartition(":")[2]
        groups.setdefault((f"{name}@{policy}" if ":" in where else name, before[metric].unit), []).append(metric)
    for (name, unit), metrics in groups.items():
        changes = [after[metric].value - before[metric].value for metric in metrics]
        means = [mean(figures[metric].value for metric in metrics) for figures in (before, after)]
        words = f"{figure(means[0])} before, {figure(means[1])} after"
        if len(changes) > 1:
            words += f"; {len(changes)} of them, standard error {figure(stdev(changes) / len(changes) ** 0.5)}"
        yield Result(f"difference:{name}", mean(changes), unit, "", words)
    lost = [metric for metric in both if before[metric].is_met and after[metric].is_met is False]
    won = [metric for metric in both if before[metric].is_met is False and after[metric].is_met]
    yield Result("figures_in_both", len(both), "figures")
    yield Result("targets_won", len(won), "figures")
    yield Result("targets_lost", len(lost), "figures", "0")
    for metric in lost:
        yield Result(f"lost:{metric}", after[metric].value, after[metric].unit, after[metric].target)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("before", type=figures_in, help="file of the run before")
    parser.add_argument("after", type=figures_in, help="file of the run after")
    arguments = parser.parse_args()
    if not arguments.before.keys() & arguments.after.keys():
        parser.error("the two files have no figure in common; compare two runs of one benchmark")
    report("compare", list(differences(arguments.before, arguments.after)), as_json=arguments.json)


if __name__ == "__main__":
    main()
