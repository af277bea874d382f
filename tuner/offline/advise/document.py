"""The results of `zerotune advise`, for tables and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ....store.errors import UserError
from ...advice.hardware.network import LinkNetwork
from ...advice.models import meta_module
from ...advice.models.model_shape import ModelShape, checked, from_dimensions, from_parameters
from ...advice.prediction.compute import nearest_share
from ...advice.problem import Problem, Recompute, Software
from ...advice.search import RECOMPUTES, Choice
from ..memory_report import OPTIMIZERS, PRECISIONS, parse_parameters


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The question, the assumptions, and the choices, the fastest first."""

    model: str
    n_parameters: float
    shape: ModelShape
    cluster: str
    n_gpus: int
    gpu: str
    precision: str
    optimizer: str
    assumptions: tuple[str, ...]
    measured: tuple[str, ...]
    """Measurements that replaced assumptions."""
    choices: tuple[Choice, ...]


def model_shape(
    model: str | None,
    n_layers: int | None,
    width: int | None,
    n_heads: int | None,
    n_context: int | None,
    vocabulary: int | None,
) -> ModelShape:
    """The shape that options describe.

    Without `n_heads`, heads have 128 dimensions each.

    Args:
        model: a number of parameters, a configuration file, or `package.module:callable`.
        n_layers: with `width`, the shape; a number of parameters beside them is only compared.
        n_context: tokens of a sequence; this replaces a configuration file's number.
        vocabulary: None: the configuration file's, or else GPT-2's.

    Raises:
        UserError: no option describes a model, or two options contradict each other.
    """
    if (n_layers is None) != (width is None):
        raise UserError("--layers and --hidden describe a model together", "give both")
    is_path = model is not None and meta_module.is_config(model)
    is_module = model is not None and ":" in model
    if is_path or is_module:
        assert model is not None
        if n_layers is not None or n_heads is not None:
            raise UserError(f"{model} has layers and heads of its own", "leave out --layers, --hidden and --heads")
        shape = meta_module.shape_of_config(Path(model)) if is_path else meta_module.shape_of(model)
        changes = {"n_context": n_context, "vocabulary": vocabulary}
        given = {name: value for name, value in changes.items() if value is not None}
        assumed = tuple(name for name in shape.assumed if name not in given)
        return checked(msgspec.structs.replace(shape, assumed=assumed, **given))
    if n_heads is not None and n_layers is None:
        raise UserError("--heads describes a model together with --layers and --hidden", "give all three")
    n_parameters = parse_parameters(model) if model is not None else None
    if n_layers is not None and width is not None:
        return from_dimensions(n_layers, width, n_heads, n_context, vocabulary, n_parameters)
    if n_parameters is None:
        raise UserError(
            "nothing says what is trained",
            "give a number of parameters, a config.json, package.module:callable, or --layers and --hidden",
        )
    return from_parameters(n_parameters, n_context, vocabulary)


def software(precision: str, optimizer: str, *, flash: bool, compiled: bool) -> Software:
    """The settings of the training script; UserError for an unknown precision or optimizer."""
    if precision not in PRECISIONS:
        raise UserError(f"{precision!r} is no precision", f"name one of {', '.join(PRECISIONS)}")
    if optimizer not in OPTIMIZERS:
        raise UserError(f"{optimizer!r} is no optimizer that is known here", f"name one of {', '.join(OPTIMIZERS)}")
    return Software(precision=precision, optimizer=optimizer, flash=flash, compiled=compiled)


def recomputes(names: list[str] | None) -> tuple[Recompute, ...]:
    """The kinds of recomputation to try; UserError if a word is none."""
    wrong = set(names or ()) - set(RECOMPUTES)
    if wrong:
        raise UserError(f"{min(wrong)!r} cannot be recomputed", f"name {', '.join(RECOMPUTES)}")
    return tuple(one for one in RECOMPUTES if not names or one in names)


def advice(
    problem: Problem, choices: tuple[Choice, ...], model: str, measured: tuple[str, ...], *, gpu_was_named: bool
) -> Advice:
    """The advice with its assumptions; `choices` are the fastest first, `model` is the user's text."""
    cluster = problem.cluster
    return Advice(
        model=model,
        n_parameters=problem.shape.n_parameters,
        shape=problem.shape,
        cluster=f"{cluster.n_nodes} x {cluster.name}",
        n_gpus=cluster.n_gpus,
        gpu=cluster.gpu.name,
        precision=problem.software.precision,
        optimizer=problem.software.optimizer,
        assumptions=(*assumptions(problem, gpu_was_named), *_beyond_the_peak(choices)),
        measured=measured,
        choices=choices,
    )


def assumptions(problem: Problem, gpu_was_named: bool) -> tuple[str, ...]:
    """One sentence for each assumption that nobody stated or measured."""
    shape, cluster = problem.shape, problem.cluster
    found = []
    if shape.assumed:
        values = ", ".join(f"{name} {getattr(shape, name)}" for name in shape.assumed)
        found.append(f"the model has {values}")
    if not gpu_was_named:
        found.append(f"its GPUs are {cluster.gpu.name}")
    if problem.measured.compute_factor is None:
        found.append(_computation(cluster.gpu.capability, problem.constants.matmul_shares))
    if problem.measured.network_factor is None:
        source = (
            "NCCL's cost model on the machine's links" if isinstance(cluster.network, LinkNetwork) else "the fabric"
        )
        found.append(f"collectives take what {source} says")
    if problem.constants.headroom:
        found.append(f"{problem.constants.headroom:.0%} of each GPU's memory stays free (--headroom)")
    if cluster.is_extrapolated:
        found.append(f"{cluster.n_nodes} nodes behave as {cluster.network.known_nodes} do: extrapolated")
    return tuple(found)


def _beyond_the_peak(choices: tuple[Choice, ...]) -> tuple[str, ...]:
    """A warning if measured steps differ too much in size, as small steps bound by kernel launches do."""
    if all(choice.step.model_flops_utilization.expected <= 1 for choice in choices):
        return ()
    return ("computation scales as in the steps that were measured, here beyond the GPU's peak: extrapolated too far",)


def _computation(capability: int, shares: Mapping[int, float]) -> str:
    """The source of the share of the peak that multiplications reach."""
    nearest = nearest_share(shares, capability)
    if nearest == capability:
        return "computation reaches what it reached in published runs on this generation of GPUs"
    return (
        f"computation reaches that share of the peak which GPUs of compute capability {nearest / 10:.1f} reached in"
        f" published runs; these have {capability / 10:.1f}: extrapolated"
    )
