"""`zerotune memory`: the memory and communication analysis of zero_runtime.analysis, as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from store.errors import UserError
from zero_runtime import analysis

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_parameters(text: str) -> float:
    """A number of parameters from "7.5B", "350M" or "1T".

    Raises:
        UserError: it is not of that form, or not positive.
    """
    number, factor = (text[:-1], SUFFIXES[text[-1:].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1.0)
    try:
        count = float(number) * factor
    except ValueError:
        count = 0.0
    if not 0 < count < 1e18:
        raise UserError(f"{text!r} is no number of parameters", "write it as 350M, 7.5B or 1T")
    return count


def render_model(model: str, n_ranks: int, precision: str, optimizer: str, console: Console) -> None:
    """Model states per rank and bytes per step of every stage.

    Raises:
        UserError: a value the analysis does not know.
    """
    n_parameters = parse_parameters(model)
    table = Table(
        "stage", "parameters", "gradients", "optimizer", "total per rank", "sent per step",
        title=f"{model} parameters, {n_ranks} ranks, {precision}, {optimizer} "
        f"(K = {_checked_multiplier(optimizer, precision)}); GB = 10^9 bytes",
    )  # fmt: skip
    element_bytes = analysis.PARAMETER_BYTES[precision]
    for stage, name in analysis.STAGE_NAMES.items():
        try:
            states = analysis.model_states(n_parameters, stage, n_ranks, precision=precision, optimizer=optimizer)
        except ValueError as error:
            raise UserError(str(error)) from error
        traffic = analysis.step_traffic(n_parameters, stage)
        table.add_row(
            f"{stage} {name}",
            *(
                f"{amount / analysis.GB:,.2f} GB"
                for amount in (
                    states.parameters_bytes,
                    states.gradients_bytes,
                    states.optimizer_bytes,
                    states.total_bytes,
                )
            ),
            f"{traffic.total_elements * element_bytes / analysis.GB:,.2f} GB "
            f"({traffic.total_elements / n_parameters:.0f} per parameter)",
        )
    console.print(table)


def _checked_multiplier(optimizer: str, precision: str) -> int:
    try:
        return analysis.optimizer_multiplier(optimizer, precision)
    except ValueError as error:
        raise UserError(str(error)) from error


def render_paper_tables(console: Console) -> None:
    """Tables 1 and 2 (theoretical columns) of the ZeRO paper."""
    stages = (1, 2, 3)
    columns = [f"{name} {analysis.STAGE_NAMES[stage]}" for name, _ in analysis.TABLE_1_MODELS for stage in stages]
    first = Table("ranks", *columns, title="ZeRO paper, table 1: GB per rank")
    for n_ranks, cells in analysis.table_1():
        first.add_row(
            str(n_ranks), *(cells[name, stage] for name, _ in analysis.TABLE_1_MODELS for stage in stages)
        )
    console.print(first)
    second = Table(
        "model parallel", "GPUs", *analysis.STAGE_NAMES.values(),
        title="ZeRO paper, table 2: largest model, billions of parameters, 32 GB per GPU",
    )  # fmt: skip
    for n_model_parallel, n_gpus, sizes in analysis.table_2():
        second.add_row(str(n_model_parallel), str(n_gpus), *(f"{billions:g}" for billions in sizes))
    console.print(second)
