"""The ZeRO paper's formulas for each stage's memory and communication.

Ψ = parameters, N_d = ranks that share the model, K = bytes of optimizer state per parameter. Sources: Rajbhandari
et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3, 5 and 7.
Figures in GB mean 10⁹ bytes, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

GB = 1e9

# States that an optimizer keeps per parameter, fp32 each.
OPTIMIZER_STATES = {
    "adam": 2,
    "adamw": 2,
    "radam": 2,
    "nadam": 2,
    "adamax": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "momentum": 1,
    "sgd": 0,
}
PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STAGE_NAMES = {0: "baseline", 1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}


def optimizer_multiplier(optimizer: str = "adam", precision: str = "bf16") -> int:
    """K: bytes of optimizer state per parameter; mixed precision adds an fp32 copy of the weights.

    Raises ValueError for an unknown optimizer or precision.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"optimizer is {optimizer!r}; it must be one of {', '.join(OPTIMIZER_STATES)}")
    if precision not in PARAMETER_BYTES:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PARAMETER_BYTES)}")
    return 4 * (OPTIMIZER_STATES[optimizer] + (PARAMETER_BYTES[precision] < 4))


@dataclass(frozen=True)
class ModelStates:
    """Bytes of model states on one rank."""

    stage: int
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of the three kinds of model states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def model_states(
    n_parameters: float,
    stage: int,
    n_ranks: int,
    *,
    precision: str = "bf16",
    optimizer: str = "adam",
    gradient_precision: str | None = None,
    n_model_parallel: int = 1,
) -> ModelStates:
    """Bytes of model states on one of N_d ranks (paper, section 5); stage 0 is plain data parallelism.

    Args:
        precision: of the weights in training: "fp32", "bf16" or "fp16".
        gradient_precision: of accumulated gradients, e.g. "fp32" for bf16 weights; None: as `precision`.
        n_model_parallel: ranks that split the model before ZeRO shards each part.

    Raises:
        ValueError: a stage other than 0 to 3, fewer than one rank, an unknown optimizer or precision.
    """
    if stage not in STAGE_NAMES:
        raise ValueError(f"stage is {stage!r}; it must be 0, 1, 2 or 3")
    if n_ranks < 1 or n_model_parallel < 1:
        raise ValueError(f"ranks are {n_ranks} × {n_model_parallel}; there must be at least one of each")
    multiplier = optimizer_multiplier(optimizer, precision)
    own = n_parameters / n_model_parallel
    weight, gradient = PARAMETER_BYTES[precision], PARAMETER_BYTES[gradient_precision or precision]
    return ModelStates(
        stage,
        own * weight / (n_ranks if stage >= 3 else 1),
        own * gradient / (n_ranks if stage >= 2 else 1),
        own * multiplier / (n_ranks if stage >= 1 else 1),
    )


def largest_model(memory_bytes: float, stage: int, n_ranks: int, *, n_model_parallel: int = 1, **kinds: str) -> float:
    """Most parameters whose model states fit into `memory_bytes` per rank (paper, table 2); raises as `model_states`.

    `kinds` are the `precision`, `optimizer` and `gradient_precision` of `model_states`.
    """
    per_parameter = model_states(1.0, stage, n_ranks, **kinds).total_bytes  # type: ignore[arg-type]
    return n_model_parallel * memory_bytes / per_parameter


TABLE_1_MODELS = (("7.5B", 7.5e9), ("128B", 128e9), ("1T", 1e12))
TABLE_1_RANKS = (1, 4, 16, 64, 256, 1024)


def _as_printed(gb: float) -> str:
    """A cell as the paper prints it: three digits, rounded half up below 100 and truncated from 100 on."""
    if gb >= 100:
        return str(floor(gb))
    digits = 1 if gb >= 10 else 2
    return f"{floor(gb * 10**digits + 0.5) / 10**digits:g}"


def table_1() -> list[tuple[int, dict[tuple[str, int], str]]]:
    """Table 1: for each N_d, GB per rank by (model, stage), as printed."""
    return [
        (
            n,
            {
                (name, stage): _as_printed(model_states(psi, stage, n).total_bytes / GB)
                for name, psi in TABLE_1_MODELS
                for stage in (1, 2, 3)
            },
        )
        for n in TABLE_1_RANKS
    ]


TABLE_2_MODEL_PARALLEL = (1, 2, 4, 8, 16)


def table_2(memory_gb: float = 32.0, n_ranks: int = 64) -> list[tuple[int, int, tuple[float, ...]]]:
    """Table 2, theoretical columns: (MP, GPUs, largest model in billions by stage 0 to 3).

    The paper multiplies the largest model without model parallelism, rounded to 0.1 billion, by the MP degree.
    """
    single = [round(largest_model(memory_gb * GB, stage, n_ranks) / 1e9, 1) for stage in STAGE_NAMES]
    return [(mp, mp * n_ranks, tuple(round(size * mp, 1) for size in single)) for mp in TABLE_2_MODEL_PARALLEL]


def sent_elements(n_parameters: float, stage: int) -> float:
    """Elements that one rank sends per step (paper, section 7): 2Ψ, and 3Ψ in stage 3, which gathers twice.

    An all-reduce counts as its reduce-scatter and its all-gather.

    Raises:
        ValueError: a stage other than 0 to 3.
    """
    if stage not in STAGE_NAMES:
        raise ValueError(f"stage is {stage!r}; it must be 0, 1, 2 or 3")
    return (3 if stage == 3 else 2) * n_parameters
