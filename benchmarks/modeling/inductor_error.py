"""How far off are the times that torch inductor plans with: those measured by us, and torch's own estimate?

On published nccl-tests runs at NCCL's own choice. Of the sizes of each machine every second one is known to us, through
a store; at the others both are asked through the graph nodes that inductor would show them. torch is told the machine's
GPU and the GPUs per node; links that it has no rate for it is told by its own settings (`LINKS_GBS`).
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.fx
from torch._inductor import comm_analysis
from torch._inductor.comm_analysis import NVIDIA_GPU_TYPE

from benchmarks.lib.reporting import Result, report, say
from zerotune.store.errors import UserError
from zerotune.store.records import Collective, Outcome, Source, TimingSource
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT, UNKNOWN
from zerotune.tuner.inductor.measured_times import MeasuredTimes
from zerotune.tuner.inductor.runtime_estimation import RuntimeEstimation
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.measuring import UserFacts

ROOT: Final = Path(__file__).resolve().parents[2]
SHIPPED: Final = ROOT / "tests" / "data" / "nccl_tests"
GPUS: Final = {
    "H100": NVIDIA_GPU_TYPE.HOPPER,
    "A100": NVIDIA_GPU_TYPE.AMPERE,
    "rtx2080ti": NVIDIA_GPU_TYPE.VOLTA,  # the generation before; torch has none nearer
}
"""By what a file or its folder says."""
LINKS_GBS: Final = {"rtx2080ti": 12.5}
"""Between nodes, where it is not what torch takes for the GPU's generation."""
OTHERWISE: Final = re.compile(r"symmetric|proto_sweep|(?:^|__)(?:ring|tree)-|_(?:NVLS|Ring)\.")
"""Files that were not measured as NCCL runs by itself."""
KINDS: Final = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
MIN_SIZES: Final = 4
AT_DEFAULT: Final = (UNKNOWN, UNKNOWN, 0, 1, Source.imported, Outcome.ok, TimingSource.reported)
"""The setting of a measurement, and where it comes from."""


class Machine(NamedTuple):
    """Where one collective was measured."""

    name: str
    gpu: str
    collective: Collective
    n_ranks: int
    n_nodes: int

    def __str__(self) -> str:
        return f"{self.name}:{self.collective.name}_{self.n_ranks}_ranks_{self.n_nodes}_nodes"


Times = Mapping[int, Sequence[float]]


def read(folder: Path) -> dict[Machine, Times]:
    """Microseconds at NCCL's own choice by size, of every machine and collective with enough sizes."""
    found: dict[Machine, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(one for one in folder.rglob("*") if one.suffix in (".txt", ".log", ".gz")):
        if OTHERWISE.search(path.name):
            continue
        name = f"{path.parent.name}/{path.name.split('.')[0].split('__')[0]}"
        if not (gpu := _gpu_of(path)):
            continue
        try:
            portions = list(read_trace(path).portions(UserFacts(is_default=True)))
        except UserError as error:
            say(f"{path}: left out, {error}")
            continue
        for row in (row for portion in portions for row in portion.rows if row["is_default"]):
            collective, nbytes = Collective(int(row["collective"])), int(row["message_bytes"])
            if collective in KINDS:
                machine = Machine(name, gpu, collective, int(row["n_ranks"]), max(1, int(row["n_nodes"])))
                found[machine][nbytes].append(float(row["duration_us"]))
    return {machine: times for machine, times in found.items() if len(times) >= MIN_SIZES and machine.n_ranks > 1}


def _gpu_of(path: Path) -> str:
    import gzip

    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", errors="replace") as text:
        words = f"{path} {text.read(20_000)}"
    return next((gpu for gpu in GPUS if gpu in words), "")


@contextmanager
def job(machine: Machine) -> Iterator[None]:
    """A process group of that many ranks, which sends nothing, on GPUs that torch takes for the machine's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    n_per_node = max(1, machine.n_ranks // machine.n_nodes)
    with ExitStack() as stack:
        for name, value in (("get_gpu_type", GPUS[machine.gpu]), ("_has_nvlink", machine.gpu in ("H100", "A100"))):
            stack.enter_context(mock.patch.object(comm_analysis, name, return_value=value))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=n_per_node))
        stack.enter_context(inductor_config.patch(inter_node_bw=LINKS_GBS.get(machine.gpu)))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=machine.n_ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


def node_of(machine: Machine, nbytes: int) -> torch.fx.Node:
    """The node of a graph that starts this collective, of bytes."""
    assert dist.group.WORLD is not None
    ops, group, n_ranks = torch.ops._c10d_functional, dist.group.WORLD.group_name, machine.n_ranks
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    shard, whole = (torch.empty(n, dtype=torch.uint8, device="meta") for n in (nbytes // n_ranks, nbytes))
    if machine.collective is Collective.all_gather:
        given.meta["val"], result = shard, whole
        node = graph.call_function(ops.all_gather_into_tensor.default, (given, n_ranks, group))
    elif machine.collective is Collective.reduce_scatter:
        given.meta["val"], result = whole, shard
        node = graph.call_function(ops.reduce_scatter_tensor.default, (given, "sum", n_ranks, group))
    else:
        given.meta["val"], result = whole, whole
        node = graph.call_function(ops.all_reduce.default, (given, "sum", group))
    node.meta["val"] = result
    return node


def learned(machine: Machine, known: Times, folder: Path) -> RuntimeEstimation:
    """What a job's daemon would have kept, read back.

    Args:
        machine: where it was measured.
        known: microseconds by size.
        folder: for the store.

    Returns:
        What inductor would be given.
    """
    rows = [
        (machine.n_ranks, machine.n_nodes, nbytes, us, 0, 0, math.nan, int(machine.collective), 0, *AT_DEFAULT)
        for nbytes, times in known.items()
        for us in times
    ]
    path = folder / "store.db"
    path.unlink(missing_ok=True)
    with Store.open(path) as store:
        store.record_job("job", "fabric", {}, machine.n_ranks)
        store.record_measurements("fabric", "job", np.array(rows, MEASUREMENT))
        store.commit()
    n_per_node = max(1, machine.n_ranks // machine.n_nodes)
    return RuntimeEstimation(MeasuredTimes.of_store(path, "fabric"), n_per_node)


def judge(machine: Machine, times: Times, folder: Path) -> Iterator[tuple[float, float | None]]:
    """Ask both at every size that was held out.

    Args:
        machine: where it was measured.
        times: microseconds by size.
        folder: for the store.

    Yields:
        Relative errors of torch's estimate and of ours, if there is one.
    """
    sizes = sorted(times)
    known = {nbytes: times[nbytes] for nbytes in sizes[::2]}
    with job(machine):
        ours = learned(machine, known, folder)
        for nbytes in sizes[1::2]:
            node, truth_ms = node_of(machine, nbytes), float(np.median(times[nbytes])) / 1000
            theirs_ms = comm_analysis.estimate_nccl_collective_runtime_from_fx_node(node)
            told_ms = ours(node)
            yield abs(theirs_ms / truth_ms - 1), None if told_ms is None else abs(told_ms / truth_ms - 1)


def summed_up(name: str, errors: Sequence[tuple[float, float | None]]) -> Iterator[Result]:
    """Medians and worsts where both have an answer."""
    both = [(theirs, ours) for theirs, ours in errors if ours is not None]
    yield Result(f"answered_share@{name}", 100 * len(both) / len(errors), "%")
    if both:
        for which, of in (("median", np.median), ("worst", np.max)):
            theirs, ours = (100 * float(of(one)) for one in zip(*both, strict=True))
            yield Result(f"error_{which}@{name}", ours, "%", peer=f"torch {theirs:.1f} %", ratio=ours / theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--data", type=Path, default=SHIPPED, help="everything measured below this folder")
    arguments = parser.parse_args()
    machines = read(arguments.data) if arguments.data.is_dir() else {}
    if not machines:
        parser.error(
            f"--data {arguments.data}: no nccl-tests output of known GPUs in it; name the folder that holds it"
        )
    results: list[Result] = []
    everything: list[tuple[float, float | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        for machine, times in machines.items():
            errors = list(judge(machine, times, Path(folder)))
            results += summed_up(str(machine), errors)
            everything += errors
    results += summed_up("all", everything)
    report("inductor_error", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
