"""Advice as tables that fit eighty columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ...advice.models.model_shape import in_words
from ...advice.problem import ZeroConfiguration
from ...advice.search import Choice
from .document import Advice

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
_SIDE_BY_SIDE = 10
"""Choices beside each other in a table of parts."""
_WIDE = 120
"""On terminals with fewer columns, ranges stand below their figures."""
_LIMIT_WIDTH = len("tensor-parallel")
"""Width of the limit on narrow terminals; the configuration gets the rest."""
_LONG_S = 9.9995
"""Longer steps are shown in seconds, so figures have five characters at most."""
_THOUSANDS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def render(advice: Advice, console: Console) -> None:
    """Print the configurations that fit, their throughput, memory and time, and the assumptions."""
    marked = " (extrapolated)" if any(choice.step.extrapolated for choice in advice.choices) else ""
    console.print(
        f"{in_words(advice.n_parameters)} parameters on {advice.n_gpus:,} {advice.gpu} of {advice.cluster}, "
        f"{advice.precision}, {advice.optimizer}: what fits, the fastest first{marked}\n"
    )
    console.print(_ranked(advice.choices, is_narrow=console.width < _WIDE))
    console.print("\nGB per GPU, GB = 10^9 bytes")
    for first, shown in _side_by_side(advice.choices):
        console.print(_parts(first, list(_memory_rows(shown))))
    is_long = max(choice.step.step_s.high for choice in advice.choices) > _LONG_S
    unit, factor = ("s", 1.0) if is_long else ("ms", 1e3)
    console.print(f"\n{unit} per step; nine of ten between least and most")
    for first, shown in _side_by_side(advice.choices):
        console.print(_parts(first, list(_time_rows(shown, factor))))
    console.print()
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


def _side_by_side(choices: Sequence[Choice]) -> Iterator[tuple[int, Sequence[Choice]]]:
    """Groups of choices that fit side by side, each with the index of its first."""
    for start in range(0, len(choices), _SIDE_BY_SIDE):
        yield start + 1, choices[start : start + _SIDE_BY_SIDE]


def _ranked(choices: Sequence[Choice], *, is_narrow: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("configuration")
    table.add_column("bucket,\nprefetch" if is_narrow else "bucket, prefetch", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("tokens/s", no_wrap=True)
    table.add_column("MFU", no_wrap=True)
    table.add_column("limit", width=_LIMIT_WIDTH if is_narrow else None)
    for place, choice in enumerate(choices, 1):
        table.add_row(str(place), *_row(choice, is_narrow))
    return table


def _row(choice: Choice, is_narrow: bool) -> Iterator[str]:
    """A choice's cells. MFU has the range of tokens per second, if there is room for it."""
    one = choice.configuration
    tokens, mfu = choice.step.tokens_per_s, choice.step.model_flops_utilization
    yield (
        (f"{choice.paper_name}: " if choice.paper_name else "")
        + name_of(one)
        + (f" x {one.accumulation:,}" if one.accumulation > 1 else "")
    )
    bucket = "" if one.bucket_bytes is None else f"{one.bucket_bytes >> 20} MiB"
    yield f"{bucket}, {one.prefetch}" if one.stage == 3 else bucket
    yield f"{choice.memory_share:.0%}"
    gap = "\n" if is_narrow else " "
    yield f"{_short(tokens.expected)}{gap}({_short(tokens.low)} to {_short(tokens.high)})"
    yield f"{mfu.expected:.0%}" + ("" if is_narrow else f" ({100 * mfu.low:.0f} to {mfu.high:.0%})")
    yield choice.limit


def _parts(first: int, rows: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """One row for each part, one column for each choice; columns are numbered from `first` on."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for place in range(first, first + len(rows[0][1])):
        table.add_column(str(place), justify="right")
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _memory_rows(choices: Sequence[Choice]) -> Iterator[tuple[str, list[str]]]:
    for name in _MEMORY:
        yield name, [f"{getattr(choice.memory, f'{name}_bytes') / _GB:.1f}" for choice in choices]
    yield "total", [f"{choice.memory.total_bytes / _GB:.1f}" for choice in choices]


def _time_rows(choices: Sequence[Choice], factor: float) -> Iterator[tuple[str, list[str]]]:
    """Parts that one of the choices has, and the whole."""
    for name, field in _TIMES:
        parts = [getattr(choice.step.parts, field) for choice in choices]
        if any(parts):
            yield name, [_figure(factor * part) for part in parts]
    steps = [choice.step.step_s for choice in choices]
    yield "step", [_figure(factor * step.expected) for step in steps]
    yield "least", [_figure(factor * step.low) for step in steps]
    yield "most", [_figure(factor * step.high) for step in steps]


def _figure(value: float) -> str:
    return f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"


def _short(value: float) -> str:
    """Three digits: 146k."""
    rounded = float(f"{value:.3g}")
    factor, letter = next((one for one in _THOUSANDS if rounded >= one[0]), (1.0, ""))
    return f"{rounded / factor:.3g}{letter}"
