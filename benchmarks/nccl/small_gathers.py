"""A hypothesis, tested: should small all-gathers always take LL, the protocol of low latency?

    python -m benchmarks small_gathers [--generated N] [--store FILE] [--data FOLDER] [--json]

Of every all-gather up to 64 KiB of shipped and generated fabrics, of a store's sweeps and of published grids: how often
some setting with LL is the fastest, and what three rules lose against the fastest there is (mean and worst regret in
percent): the best LL setting in hindsight, whatever the cost; the ring with LL and as many channels as NCCL uses; and
NCCL's own choice. Where a machine has no LL setting, it is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.lib.argument_types import natural
from benchmarks.lib.data.data_sets import DataSet, check_sources, generated, of_folder, of_store, shipped
from benchmarks.lib.reporting import Result, report
from benchmarks.policy.regret_policies import Problem
from zerotune.store.records import Algorithm, Collective, Protocol

SMALL_BYTES = 64 << 10
FIRST_SEED = 1000


def losses(problem: Problem) -> tuple[float, float, float] | None:
    """Regret (percent) of the best LL setting, of the ring with LL and of NCCL's choice; None without LL."""
    best_us, default_us = min(problem.truth_us), problem.truth_us[0]
    ll_us = [
        us
        for candidate, us in zip(problem.candidates, problem.truth_us, strict=True)
        if candidate.protocol is Protocol.ll
    ]
    if not ll_us:
        return None
    most = problem.ran_by_default.n_channels or 64
    rings = [
        (abs(candidate.n_channels - most), us)
        for candidate, us in zip(problem.candidates, problem.truth_us, strict=True)
        if candidate.protocol is Protocol.ll and candidate.algorithm is Algorithm.ring
    ]
    ring_us = min(rings)[1] if rings else min(ll_us)
    first, second, third = (100.0 * (us / best_us - 1.0) for us in (min(ll_us), ring_us, default_us))
    return first, second, third


def judged(name: str, problems: Sequence[Problem]) -> Iterator[Result]:
    """The figures of one set of small gathers."""
    found = np.array([one for one in map(losses, problems) if one is not None])
    if not len(found):
        return
    yield Result(f"sizes@{name}", len(found), "all-gathers up to 64 KiB")
    yield Result(f"ll_is_fastest@{name}", 100.0 * float(np.mean(found[:, 0] < 1e-6)), "% of sizes")
    for rule, values in zip(("best_ll_in_hindsight", "ring_ll", "nccl_default"), found.T, strict=True):
        yield Result(f"regret_mean@{name}:{rule}", float(values.mean()), "%")
        yield Result(f"regret_worst@{name}:{rule}", float(values.max()), "%")


def small(data_set: DataSet) -> list[Problem]:
    """Its small all-gathers."""
    return [
        problem
        for problem in data_set.problems
        if problem.key.collective is Collective.all_gather and problem.message_bytes <= SMALL_BYTES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--generated", type=natural, default=12, metavar="N", help="on N random fabrics, too (12)")
    parser.add_argument("--store", type=Path, help="on the sweeps of this store, too")
    parser.add_argument("--data", type=Path, help="on everything measured below this folder, too")
    arguments = parser.parse_args()
    check_sources(parser, arguments.store, arguments.data)
    results = [one for data_set in shipped(2.0) for one in judged(data_set.name, small(data_set))]
    random_fabrics = generated(range(FIRST_SEED, FIRST_SEED + arguments.generated), 2.0)
    results += judged("generated", [problem for data_set in random_fabrics for problem in small(data_set)])
    measured = [*(of_store(arguments.store) if arguments.store else ())]
    measured += of_folder(arguments.data) if arguments.data else ()
    results += [one for data_set in measured for one in judged(data_set.name, small(data_set))]
    report("small_gathers", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
