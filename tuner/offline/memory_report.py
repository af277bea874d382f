"""`zerotune advise --memory`: tables of each ZeRO stage's needs, by zerotune.tuner.advice.zero_formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ...store.errors import UserError
from ..advice import zero_formulas
from ..advice.models.meta_module import is_config, shape_of_config
from ..advice.models.model_shape import in_words

PRECISIONS = tuple(zero_formulas.PARAMETER_BYTES)
OPTIMIZERS = tuple(zero_formulas.OPTIMIZER_STATES)
MAX_PARAMETERS = 1e18
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_parameters(text: str) -> float:
    """A number of parameters from "7.5B", "350M" or "1T"; UserError unless it is a positive one."""
    number, factor = (text[:-1], SUFFIXES[text[-1:].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1.0)
    try:
        count = float(number) * factor
    except ValueError:
        count = 0.0
    if not count > 0:
        remedy = "write it as 350M, 7.5B or 1T, or name a model's config.json"
        raise UserError(f"{text!r} is no number of parameters", remedy)
    if count >= MAX_PARAMETERS:
        raise UserError(f"{text} parameters are more than a model has", f"give fewer than {MAX_PARAMETERS:g}")
    return count


class StageNeeds(msgspec.Struct, frozen=True):
    """The needs of one ZeRO stage on each rank."""

    stage: int
    name: str
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    total_bytes: float
    sent_bytes_per_step: float
    sent_elements_per_parameter: float


class ModelNeeds(msgspec.Struct, frozen=True):
    """A model's needs under each stage."""

    model: str
    n_parameters: float
    n_ranks: int
    precision: str
    optimizer: str
    optimizer_bytes_per_parameter: int
    """Bytes of optimizer states per parameter: K in the ZeRO paper (arXiv:1910.02054, section 3.1)."""
    stages: tuple[StageNeeds, ...]


def model_needs(model: str, n_ranks: int, precision: str, optimizer: str) -> ModelNeeds:
    """Model states per rank and bytes per step under every stage.

    Args:
        model: number of parameters, e.g. "7.5B", or a model's config.json.
        precision: "fp32", "bf16" or "fp16".

    Raises:
        UserError: the analysis does not know a value.
    """
    n_parameters = shape_of_config(Path(model)).n_parameters if is_config(model) else parse_parameters(model)
    try:
        multiplier = zero_formulas.optimizer_multiplier(optimizer, precision)
        stages = tuple(
            _stage_needs(stage, n_parameters, n_ranks, precision, optimizer) for stage in zero_formulas.STAGE_NAMES
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return ModelNeeds(model, n_parameters, n_ranks, precision, optimizer, multiplier, stages)


def _stage_needs(stage: int, n_parameters: float, n_ranks: int, precision: str, optimizer: str) -> StageNeeds:
    states = zero_formulas.model_states(n_parameters, stage, n_ranks, precision=precision, optimizer=optimizer)
    n_elements = zero_formulas.sent_elements(n_parameters, stage)
    return StageNeeds(
        stage,
        zero_formulas.STAGE_NAMES[stage],
        states.parameters_bytes,
        states.gradients_bytes,
        states.optimizer_bytes,
        states.total_bytes,
        n_elements * zero_formulas.PARAMETER_BYTES[precision],
        n_elements / n_parameters,
    )


def render_model(needs: ModelNeeds, console: Console) -> None:
    """Print a model's needs."""
    ranks = "1 rank" if needs.n_ranks == 1 else f"{needs.n_ranks:,} ranks"
    size = f": {in_words(needs.n_parameters)}" if is_config(needs.model) else ""
    named = f"{needs.model}{size} parameters"
    table = Table(
        "stage", "parameters", "gradients", "optimizer", "total per rank", "sent per step",
        title=f"{named}, {ranks}, {needs.precision}, {needs.optimizer} "
        f"(K = {needs.optimizer_bytes_per_parameter}); GB = 10^9 bytes",
    )  # fmt: skip
    for one in needs.stages:
        amounts = (one.parameters_bytes, one.gradients_bytes, one.optimizer_bytes, one.total_bytes)
        table.add_row(
            f"{one.stage} {one.name}",
            *(f"{amount / zero_formulas.GB:,.2f} GB" for amount in amounts),
            f"{one.sent_bytes_per_step / zero_formulas.GB:,.2f} GB "
            f"({one.sent_elements_per_parameter:.0f} per parameter)",
        )
    console.print(table)


def paper_tables() -> dict[str, list[dict[str, Any]]]:
    """Tables 1 and 2 of the paper for scripts: GB per rank as printed, and billions of parameters."""
    names = zero_formulas.STAGE_NAMES
    return {
        "gb_per_rank": [
            {"n_ranks": n_ranks, "model": model, "stage": stage, "name": names[stage], "gb": float(cell)}
            for n_ranks, cells in zero_formulas.table_1()
            for (model, stage), cell in cells.items()
        ],
        "largest_model_in_32_gb": [
            {
                "n_model_parallel": n_split,
                "n_gpus": n_gpus,
                "stage": stage,
                "name": names[stage],
                "n_billions": billions,
            }
            for n_split, n_gpus, sizes in zero_formulas.table_2()
            for stage, billions in zip(names, sizes, strict=True)
        ],
    }


def render_paper_tables(console: Console) -> None:
    """Tables 1 and 2 (theoretical columns) of the ZeRO paper."""
    cases = [(name, stage) for name, _ in zero_formulas.TABLE_1_MODELS for stage in (1, 2, 3)]
    columns = [f"{name} {zero_formulas.STAGE_NAMES[stage]}" for name, stage in cases]
    first = Table("ranks", *columns, title="ZeRO paper, table 1: GB per rank")
    for n_ranks, cells in zero_formulas.table_1():
        first.add_row(str(n_ranks), *(cells[case] for case in cases))
    console.print(first)
    second = Table(
        "model parallel", "GPUs", *zero_formulas.STAGE_NAMES.values(),
        title="ZeRO paper, table 2: largest model, billions of parameters, 32 GB per GPU",
    )  # fmt: skip
    for n_model_parallel, n_gpus, sizes in zero_formulas.table_2():
        second.add_row(str(n_model_parallel), str(n_gpus), *(f"{billions:g}" for billions in sizes))
    console.print(second)
