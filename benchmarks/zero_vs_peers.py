"""The ZeRO runtime against FSDP2, DeepSpeed, ZeroRedundancyOptimizer and DDP: tokens per second and memory.

    python benchmarks/zero_vs_peers.py [--json] [--quick] [--ranks 2]

All contenders train copies of one GPT in the same processes over gloo, one step each in turn, so that noise
meets all alike; a figure is a median. Memory is the peak resident set over the process's own start, each
contender in a fresh world. A peer that is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from reporting import Result, report  # noqa: E402

Step = Callable[[Any], None]
OURS = ("ours-1", "ours-2", "ours-3")
PEERS = ("fsdp2", "fsdp2-r", "zero-redundancy", "ddp")
DEEPSPEED = ("deepspeed-1", "deepspeed-2", "deepspeed-3")


@dataclass(frozen=True)
class Load:
    """What is trained."""

    n_layers: int
    width: int
    n_context: int
    batch: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.n_context


TINY = Load(n_layers=4, width=320, n_context=128, batch=4)  # about 5 million parameters


def build(name: str, load: Load) -> Step:
    """One training step of a contender, as a function of (tokens, targets)."""
    import torch
    import torch.distributed as dist

    from zero_runtime.examples.gpt import GPT, GPTShape

    torch.manual_seed(1)
    shape = GPTShape(n_context=load.n_context, n_layers=load.n_layers, n_heads=4, width=load.width)
    model: Any = GPT(shape)
    kind, _, variant = name.partition("-")
    if kind == "deepspeed":
        return _deepspeed(model, int(variant))
    optimizer: Any
    if kind == "ours":
        import zero_runtime

        engine = zero_runtime.shard(model, stage=int(variant))
        optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=variant == "r")
        fully_shard(model, mesh=mesh, reshard_after_forward=variant == "r")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(model: Any, stage: int) -> Step:
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(batch: Any) -> None:
        engine.backward(engine(*batch))
        engine.step()

    return step


def _batch(load: Load) -> Any:
    import torch

    rows = torch.randint(256, (load.batch, load.n_context + 1))
    return rows[:, :-1], rows[:, 1:]


def _join(rank: int, n_ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(n_ranks))
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def race(rank: int, n_ranks: int, port: int, names: list[str], load: Load, seconds: float, out: Any) -> None:
    """Interleaved steps of every contender; rank 0 reports seconds per step."""
    import torch.distributed as dist

    _join(rank, n_ranks, port)
    steps = {name: build(name, load) for name in names}
    batch = _batch(load)
    times: dict[str, list[float]] = {name: [] for name in names}
    began, n_rounds = time.perf_counter(), 0
    going = [True]
    while going[0]:
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            dist.barrier()
            if n_rounds >= 2:
                times[name].append(time.perf_counter() - start)
        n_rounds += 1
        going = [n_rounds < 5 or time.perf_counter() - began < seconds]
        dist.broadcast_object_list(going, src=0)
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def weigh(rank: int, n_ranks: int, port: int, name: str, load: Load, out: Any) -> None:
    """Peak resident bytes of one contender over what the process had before."""
    import torch.distributed as dist

    _join(rank, n_ranks, port)
    gc.collect()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = build(name, load)
    for _ in range(3):
        step(_batch(load))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    if rank == 0:
        out.put(peak * 1024)
    dist.destroy_process_group()


def python_share(rank: int, n_ranks: int, port: int, load: Load, seconds: float, out: Any) -> None:
    """Percent of a stage-3 step that the runtime's own hooks take, collectives waited for aside.

    Timed on one rank with no peer to wait for, where every wait is immediate.
    """
    import cProfile
    import pstats

    import torch.distributed as dist

    _join(rank, n_ranks, port)
    step, batch = build("ours-3", load), _batch(load)
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
    for (file, _, _), (_, _, total, _, _) in pstats.Stats(profile).stats.items():
        if f"{os.sep}zero_runtime{os.sep}" in file and "examples" not in file:
            own += total  # own time only: what torch does on our behalf is not Python's
    out.put(100 * own / n / statistics.median(plain))
    dist.destroy_process_group()


def spawn(target: Callable[..., None], n_ranks: int, *args: Any) -> Any:
    """Runs `target(rank, n_ranks, port, *args, queue)` in fresh processes and returns what it put."""
    import socket

    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
                *[str(Path(__file__).parent / "exposed_worker.py"), prefetch],
            ],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "ZEROTUNE_FABRIC": "h100_node", "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("exposed_us ")]
        if not lines:
            return None
        exposed.append(float(lines[0].split()[1]))
    return exposed[0] / exposed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="within a minute, wider noise")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    seconds = 12.0 if options.quick else 120.0
    names = [*OURS, *PEERS]
    if importlib.util.find_spec("deepspeed"):
        names += DEEPSPEED
    else:
        print("deepspeed is not installed: its rows are left out (pip install deepspeed to have them)")
    times = spawn(race, options.ranks, names, TINY, seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: options.ranks * TINY.tokens_per_step / value for name, value in median.items()}
    results = [Result(f"tokens_per_s_{name}", value, "tokens/s") for name, value in rate.items()]
    pairs = [("fsdp2_stage2", "ours-2", "fsdp2"), ("fsdp2_stage3", "ours-3", "fsdp2-r")]
    if "deepspeed-1" in rate:
        pairs += [(f"deepspeed_stage{s}", f"ours-{s}", f"deepspeed-{s}") for s in (1, 2, 3)]
    for label, ours, peer in pairs:
        ratio = statistics.median(b / a for a, b in zip(times[ours], times[peer], strict=True))
        results.append(Result(f"tokens_ratio_{label}", ratio, "", ">= 1.0", peer, ratio))
    for label, ours, peer in pairs[:2]:
        a, b = (spawn(weigh, options.ranks, name, TINY) for name in (ours, peer))
        results.append(Result(f"peak_memory_ratio_{label}", a / b, "", "<= 1.0", f"{peer}: {b / 1e6:.0f} MB", a / b))
    share = spawn(python_share, 1, TINY, 4.0)
    results.append(Result("python_share_percent", share, "%", "<= 5"))
    exposed = exposed_ratio()
    if exposed is None:
        print("the emulated NCCL did not run: exposed_ratio_prefetch is left out")
    else:
        results.append(Result("exposed_ratio_prefetch", exposed, "", "<= 0.4 (emulated)", "prefetch 0", exposed))
    report("zero_vs_peers", results, as_json=options.json)


if __name__ == "__main__":
    main()
