"""Time that the plugin adds inside NCCL's own library, and whether NCCL follows its choices there.

Run: python -m benchmarks real_nccl [--quick] [--json], with NCCL_LIBRARY or `python -m benchmarks nccl_releases`

Host side of one all-gather: medians of each variant over nothing loaded. Rows are those of the plan. The null profiler
asks for our events and drops them, which is NCCL's own cost. Unobserved is our idle profiler over our tuner alone: from
2.31 on NCCL reports kernel channels then, too. Cells, times and cost tables are checked on all clusters of
tests/real_nccl.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.nccl import nccl_releases
from benchmarks.lib.nccl.forced_cells import CLUSTERS, forced, offered
from benchmarks.lib.nccl.live_costs import CLUSTERS as COST_CLUSTERS
from benchmarks.lib.nccl.live_costs import compare
from benchmarks.lib.reporting import Result, options_of, report
from zerotune.agent.nccl.compiled import PLUGIN
from zerotune.agent.nccl.libnccl import find_libnccl
from zerotune.agent.nccl.twin.protocol import Question, duration_us
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import Collective

LOOP = Path(__file__).with_name("real_nccl_loop.c")
NULL_PROFILER = Path(__file__).with_name("null_profiler.c")
VARIANTS = {
    "none": 0, "tuner_alone": 0, "no_plan": 0, "10_rows": 10, "1000_rows": 1000, "4096_rows": 4096, "records": 0,
    "null_profiler": 0, "observing": 0,
}  # fmt: skip
"""Rows of the plan, by the variant of a worker."""
ARRIVES_WITHIN_US = 0.01


class Variant:
    def __init__(self, library: Path, built: Path, name: str) -> None:
        words = [str(library), str(built), name, str(VARIANTS[name])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nccl.real_nccl_worker", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.init_ms = self._number()

    def __enter__(self) -> Variant:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def call_ns(self, n_bursts: int) -> float:
        assert self.process.stdin is not None
        print(n_bursts, file=self.process.stdin, flush=True)
        return self._number()

    def _number(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with {self.process.wait()}: run it by hand to see why")
        return float(line)


def enqueue(library: Path, n_rounds: int, n_bursts: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        built = Path(folder)
        headers = PLUGIN.root / "plugin"
        for source in (LOOP, NULL_PROFILER):
            output = built / source.with_suffix(".so").name
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{headers}", "-o", output, source], check=True)
        workers = {name: running.enter_context(Variant(library, built, name)) for name in VARIANTS}
        rounds = []
        for number in range(n_rounds):
            rounds.append({name: worker.call_ns(n_bursts) for name, worker in workers.items()})
            print(f"round {number + 1} of {n_rounds}", file=sys.stderr)
        init_ms = {name: worker.init_ms for name, worker in workers.items()}

    def result(name: str, target: str = "") -> Result:
        return compared(f"enqueue_added_ns_{name}", name, "none", target, "nothing loaded")

    def compared(metric: str, name: str, other: str, target: str, peer: str) -> Result:
        added_ns = median(each[name] - each[other] for each in rounds)
        return Result(metric, added_ns, "ns", target, peer, median(each[name] / each[other] for each in rounds))

    return [
        Result("enqueue_ns_none", median(each["none"] for each in rounds), "ns"),
        Result("enqueue_ratio_no_plan", median(each["no_plan"] / each["none"] for each in rounds), "ratio", "<= 1.06"),
        compared("enqueue_added_ns_unobserved", "no_plan", "tuner_alone", "", "no profiler"),
        result("10_rows"),
        result("1000_rows", "<= 100"),
        result("4096_rows"),
        result("records"),
        result("null_profiler"),
        result("observing", "<= 1000"),
        compared("enqueue_added_ns_over_null_profiler", "observing", "null_profiler", "<= 1000", "null profiler"),
        Result("init_added_ms", init_ms["no_plan"] - init_ms["none"], "ms"),
    ]


def honoured(library: Path, clusters: Iterable[tuple[str, int, int]]) -> tuple[float, float]:
    """Shares of settings that ran as asked, and of times that arrived."""
    n_asked = n_honoured = n_timed = n_exact = 0
    for machine, n_nodes, ranks_per_node in clusters:
        with topology_file(machine) as topology:
            cluster = Cluster(topology, n_nodes, ranks_per_node)
            version = ask_nccl(library, cluster, [Question(Collective.all_gather, 1 << 20)]).version
            rows, questions = forced(version, cluster)
            answers = ask_nccl(library, cluster, questions, rows, observe=True).answers
        has = offered(version, answers)
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            wanted = row.candidate
            if (wanted.algorithm, wanted.protocol) in has[row.collective]:
                n_asked += 1
                within = not wanted.n_channels or answer.n_channels <= wanted.n_channels
                n_honoured += within and (answer.algorithm, answer.protocol) == (wanted.algorithm, wanted.protocol)
            n_timed += cluster.ranks_per_node
            n_exact += sum(abs(ran.duration_us - duration_us(place)) <= ARRIVES_WITHIN_US for ran in answer.ran)
    return n_honoured / n_asked, n_exact / n_timed


def cells(library: Path) -> list[Result]:
    ran_as_asked, exact = honoured(library, CLUSTERS.values())
    return [
        Result("cells_honoured_share", ran_as_asked, "share", "1"),
        Result("timed_exact_share", exact, "share", ">= 0.999"),
    ]


def costs(library: Path) -> Result:
    worst = 0.0
    for cluster in COST_CLUSTERS:
        for difference in compare(library, *cluster):
            worst = max(worst, difference.relative_error)
    return Result("cost_table_worst_relative_error", worst, "ratio", "<= 0.001")


def main() -> None:
    parser = options_of(__doc__, quick="fewer rounds")
    arguments = parser.parse_args()
    library = find_libnccl() or nccl_releases.library_of(nccl_releases.TESTED[-1])
    if not library.exists():
        raise SystemExit("there is no libnccl: set NCCL_LIBRARY, or python -m benchmarks nccl_releases")
    results: list[Any] = enqueue(library, 7 if arguments.quick else 21, 60)
    results += cells(library)
    results.append(costs(library))
    for version in nccl_releases.TESTED:
        if (other := nccl_releases.library_of(version)).exists() and not other.samefile(library):
            ratio = next(one for one in enqueue(other, 7, 60) if one.metric == "enqueue_ratio_no_plan")
            results.append(replace(ratio, metric=f"{ratio.metric}@{version}"))
    report("real_nccl", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
