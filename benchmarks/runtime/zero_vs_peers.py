"""The ZeRO runtime against FSDP2, DeepSpeed, ZeroRedundancyOptimizer and DDP: tokens per second and memory.

python -m benchmarks zero_vs_peers [--json] [--quick]

Contenders train copies of one GPT over gloo in the same processes, one step each in turn; figures are medians. Memory
is the peak resident set above plain torch's; `theory` adds the formula's model states to plain torch's activations.
Missing peers are left out. DeepSpeed needs an environment of its own (docs/design/zero.md).
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.free_port import free_port
from benchmarks.lib.reporting import Result, options_of, report, say
from benchmarks.runtime import allocations
from benchmarks.runtime.contenders import LOADS, Load, build
from zerotune.tuner.advice import zero_formulas

OURS = ("ours-1", "ours-2", "ours-3")
PEERS = ("fsdp2", "fsdp2-r", "zero-redundancy", "ddp")
PEERS_BF16 = ("fsdp2", "fsdp2-r")  # with fp32 master weights
DEEPSPEED = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
DEEPSPEED_BF16 = ("deepspeed-2", "deepspeed-3")


@dataclass(frozen=True)
class Cell:
    load: str
    precision: str
    n_ranks: int
    seconds: float  # of racing

    @property
    def name(self) -> str:
        return f"{self.load}-{self.precision}-{self.n_ranks}"

    def contenders(self) -> list[str]:
        ours = list(OURS) if self.precision == "fp32" else ["ours-2", "ours-3"]
        peers = [*PEERS] if self.precision == "fp32" else [*PEERS_BF16]
        if importlib.util.find_spec("deepspeed"):
            peers += DEEPSPEED if self.precision == "fp32" else DEEPSPEED_BF16
        return ours + peers


CELLS = (
    Cell("tiny", "fp32", 2, 75.0),
    Cell("tiny", "bf16", 2, 45.0),
    Cell("tiny", "fp32", 4, 75.0),
    Cell("medium", "fp32", 2, 90.0),
)
QUICK_S = 12.0


def _join(rank: int, n_ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(n_ranks))
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def race(rank: int, n_ranks: int, port: int, cell: Cell, out: Any) -> None:
    """Interleaved steps of every contender; rank 0 reports seconds per step, and processor time of all ranks."""
    import torch
    import torch.distributed as dist

    _join(rank, n_ranks, port)
    load, seconds = LOADS[cell.load], cell.seconds
    steps = {name: build(name, load, cell.precision) for name in cell.contenders()}
    batch = load.draw()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    began, n_rounds = time.perf_counter(), 0
    going = [True]
    while going[0]:
        for name, step in steps.items():
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            step(batch)
            dist.barrier()
            if n_rounds >= 2:
                times[name].append((time.perf_counter() - start, time.process_time() - start_cpu))
        n_rounds += 1
        going = [n_rounds < 5 or time.perf_counter() - began < seconds]
        dist.broadcast_object_list(going, src=0)
    found = {}
    for name, pairs in times.items():
        cpu_s = torch.tensor([cpu for _, cpu in pairs], dtype=torch.float64)
        dist.all_reduce(cpu_s)
        found[name] = list(zip((wall for wall, _ in pairs), cpu_s.tolist(), strict=True))
    if rank == 0:
        out.put(found)
    dist.destroy_process_group()


def weigh(rank: int, n_ranks: int, port: int, name: str, cell: Cell, out: Any) -> None:
    """Peak resident bytes of one contender above the process's bytes before it."""
    import torch
    import torch.distributed as dist

    _join(rank, n_ranks, port)
    load = LOADS[cell.load]
    build("ours-1", Load(1, 8, 8, 1))(Load(1, 8, 8, 1).draw())  # connections are nobody's, nor are libraries:
    torch.manual_seed(1)  # the contender's values
    model, batch = plain_model(load, cell.precision), load.draw()
    load.loss(model, batch).backward()
    del model
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak, proc(5)
    base = resident_bytes("VmRSS")
    step = build(name, load, cell.precision, lr=0.0)
    for _ in range(3):
        step(batch)
    peak = resident_bytes("VmHWM") - base
    if rank == 0:
        out.put(peak)
    dist.destroy_process_group()


def resident_bytes(field: str) -> int:
    """`field`: VmRSS, the present resident bytes of this process, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def plain_model(load: Load, precision: str) -> Any:
    import torch

    return load.model().train().to(torch.float32 if precision == "fp32" else torch.bfloat16)


def weigh_activations(rank: int, n_ranks: int, port: int, cell: Cell, out: Any) -> None:
    """Most bytes alive in a forward and backward of plain torch beside parameters and gradients."""
    import torch

    torch.set_num_threads(1)
    load = LOADS[cell.load]
    model = plain_model(load, cell.precision)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    batch = load.draw()
    n_parameters = sum(p.numel() for p in model.parameters())
    out.put((allocations.peak_bytes(allocations.record(lambda: load.loss(model, batch).backward())), n_parameters))


def python_share(rank: int, n_ranks: int, port: int, load: Load, seconds: float, out: Any) -> None:
    """Percent of a stage-3 step in the runtime's own hooks, without the wait for collectives.

    Timed on one rank with no peer to wait for, so that every wait is immediate.
    """
    import cProfile

    import torch.distributed as dist

    _join(rank, n_ranks, port)
    step, batch = build("ours-3", load), load.draw()
    for _ in range(3):
        step(batch)
    began, plain = time.perf_counter(), []
    while time.perf_counter() - began < seconds / 2:
        start = time.perf_counter()
        step(batch)
        plain.append(time.perf_counter() - start)
    profile = cProfile.Profile()
    n = 5
    with profile:
        for _ in range(n):
            step(batch)
    own = 0.0
    profile.create_stats()
    for (file, _, _), (_, _, total, _, _) in profile.stats.items():
        if f"{os.sep}zero_runtime{os.sep}" in file and "examples" not in file:
            own += total  # own time only: not that of torch's functions
    out.put(100 * own / n / statistics.median(plain))
    dist.destroy_process_group()


def weigh_all(name: str, cell: Cell) -> Any:
    """`weigh` in fresh processes whose allocator keeps no freed block of 64 KiB or more (glibc, mallopt(3))."""
    before = os.environ.copy()
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="131072")
    try:
        return spawn(weigh, cell.n_ranks, name, cell)
    finally:
        os.environ.clear()
        os.environ.update(before)


def spawn(target: Callable[..., None], n_ranks: int, *args: Any) -> Any:
    """Run a function in fresh processes, one per rank."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    queue = context.Queue()
    processes = [context.Process(target=target, args=(r, n_ranks, port, *args, queue)) for r in range(n_ranks)]
    for process in processes:
        process.start()
    found = queue.get(timeout=600)
    for process in processes:
        process.join(60)
    return found


def exposed_ratio() -> float | None:
    """Exposed communication of stage 3 with prefetch over without, on the emulated NCCL's virtual clock."""
    exposed = []
    for prefetch in ("1", "0"):
        done = subprocess.run(
            [
                *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
                "-m",
                "benchmarks.runtime.exposed_worker",
                prefetch,
            ],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "ZEROTUNE_FABRIC": "h100_node", "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("exposed_us ")]
        if not lines:
            return None
        exposed.append(float(lines[0].split()[1]))
    return exposed[0] / exposed[1]


def run_cell(cell: Cell) -> list[Result]:
    load = LOADS[cell.load]
    suffix = "" if cell.name == CELLS[0].name else f"_{cell.name}"
    times = spawn(race, cell.n_ranks, cell)
    results = [
        Result(
            f"tokens_per_s_{name}{suffix}",
            cell.n_ranks * load.tokens_per_step / statistics.median(wall for wall, _ in t),
            "tokens/s",
        )
        for name, t in times.items()
    ]
    pairs = [("fsdp2_stage2", "ours-2", "fsdp2"), ("fsdp2_stage3", "ours-3", "fsdp2-r")]
    pairs += [(f"deepspeed_stage{name[-1]}", f"ours-{name[-1]}", name) for name in times if name in DEEPSPEED]
    if "ddp" in times:
        pairs += [("zero_redundancy_stage1", "ours-1", "zero-redundancy"), ("ddp_stage2", "ours-2", "ddp")]
    for label, ours, peer in pairs:
        ratio, cpu_ratio = (
            statistics.median(b[clock] / a[clock] for a, b in zip(times[ours], times[peer], strict=True))
            for clock in (0, 1)
        )
        target = "" if peer == "ddp" else ">= 1.0"
        results.append(Result(f"tokens_ratio_{label}{suffix}", ratio, "", target, peer, ratio))
        results.append(Result(f"cpu_ratio_{label}{suffix}", cpu_ratio, "", "", peer, cpu_ratio))
    activations, n_parameters = spawn(weigh_activations, 1, cell)
    for label, ours, peer in pairs[:2]:
        own, other = (weigh_all(name, cell) for name in (ours, peer))
        states = zero_formulas.model_states(n_parameters, int(ours[-1]), cell.n_ranks, precision=cell.precision)
        theory = states.total_bytes + activations
        peers_mb, theory_mb = f"{peer}: {other / 1e6:.0f} MB", f"theory: {theory / 1e6:.0f} MB"
        ratio = own / other
        results.append(Result(f"peak_memory_ratio_{label}{suffix}", ratio, "", "<= 1.0", peers_mb, ratio))
        ratio = own / theory
        name = f"peak_memory_ratio_theory_stage{ours[-1]}{suffix}"
        results.append(Result(name, ratio, "", "<= 1.1", theory_mb, ratio))
    return results


def run_once() -> list[Result]:
    """Figures that do not depend on the cell."""
    share = spawn(python_share, 1, LOADS["tiny"], 4.0)
    results = [Result("python_share_percent", share, "%", "<= 5")]
    exposed = exposed_ratio()
    if exposed is None:
        print("the emulated NCCL did not run: exposed_ratio_prefetch is left out", flush=True)
    else:
        results.append(Result("exposed_ratio_prefetch", exposed, "emulated", "<= 0.4", "prefetch 0", exposed))
    return results


def main() -> None:
    parser = options_of(__doc__, quick="the first cell within a minute, wider noise")
    options = parser.parse_args()
    if not importlib.util.find_spec("deepspeed"):
        say("deepspeed is not installed: its rows are left out (docs/design/zero.md says how)")
    results: list[Result] = []
    for cell in (replace(CELLS[0], seconds=QUICK_S),) if options.quick else CELLS:
        began_s = time.monotonic()
        results += run_cell(cell)
        say(f"{cell.name} took {time.monotonic() - began_s:.0f} s")
    report("zero_vs_peers", [*results, *run_once()], as_json=options.json)


if __name__ == "__main__":
    main()
