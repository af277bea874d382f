"""Predicts one GPU's memory at a step's peak."""

from __future__ import annotations

import msgspec

from ..models.model_shape import ModelShape
from ..problem import Problem, ZeroConfiguration
from ..zero_formulas import PARAMETER_BYTES, model_states


class MemoryParts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Activations for backward: checkpoints, or all that blocks keep."""
    working_bytes: float
    """Temporary tensors of the current block and of the loss."""
    buffers_bytes: float
    """Buckets, and blocks that stage 3 has gathered."""
    runtime_bytes: float
    """CUDA, libraries, NCCL."""

    @property
    def total_bytes(self) -> float:
        """All parts."""
        return sum(float(getattr(self, name)) for name in self.__struct_fields__)


def kept_bytes_per_token(shape: ModelShape, n_model_parallel: int, *, flash: bool, element_bytes: int = 2) -> float:
    """Activations that one block keeps for backward, per token.

    Korthikanti et al. 2022, arXiv:2205.05198, equation 2 (34 s b h + 5 a s² b, divided by tensor parallelism but for
    10 s b h), by matrix, also for gated feed-forwards and shared key-value heads. Its 2 s b h of dropout masks are
    counted. Without fused attention (`flash`) the a s² terms are added: scores, softmax's output and its dropout.
    """
    scale = element_bytes / 2
    attention = 2 * shape.n_attentions * (2 * shape.query_width + 2 * shape.kv_width)
    ffn = (8 if shape.gated else 4) * shape.active_ffn_width
    split = attention + ffn
    whole = (2 + 2 + 4 + 2) * shape.width  # inputs of both halves, norms' inputs, dropout masks
    scores = 0.0 if flash else 5.0 * shape.n_attentions * shape.n_heads * shape.n_context
    return scale * (whole + (split + scores) / n_model_parallel)


def memory_of(problem: Problem, configuration: ZeroConfiguration) -> MemoryParts:
    """Bytes on one rank at a step's peak, which is in backward."""
    shape, software, constants = problem.shape, problem.software, problem.constants
    split = configuration.n_model_parallel
    element = PARAMETER_BYTES[software.precision]
    n_shards = configuration.shard_ranks or problem.n_groups(configuration)
    states = model_states(
        shape.n_parameters,
        configuration.stage,
        n_shards,
        precision=software.precision,
        optimizer=software.optimizer,
        n_model_parallel=split,
    )
    tokens = configuration.micro_batch * shape.n_context
    block = tokens * kept_bytes_per_token(shape, split, flash=software.flash, element_bytes=element)
    checkpoint = float(tokens * shape.width * element)
    if configuration.offload_activations:
        checkpoint = 0.0
    elif configuration.partition_activations:
        checkpoint /= split
    n_kept = {"none": shape.n_layers, "half": shape.n_layers // 2, "full": 0}[configuration.recompute]
    activations = n_kept * block + (shape.n_layers - n_kept) * checkpoint
    # A recomputed block is fully in memory, with the gradients of its widest part.
    gradients_of_block = tokens * 4 * shape.width * element / split + tokens * 2 * shape.width * element
    working = gradients_of_block + (block if configuration.recompute != "none" else 0.0)
    logits = tokens * shape.vocabulary / split * constants.logit_bytes
    own_block = shape.block_parameters / split
    if configuration.bucket_bytes is None:
        buffers = 4.0 * shape.n_parameters / split  # section 3.2: one flat fp32 buffer
    else:
        reduced = own_block if configuration.stage == 3 else shape.n_parameters / split
        buffers = 2.0 * min(configuration.bucket_bytes, reduced * element)
    if configuration.stage == 3:
        outer = shape.outer_parameters / split
        gathered = (configuration.prefetch + 1) * own_block + outer
        buffers += gathered * element + own_block * element  # and one block's whole gradients
    return MemoryParts(
        parameters_bytes=states.parameters_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=activations,
        working_bytes=max(working, logits),
        buffers_bytes=buffers,
        runtime_bytes=constants.runtime_bytes,
    )


def memory_share(problem: Problem, configuration: ZeroConfiguration) -> float:
    """Share of a GPU's usable memory at a step's peak; above 1 the configuration does not fit."""
    usable_bytes = problem.cluster.gpu.memory_bytes * problem.constants.fillable_memory
    return memory_of(problem, configuration).total_bytes / usable_bytes


def batch_that_fits(problem: Problem, configuration: ZeroConfiguration) -> int:
    """The most sequences per micro-batch; 0: none. The configuration's own micro-batch is not used."""
    limit = problem.cluster.gpu.memory_bytes * problem.constants.fillable_memory

    def fits(batch: int) -> bool:
        tried = msgspec.structs.replace(configuration, micro_batch=batch)
        return memory_of(problem, tried).total_bytes <= limit

    low, high = 0, 1
    while high <= 1 << 20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
