"""Record what frameworks really enqueue: they train small models on the emulated NCCL, and rank 0 writes it down.

    python -m benchmarks stage_recordings [--only ddp,fsdp2,...] [--out recordings.jsonl.gz]

One line per run: what was trained by what, and every collective that NCCL's tuner would be asked about, in the
order it was enqueued: (collective, message_bytes, start in us on the emulated clock). Nothing in it is generated.
DeepSpeed is recorded where it is installed; runs of frameworks that are not installed are kept from the old file.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

DEFAULT_OUT = Path(__file__).parent / "corpus" / "recordings.jsonl.gz"
N_STEPS = 6
Run = dict[str, Any]
Micro = Callable[[Any, bool], None]


def runs() -> Iterator[Run]:
    """Every run: framework, stage, model, micro-batches per step, options."""
    models = ("gpt-3x128", "gpt-8x96", "gpt-14x64", "mlp-6x256", "conv-6", "moe-3x64", "t5-3x96", "vit-5x128")
    for index, model in enumerate(models):
        clip = index % 2 == 0
        for n_micro in (1, 2 + index % 3):
            base = {"model": model, "n_micro": n_micro, "clip": clip, "log_loss": index % 3 == 0}
            yield {**base, "framework": "ddp", "stage": "ddp", "bucket_mb": (25, 1, 0.2)[index % 3]}
            yield {**base, "framework": "zero_redundancy", "stage": "zero1", "bucket_mb": (1, 0.2)[index % 2]}
            for stage in (1, 2, 3):
                yield {**base, "framework": "ours", "stage": f"zero{stage}", "bucket_mb": (32, 1, 0.25)[index % 3]}
                yield {**base, "framework": "deepspeed", "stage": f"zero{stage}", "bucket_mb": (50, 1)[index % 2]}
            yield {**base, "framework": "ours", "stage": "zero1", "all_reduce": True, "bucket_mb": 1}
            # By default DeepSpeed 3 keeps what was gathered until a billion elements are; large models release.
            yield {**base, "framework": "deepspeed", "stage": "zero3", "releases": True,
                   "bucket_mb": (1, 0.2)[index % 2]}  # fmt: skip
            # Part of a model is kept, and several tensors are gathered in one call, ahead of their use.
            yield {**base, "framework": "deepspeed", "stage": "zero3", "releases": True, "live": 200_000,
                   "reuse": 60_000, "bucket_mb": (1, 0.1)[index % 2]}  # fmt: skip
            for framework in ("fsdp2", "fsdp1"):
                yield {**base, "framework": framework, "stage": "zero3"}
                yield {**base, "framework": framework, "stage": "zero2"}
                if n_micro > 1:
                    yield {**base, "framework": framework, "stage": "zero3", "sync_last_only": True}
    for index, (width, depth) in enumerate(((96, 3), (64, 6), (128, 2), (48, 10))):
        for n_micro in (1, 2 + index % 2):
            for partitioned in (False, True):
                base = {"model": f"parallel-{depth}x{width}", "n_micro": n_micro, "clip": index % 2 == 0,
                        "log_loss": index % 2 == 1, "tensor_parallel": 2, "partitioned": partitioned}  # fmt: skip
                yield {**base, "framework": "ddp", "stage": "ddp", "bucket_mb": (25, 0.2)[index % 2]}
                for stage in (1, 2, 3):
                    yield {**base, "framework": "ours", "stage": f"zero{stage}", "bucket_mb": (32, 0.2)[index % 2]}
                yield {**base, "framework": "fsdp2", "stage": "zero3"}
                yield {**base, "framework": "none", "stage": "unknown"}


def _train(rank: int, run: Run) -> tuple[list[Any], list[int]]:
    import torch
    import torch.distributed as dist

    from benchmarks.fingerprint.stage_models import MODELS, ParallelStack
    from zerotune.agent.nccl.emulated.device import clock
    from zerotune.agent.nccl.emulated.host import calls as emulated_calls
    from zerotune.agent.nccl.emulated.host import communicator
    from zerotune.zero_runtime.stages.activations import PartitionedActivations

    torch.manual_seed(3)
    calls: list[Any] = []
    issue = communicator.Communicator.issue

    def noting(self: Any, fused_groups: Any, n_tasks: int) -> Any:
        for fused in fused_groups:
            if fused.collective in emulated_calls.TUNED and fused.message_bytes > 0 and self.n_ranks > 1:
                calls.append((int(fused.collective), int(fused.message_bytes), int(clock.current().arrival_us())))
        return issue(self, fused_groups, n_tasks)

    step_starts: list[int] = []
    with patch.object(communicator.Communicator, "issue", noting):
        width = run.get("tensor_parallel", 1)
        tensor_group, data_group = _groups(rank, dist.get_world_size(), width)
        if width > 1:
            depth, units = (int(n) for n in run["model"].split("-")[1].split("x"))
            keep = PartitionedActivations(tensor_group) if run["partitioned"] else None
            model: Any = ParallelStack(units, depth, tensor_group, keep)
        else:
            model = MODELS[run["model"]]()
        micro, finish = BUILD[run["framework"]](model, run, data_group)
        generator = torch.Generator().manual_seed(rank // width)
        for _ in range(N_STEPS):
            step_starts.append(len(calls))
            for index in range(run["n_micro"]):
                tokens = torch.randint(0, 16, (2, 32), generator=generator)
                micro(tokens, index == run["n_micro"] - 1)
            if run["log_loss"]:
                dist.all_reduce(torch.zeros(1))
            finish()
    return calls, step_starts


def _groups(rank: int, n_ranks: int, width: int) -> tuple[Any, Any]:
    import torch.distributed as dist

    if width == 1:
        return None, dist.group.WORLD
    mine: list[Any] = [None, None]
    for place, lines in enumerate((
        [list(range(start, start + width)) for start in range(0, n_ranks, width)],
        [list(range(start, n_ranks, width)) for start in range(width)],
    )):  # fmt: skip
        for line in lines:
            group = dist.new_group(line)
            if rank in line:
                mine[place] = group
    return mine[0], mine[1]


def _finish(run: Run, optimizer: Any, clip: Callable[[float], Any]) -> Callable[[], None]:
    """The end of a step: clip if the run does, step, forget the gradients."""

    def finish() -> None:
        if run["clip"]:
            clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return finish


def _clip_whole(model: Any) -> Callable[[float], Any]:
    """torch's clipping, for gradients that are all on this rank or know that they are not."""
    import torch

    return lambda max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _plain(model: Any, run: Run, group: Any) -> tuple[Micro, Callable[[], None]]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (lambda tokens, last: model(tokens).backward()), _finish(run, optimizer, _clip_whole(model))


def _ddp(model: Any, run: Run, group: Any) -> tuple[Micro, Callable[[], None]]:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=run["bucket_mb"], gradient_as_bucket_view=True
    )
    optimizer: Any
    if run["framework"] == "zero_redundancy":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def micro(tokens: Any, last: bool) -> None:
        with contextlib.nullcontext() if last else wrapped.no_sync():
            wrapped(tokens).backward()

    return micro, _finish(run, optimizer, _clip_whole(model))


def _ours(model: Any, run: Run, group: Any) -> tuple[Micro, Callable[[], None]]:
    import torch

    from zerotune import zero_runtime

    engine = zero_runtime.shard(
        model, stage=int(run["stage"][-1]), group=group, bucket_bytes=int(run["bucket_mb"] * 2**20),
        all_reduce_gradients=run.get("all_reduce", False),
    )  # fmt: skip
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)

    def micro(tokens: Any, last: bool) -> None:
        # Stage 1 sums gradients on the rank itself and sends them once; stages 2 and 3 keep shards only.
        with contextlib.nullcontext() if last or run["stage"] != "zero1" else engine.no_sync():
            model(tokens).backward()

    return micro, _finish(run, optimizer, engine.clip_grad_norm_)


def _fsdp2(model: Any, run: Run, group: Any) -> tuple[Micro, Callable[[], None]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu") if group is not dist.group.WORLD else None
    reshard = run["stage"] == "zero3"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def micro(tokens: Any, last: bool) -> None:
        if run.get("sync_last_only"):
            model.set_requires_gradient_sync(last)
        model(tokens).backward()

    return micro, _finish(run, optimizer, _clip_whole(model))


def _fsdp1(model: Any, run: Run, group: Any) -> tuple[Micro, Callable[[], None]]:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy = ShardingStrategy.FULL_SHARD if run["stage"] == "zero3" else ShardingStrategy.SHARD_GRAD_OP
    wrapped: Any = FullyShardedDataParallel(
        model, process_group=group, sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in model.blocks}),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

    def micro(tokens: Any, last: bool) -> None:
        with wrapped.no_sync() if run.get("sync_last_only") and not last else contextlib.nullcontext():
            wrapped(tokens).backward()

    return micro, _finish(run, optimizer, wrapped.clip_grad_norm_)


def _deepspeed(model: Any, run: Run, group: Any) -> tuple[Micro, Callable[[], None]]:
    import deepspeed
    import torch

    # An operator compiled for collectives among CPUs; nothing that NCCL would see.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    bucket = int(run["bucket_mb"] * 2**18)
    zero = {"stage": int(run["stage"][-1]), "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 1000}  # fmt: skip
    if run.get("releases"):
        zero |= {"stage3_max_live_parameters": run.get("live", 0), "stage3_max_reuse_distance": run.get("reuse", 0)}
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": run["n_micro"],
        "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0 if run["clip"] else 0.0,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=settings
    )

    def micro(tokens: Any, last: bool) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return micro, lambda: None


BUILD: dict[str, Callable[..., tuple[Micro, Callable[[], None]]]] = {
    "ddp": _ddp, "zero_redundancy": _ddp, "ours": _ours, "fsdp2": _fsdp2, "fsdp1": _fsdp1,
    "deepspeed": _deepspeed, "none": _plain,
}  # fmt: skip


def _rank(rank: int, n_ranks: int, folder: str, todo: list[Run], results: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(n_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29811")  # asked for by DeepSpeed, used by nobody
    import torch
    import torch.distributed as dist

    import zerotune.agent.nccl.emulated  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n_ranks)
    dist.init_process_group("emulated_nccl", store=store, rank=rank, world_size=n_ranks)
    for run in todo:
        try:
            calls, step_starts = _train(rank, run)
        except Exception:
            calls, step_starts = [], []
            if rank == 0:
                print(f"{run} failed:\n{traceback.format_exc()}", file=sys.stderr)
        if rank == 0:
            results.put((run, calls, step_starts))
    dist.destroy_process_group()


def record(todo: list[Run], n_ranks: int) -> Iterator[Run]:
    """Run all in one world of `n_ranks` processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, n_ranks, folder, todo, results), daemon=True)
            for rank in range(n_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            for _ in todo:
                run, calls, step_starts = results.get(timeout=180)
                if calls:
                    kinds, n_bytes, start_us = zip(*calls, strict=True)
                    yield {**run, "n_ranks": n_ranks, "step_starts": step_starts, "collective": kinds,
                           "message_bytes": n_bytes, "start_us": start_us}  # fmt: skip
        finally:
            for process in ranks:
                process.join(5)
                process.kill()


def main() -> None:
    from benchmarks.lib.argument_types import a_file_to_write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="frameworks, separated by commas")
    parser.add_argument("--out", type=a_file_to_write, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    known = {run["framework"] for run in runs()}
    wanted = known if arguments.only is None else set(arguments.only.split(","))
    if unknown := wanted - known:
        parser.error(f"--only: there is no framework {min(unknown)!r}; use some of {','.join(sorted(known))}")
    if not importlib.util.find_spec("deepspeed"):
        wanted.discard("deepspeed")
    kept = []
    if arguments.out.exists():
        try:
            with gzip.open(arguments.out, "rt") as old:
                kept = [run for run in map(json.loads, old) if run["framework"] not in wanted]
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            parser.error(f"--out {arguments.out} is there and holds no recordings; name another file")
    new: list[Run] = []
    for framework in sorted(wanted):
        for n_ranks in (2, 4):
            todo = [run for run in runs() if run["framework"] == framework]
            todo = [run for run in todo if run.get("tensor_parallel", 1) == n_ranks // 2]
            if todo:
                new += record(todo, n_ranks)
                print(f"{framework} on {n_ranks} ranks: {len(new)} runs so far", flush=True)
    with open(arguments.out, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        for run in kept + new:
            packed.write((json.dumps(run, separators=(",", ":")) + "\n").encode())
    print(f"{len(kept)} runs kept, {len(new)} recorded: {arguments.out}")


if __name__ == "__main__":
    main()
