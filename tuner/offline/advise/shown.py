"""Advice as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zerotune.tuner.advice.configuration import ZeroConfiguration
from zerotune.tuner.advice.ranges import Range
from zerotune.tuner.advice.search import Choice
from zerotune.tuner.offline.advise.document import Advice

_GB = 1e9
_MEMORY = ("parameters", "gradients", "optimizer", "activations", "working", "buffers", "runtime")
_TIMES = (
    ("multiplying", "multiplying_s"),
    ("attention", "attention_s"),
    ("memory-bound", "traffic_s"),
    ("recomputing", "recomputing_s"),
    ("tensor parallel", "tensor_parallel_s"),
    ("exposed", "exposed_s"),
    ("contention", "contention_s"),
    ("offload", "offload_s"),
    ("optimizer", "optimizer_s"),
    ("launching", "waiting_s"),
)


def render(advice: Advice, console: Console) -> None:
    """Print what fits and what it gives, the memory and the time of each, and what all of that rests on."""
    marked = " (extrapolated)" if any(choice.step.extrapolated for choice in advice.choices) else ""
    ranked = Table(
        "", "stage", "as", "model parallel", "sharded over", "recompute", "activations", "batch", "bucket", "prefetch",
        "memory", "tokens/s", "MFU", "limit",
        title=f"{advice.n_parameters / 1e9:.3g} B parameters on {advice.n_gpus:,} {advice.gpu} of {advice.cluster}, "
        f"{advice.precision}, {advice.optimizer}: what fits, the fastest first{marked}",
    )  # fmt: skip
    for place, choice in enumerate(advice.choices, 1):
        ranked.add_row(str(place), *_row(choice, advice.n_gpus))
    console.print(ranked)
    memory = Table("", *_MEMORY, "total", title="GB per GPU, GB = 10^9 bytes")
    for place, choice in enumerate(advice.choices, 1):
        parts = [getattr(choice.memory, f"{name}_bytes") / _GB for name in _MEMORY]
        memory.add_row(str(place), *(f"{part:.1f}" for part in parts), f"{sum(parts):.1f}")
    console.print(memory)
    times = Table("", *(name for name, _ in _TIMES), "step", "90 % range", title="ms per step")
    for place, choice in enumerate(advice.choices, 1):
        step = choice.step.step_s
        times.add_row(
            str(place),
            *(_ms(getattr(choice.step.parts, field)) for _, field in _TIMES),
            _ms(step.expected),
            f"{_ms(step.low)} to {_ms(step.high)}",
        )
    console.print(times)
    for sentence in advice.measured:
        console.print(f"Measured: {sentence}.")
    for sentence in advice.assumptions:
        console.print(f"Assumed: {sentence}.")


def name_of(configuration: ZeroConfiguration) -> str:
    """A configuration in a few words."""
    words = [f"stage {configuration.stage}"]
    if configuration.n_model_parallel > 1:
        words.append(f"MP {configuration.n_model_parallel}")
    if configuration.shard_ranks:
        words.append(f"hybrid {configuration.shard_ranks}")
    if configuration.recompute != "none":
        words.append(f"recompute {configuration.recompute}")
    if configuration.partition_activations:
        words.append("P_a+cpu" if configuration.offload_activations else "P_a")
    return ", ".join([*words, f"batch {configuration.micro_batch}"])


def _row(choice: Choice, n_gpus: int) -> list[str]:
    one = choice.configuration
    activations = ("P_a+cpu" if one.offload_activations else "P_a") if one.partition_activations else ""
    batch = f"{one.micro_batch}" + (f" x {one.accumulation}" if one.accumulation > 1 else "")
    return [
        str(one.stage),
        choice.paper_name,
        str(one.n_model_parallel),
        "all" if not one.shard_ranks else str(one.shard_ranks),
        one.recompute,
        activations,
        batch,
        "" if one.bucket_bytes is None else f"{one.bucket_bytes >> 20} MiB",
        str(one.prefetch) if one.stage == 3 else "",
        f"{choice.memory_share:.0%}",
        _between(choice.step.tokens_per_s, ",.0f"),
        _between(choice.step.model_flops_utilization, ".0%"),
        choice.limit,
    ]


def _between(value: Range, style: str) -> str:
    return f"{value.expected:{style}} ({value.low:{style}} to {value.high:{style}})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
