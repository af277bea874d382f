"""What would another exploration budget buy? Calls until the gain is had, against what is lost where there is none.

    python -m benchmarks budget_frontier [--data FOLDER] [--only TEXT] [--percent P ...] [--draws N] [--quick] [--json]

Per data set and budget, ours plays cold as in `policy_regret.py`: on the data as it is, and had NCCL's own choice been
faster than all else. The two aims, 95 % of the gain within 60 calls and at most 0.5 % lost, pull the budget both ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from rich.progress import track

from benchmarks.lib.argument_types import percent, positive
from benchmarks.lib.data.data_sets import DataSet, add_sources, check_sources
from benchmarks.lib.reporting import Result, report
from benchmarks.policy.policy_regret import all_data_sets, check_only, judge, where_nccl_is_best
from benchmarks.policy.regret_jobs import Ours, play
from zerotune.tuner.learning.brain import BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge

PERCENTS = (0.25, 0.5, 1.0, 2.0)
FIRST_DRAW = 10
"""As `policy_regret.py --draws`."""


def at_budget(data: DataSet, budget_percent: float, n_draws: int, n_calls: int) -> Iterator[Result]:
    """Means and worst of the draws at one budget.

    Args:
        data: the fabric's keys.
        budget_percent: of step time.
        n_draws: of noise.
        n_calls: per key.

    Yields:
        Calls until the gain, and the loss where nothing is to be gained.
    """
    calls: list[float] = []
    lost: list[float] = []
    spent: list[float] = []
    settings = BrainSettings(budget_fraction=budget_percent / 100)
    for seed in range(FIRST_DRAW, FIRST_DRAW + n_draws):
        for problems, into, metric in (
            (data.problems, calls, "calls_to_95_percent_gain"),
            (where_nccl_is_best(data.problems), lost, "loss_vs_default_worst"),
        ):
            ours = Ours("ours_cold", problems, data.facts, Knowledge(), settings=settings)
            judged = judge(data.name, problems, [ours], play(problems, [ours], n_calls, seed))
            into += [one.value for one in judged if one.metric.startswith(metric + "@")]
            if into is lost:
                spent.append(ours.brain.spent_percent)
    at = f"{data.name}:{budget_percent:g}_percent"
    for name, values, unit, aim in (
        ("calls_to_95_percent_gain", calls, "calls", "<= 60"),
        ("loss_where_nccl_is_best", lost, "% of the calls' time", "<= 0.5"),
        ("spent_where_nccl_is_best", spent, "% of step time", f"<= {budget_percent:g}"),
    ):
        if values:
            yield Result(f"{name}@{at}", float(np.mean(values)), unit, aim)
            yield Result(f"{name}_worst@{at}", max(values), unit, aim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two budgets, one draw, half the calls")
    add_sources(parser, "data", "only")
    parser.add_argument("--percent", type=percent, nargs="+", metavar="P", help="budgets in percent of step time")
    parser.add_argument("--draws", type=positive, metavar="N", help="of noise (3)")
    arguments = parser.parse_args()
    arguments.store, arguments.generated, arguments.seed = None, 0, 0
    arguments.undescribed = arguments.recorded_only = False
    check_sources(parser, None, arguments.data)
    check_only(parser, arguments)
    percents = arguments.percent or (PERCENTS[1:3] if arguments.quick else PERCENTS)
    n_draws = arguments.draws or (1 if arguments.quick else 3)
    results: list[Result] = []
    for data in track(list(all_data_sets(arguments)), "data sets", transient=True):
        for budget_percent in percents:
            results += at_budget(data, budget_percent, n_draws, 100 if arguments.quick else 200)
    report("budget_frontier", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
