"""What a sweep of other rank counts is worth to a job: one that begins with it beside one that begins with nothing.

    python -m benchmarks prediction_warm_start [--json] [--data DIR] [--generated N] [--seed S] [--only TEXT]
        [--calls N]

One rank count at a time is left out of the sweep and played, as in `policy_regret` and with its metrics, by
`ours_cold`, which knows NCCL's cost, and `ours_warm`, which has the baked arrays of the other counts besides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from benchmarks.lib.argument_types import natural, whole
from benchmarks.lib.data.data_sets import DataSet, add_sources, check_sources, of_folder, sweep_block
from benchmarks.lib.reporting import Result, report
from benchmarks.modeling.prediction_elsewhere import TooFew, many_rank_counts, rank_counts, with_rank_counts
from benchmarks.policy.policy_regret import judge
from benchmarks.policy.regret_jobs import Ours, play
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked

MOST_CALLS = 100_000
WORTH = ("regret_mean", "regret_worst", "loss_vs_default_worst", "calls_to_95_percent_gain")


def played(data: DataSet, n_calls: int) -> Iterator[Result]:
    """Both jobs on every rank count of a data set."""
    for n_ranks in rank_counts(data):
        here = [problem for problem in data.problems if problem.key.communicator.n_ranks == n_ranks]
        others = [problem for problem in data.problems if problem.key.communicator.n_ranks != n_ranks]
        record = trainer.fit(sweep_block(others), "fabric", data.facts)
        if record is None:
            continue
        jobs = [
            Ours("ours_cold", here, data.facts, Knowledge()),
            Ours("ours_warm", here, data.facts, Knowledge((), Baked.from_bytes(record.blob), "elsewhere")),
        ]
        arms = play(here, jobs, n_calls, seed=0)
        found = judge(f"{data.name}:{n_ranks}_ranks", here, jobs, arms)
        yield from (one for one in found if one.metric.split("@")[0] in WORTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    add_sources(parser, "data", "generated", "only")
    parser.add_argument("--seed", type=natural, default=1000, help="of the first of these fabrics")
    parser.add_argument("--calls", type=whole(1, MOST_CALLS), default=100, metavar="N", help="per key")
    arguments = parser.parse_args()
    check_sources(parser, None, arguments.data)
    own = list(of_folder(arguments.data)) if arguments.data is not None else []
    try:
        own = with_rank_counts(own, "this benchmark")
    except TooFew as why:
        parser.error(f"--data {arguments.data}: {why}")
    seeds = range(arguments.seed, arguments.seed + arguments.generated)
    results: list[Result] = []
    for data in [*many_rank_counts(0.5, seeds), *own]:
        if arguments.only in data.name:
            print(f"{data.name}: {rank_counts(data)} ranks", file=sys.stderr, flush=True)
            results += played(data, arguments.calls)
    if not results:
        parser.error(f"no data set whose name holds {arguments.only!r} can be judged on")
    report("prediction_warm_start", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
