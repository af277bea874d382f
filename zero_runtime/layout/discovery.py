"""Finds a model's parameters with all their holders, and its layers to gather one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingsError
from .flat_buffer import Managed

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def managed_parameters(model: nn.Module) -> list[Managed]:
    """Every distinct parameter once, in the model's order, with every module that holds it."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            found.setdefault(id(parameter), (name, parameter))
            holders.setdefault(id(parameter), []).append((module, attribute))
    return [Managed(name, p, tuple(holders[key])) for key, (name, p) in found.items()]


def _is_layer(module: nn.Module) -> bool:
    """Whether the module has parameters and a forward, around which they can be gathered; a ParameterList has none."""
    has_forward = getattr(module.forward, "__func__", None) is not nn.Module.forward
    return has_forward and next(module.parameters(), None) is not None


def default_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: outermost members of its module lists, else its children."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
                layers.append(child)
            else:
                visit(child)

    visit(model)
    return list(filter(_is_layer, layers)) or list(filter(_is_layer, model.children()))


Part = tuple[str, nn.Module, list[Managed]]
"""A name, the module, and the parameters that it owns."""


def assign(model: nn.Module, layers: Sequence[nn.Module]) -> list[Part]:
    """(name, module, its parameters) for the root and each layer.

    A parameter belongs to the innermost layer around all its holders: a parameter that two layers share goes to the
    layer around both, or to the root.

    Raises:
        SettingsError: a layer is not part of the model.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        if id(layer) not in names:
            raise SettingsError(f"the layer {type(layer).__name__} is not part of the model; name layers inside it")
    index = {id(layer): position for position, layer in enumerate(layers)}
    around: dict[int, tuple[int, ...]] = {}  # parameter -> layers around all its places, the innermost last

    def visit(module: nn.Module, outer: tuple[int, ...]) -> None:
        if id(module) in index:
            outer = (*outer, index[id(module)])
        for parameter in module._parameters.values():
            if parameter is not None:
                known = around.setdefault(id(parameter), outer)
                around[id(parameter)] = tuple(layer for layer in known if layer in outer)
        for child in module._modules.values():
            if child is not None:
                visit(child, outer)

    visit(model, ())
    parts: list[list[Managed]] = [[] for _ in range(len(layers) + 1)]
    for managed in managed_parameters(model):
        owners = around[id(managed.parameter)]
        parts[owners[-1] + 1 if owners else 0].append(managed)
    found = [("", model, parts[0])]
    found += [(names[id(layer)], layer, part) for layer, part in zip(layers, parts[1:], strict=True)]
    return [part for part in found if part[2]]


def agree_on_model(description: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compares a hash of `description` among ranks by one collective of fixed length; all ranks of `group` call this.

    The description has names, shapes and settings that must be equal on all ranks. `device` must suit the group's
    backend.

    Raises:
        SettingsError: on every rank; the text names the ranks that differ from rank 0.
    """
    everyone = _digests(description, group, device)
    odd = [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if odd:
        raise SettingsError(
            f"ranks {odd} hold another model or other settings than rank 0; build the same model, with the same "
            "names, shapes, dtypes and frozen parameters, and the same zero_runtime settings on every rank"
        )


def report_mistake(mistake: SettingsError, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Takes part in the others' comparison, so that they do not wait if only this rank has a mistake.

    The mistake's text makes the hash differ from that of every other rank. A model without parameters is not compared,
    as its first parameter gives the device.
    """
    parameter = next(model.parameters(), None)
    if parameter is not None:
        _digests(f"mistake: {mistake}", group, parameter.device)


def _digests(description: str, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    digest = torch.tensor(list(hashlib.sha256(description.encode()).digest()), dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, digest, group=group)
    return [one.cpu() for one in everyone]  # the CPU compares few bytes without a kernel for each
