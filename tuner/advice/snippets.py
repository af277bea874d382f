"""A configuration as code for FSDP2, DeepSpeed or zero_runtime."""

from __future__ import annotations

import json
from typing import Any, Final

from ...store.errors import UserError
from .models.model_shape import ModelShape
from .problem import ZeroConfiguration
from .zero_formulas import PARAMETER_BYTES

FRAMEWORKS: Final = ("fsdp2", "deepspeed", "zero_runtime")
_DTYPES: Final = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_SPLIT: Final = (
    "# Model parallelism of {0}: split each block over {0} neighbouring ranks (a `parallelize_module` plan)."
)


def snippet(framework: str, configuration: ZeroConfiguration, shape: ModelShape, n_groups: int, precision: str) -> str:
    """The snippet to paste: Python, or JSON for DeepSpeed; `n_groups` are the data-parallel ranks.

    Raises UserError for an unknown framework.
    """
    if framework not in FRAMEWORKS:
        raise UserError(f"{framework!r} is no framework that is known here", f"name one of {', '.join(FRAMEWORKS)}")
    if framework == "deepspeed":
        return json.dumps(_deepspeed(configuration, shape, n_groups, precision), indent=2) + "\n"
    lines = _fsdp2(configuration, n_groups, precision) if framework == "fsdp2" else _own(configuration, precision)
    return "\n".join(lines) + "\n"


def _fsdp2(configuration: ZeroConfiguration, n_groups: int, precision: str) -> list[str]:
    split = configuration.n_model_parallel
    lines = ["import torch"]
    if split > 1 or configuration.stage > 0:
        lines += ["from torch.distributed.device_mesh import init_device_mesh", _mesh(configuration, n_groups)]
    if split > 1:
        lines.append(f'{_SPLIT.format(split)} Its mesh is mesh["tensor"].')
    if configuration.recompute != "none":
        every = "" if configuration.recompute == "full" else "[::2]"
        lines += [
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
            f"kept = list(model.layers){every}  # blocks whose activations are recomputed",
            "for index, block in enumerate(model.layers):",
            "    if block in kept:",
            "        model.layers[index] = checkpoint_wrapper(block)",
        ]
    if configuration.partition_activations:
        lines.append(
            f"# FSDP2 does not divide what is kept among the {split} ranks of a model (P_a): take a smaller batch"
            + (", or put offload_wrapper around checkpoint_wrapper." if configuration.offload_activations else ".")
        )
    batches = (
        f"# {configuration.micro_batch} sequences per micro-batch, "
        f"{configuration.accumulation} micro-batches per optimizer step"
    )
    if configuration.stage == 0:
        group = ', process_group=mesh["replicate"].get_group()' if split > 1 else ""
        bucket_mb = (configuration.bucket_bytes or 0) >> 20
        return [
            *lines,
            f"model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb={bucket_mb}{group})",
            batches,
        ]
    data_mesh = 'mesh["replicate", "shard"]' if 0 < configuration.shard_ranks < n_groups else 'mesh["shard"]'
    lines += [
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        f"policy = MixedPrecisionPolicy(param_dtype={_DTYPES[precision]}, reduce_dtype=torch.float32)",
        f"options = dict(mesh={data_mesh}, mp_policy=policy, reshard_after_forward={configuration.stage == 3})",
        "blocks = list(model.layers)",
        "for block in blocks:",
        "    fully_shard(block, **options)",
        "fully_shard(model, **options)",
    ]
    if configuration.stage == 1:
        lines.insert(0, "# FSDP2 shards gradients wherever it shards optimizer states: stage 2 is nearest.")
    if configuration.stage == 3 and configuration.prefetch > 1:
        depth = configuration.prefetch
        lines += [
            "for index, block in enumerate(blocks):",
            f"    block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + {depth}])",
            f"    block.set_modules_to_backward_prefetch(blocks[max(0, index - {depth}) : index][::-1])",
        ]
    return [*lines, batches]


def _mesh(configuration: ZeroConfiguration, n_groups: int) -> str:
    """The mesh of all ranks; ranks that split one model are neighbours."""
    is_sharded = configuration.stage > 0
    shards = (configuration.shard_ranks or n_groups) if is_sharded else 1
    sizes = {
        "replicate": n_groups // shards if shards < n_groups or not is_sharded else 0,
        "shard": shards if is_sharded else 0,
        "tensor": configuration.n_model_parallel if configuration.n_model_parallel > 1 else 0,
    }
    names = [name for name, size in sizes.items() if size]
    return f'mesh = init_device_mesh("cuda", {[sizes[name] for name in names]}, mesh_dim_names={json.dumps(names)})'


def _deepspeed(configuration: ZeroConfiguration, shape: ModelShape, n_groups: int, precision: str) -> dict[str, Any]:
    element = PARAMETER_BYTES[precision]
    bucket = (configuration.bucket_bytes or 0) // element
    zero: dict[str, Any] = {
        "stage": configuration.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if configuration.stage == 3:
        block = round(shape.block_parameters / configuration.n_model_parallel)
        zero |= {
            "stage3_prefetch_bucket_size": configuration.prefetch * block,
            "stage3_max_live_parameters": (configuration.prefetch + 1) * block,
        }
        if 0 < configuration.shard_ranks < n_groups:
            # DeepSpeed has no shards within a node any more (MiCS, removed in 0.19). ZeRO++'s second copy of the
            # parameters there is nearest: backward gathers within the node, and all else takes less memory.
            zero["zero_hpz_partition_size"] = configuration.shard_ranks
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": configuration.accumulation,
        "zero_optimization": zero,
    }
    if configuration.n_model_parallel > 1:
        document["tensor_parallel"] = {"autotp_size": configuration.n_model_parallel}
    if precision != "fp32":
        document[precision] = {"enabled": True}
    if configuration.recompute != "none":
        document["activation_checkpointing"] = {
            "partition_activations": configuration.partition_activations,
            "cpu_checkpointing": configuration.offload_activations,
            "contiguous_memory_optimization": configuration.partition_activations,
            "number_checkpoints": shape.n_layers if configuration.recompute == "full" else shape.n_layers // 2,
        }
    return document


def _own(configuration: ZeroConfiguration, precision: str) -> list[str]:
    if configuration.stage == 0:
        return ["# zero_runtime has no stage 0: use torch.nn.parallel.DistributedDataParallel, or stage 1, which sends",
                "# as much and keeps less."]  # fmt: skip
    options = [f"stage={configuration.stage}"]
    if precision != "fp32":
        options.append(f'precision="{precision}"')
    if configuration.bucket_bytes is not None:
        options.append(f"bucket_bytes={configuration.bucket_bytes}")
    if configuration.stage == 3:
        options.append(f"prefetch={configuration.prefetch}")
    if configuration.shard_ranks:
        options.append(f"n_ranks_per_shard={configuration.shard_ranks}")
    lines = ["from zerotune import zero_runtime"]
    if configuration.n_model_parallel > 1:
        lines.append(_SPLIT.format(configuration.n_model_parallel))
        options += ["group=data_parallel_group", "model_parallel_group=model_parallel_group"]
    lines.append(f"engine = zero_runtime.shard(model, {', '.join(options)})")
    if configuration.partition_activations:
        offload = ", offload=True" if configuration.offload_activations else ""
        lines += [
            "from zerotune.zero_runtime.stages.activations import PartitionedActivations",
            f"partitioned = PartitionedActivations(model_parallel_group{offload})  # call partitioned(block, x)",
        ]
    elif configuration.recompute != "none":
        which = "every block" if configuration.recompute == "full" else "every second block"
        lines.append(f"# Call {which} through torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).")
    return [*lines, f"# {configuration.micro_batch} sequences per micro-batch, "
            f"{configuration.accumulation} micro-batches per optimizer step"]  # fmt: skip
