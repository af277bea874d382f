"""The user's settings, checked once before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from .checks import communicator_variants, refusal, whole_number
from .errors import SettingsError

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is sharded.

    Attributes:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        precision: of parameters and activations: "fp32", "bf16" or "fp16", the last two with fp32 master
            weights; None leaves every parameter in its own dtype. Integers and buffers stay as they are.
        reduce_precision: of gradients in buckets, sums and shards; None: as `precision`.
        bucket_bytes: C_B, the most bytes that one collective moves; None: a default for the backend.
        n_buckets_in_flight: number of concurrent reductions.
        prefetch: layers gathered ahead of the one in use, forward and backward (stage 3).
        reshard_after_forward: stage 3 frees a layer after its forward and gathers it again for its backward;
            False keeps it, for fewer gathers and more memory.
        overlap_post_step_gather: stages 1 and 2 gather updated parameters while the next forward begins.
        all_reduce_gradients: stage 1 as in articles: all-reduce, then each rank uses its own slice.
        find_unused_parameters: agree, by one small all-reduce per step, on parameters without a gradient on
            any rank, which the optimizer then skips as it does in one process; otherwise they get zeros.
        autotune: try other buckets and prefetch depths between steps, equally on all ranks, and keep faster ones;
            buckets are made of smaller messages that go out together, and no bit of the training changes.
        communicator_variants: at most three dicts, such as {"max_ctas": 8}: under `autotune`, gathers also try process
            groups whose NCCL config has these values, where device memory allows.
        n_ranks_per_shard: hybrid sharding: shard within this many neighbouring ranks, e.g. one node's, and
            replicate across; None shards over all.
        debug: before each forward that trains, look for parameters that were changed outside the runtime, and raise
            on every rank; this costs waiting for a small all-reduce.
        broadcast_initial_values: start from rank 0's parameters and buffers.
    """

    stage: int = 3
    precision: str | None = None
    reduce_precision: str | None = None
    bucket_bytes: int | None = None
    n_buckets_in_flight: int = 2
    prefetch: int = 1
    reshard_after_forward: bool = True
    overlap_post_step_gather: bool = True
    all_reduce_gradients: bool = False
    find_unused_parameters: bool = False
    autotune: bool = False
    communicator_variants: tuple[Mapping[str, int], ...] = ()
    n_ranks_per_shard: int | None = None
    debug: bool = False
    broadcast_initial_values: bool = True

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in (1, 2, 3):
            raise refusal("stage", self.stage, "1, 2 or 3")
        for name in ("precision", "reduce_precision"):
            value = getattr(self, name)
            if value is not None and value not in list(_DTYPES):
                raise refusal(name, value, f"one of {', '.join(_DTYPES)} or None")
        for name, least in (("n_buckets_in_flight", 1), ("prefetch", 0)):
            whole_number(name, getattr(self, name), least)
        for name in ("bucket_bytes", "n_ranks_per_shard"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        object.__setattr__(self, "communicator_variants", communicator_variants(self.communicator_variants))
        if self.communicator_variants and not self.autotune:
            raise SettingsError("communicator_variants are tried by autotune; shard the model with autotune=True")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise refusal(field.name, value, "True or False")
        if self.all_reduce_gradients and self.stage != 1:
            raise SettingsError(
                f"all_reduce_gradients is for stage 1, not {self.stage}: the others never hold whole gradients"
            )

    def compute_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """Dtype of whole parameters and activations, for parameters of the given dtype."""
        return _DTYPES[self.precision] if self.precision and parameter_dtype.is_floating_point else parameter_dtype

    def reduce_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Dtype of gradients in buckets and sums."""
        return _DTYPES[self.reduce_precision] if self.reduce_precision else compute_dtype
