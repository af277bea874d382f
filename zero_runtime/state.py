"""Reads whole values of a sharded model, and saves and loads plain state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from . import phases
from .checks import refusal
from .errors import CheckpointError
from .layout.flat_buffer import Flat
from .sharded_model import ShardedModel


def _gathered(engine: ShardedModel, flat: Flat) -> Tensor:
    """The whole flat buffer in the master copy's precision, on every rank."""
    if not flat.has_master and not flat.partitioned:
        return flat.whole
    whole = torch.empty(flat.layout.numel, dtype=flat.master_dtype, device=flat.device)
    for chunk, master in zip(flat.layout.chunks, flat.masters, strict=True):
        phases.announce(phases.OTHER)
        engine.collectives.all_gather(whole[chunk.start : chunk.end], master, flat.group).wait()
    return whole


def named_values(engine: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, whole value) of every sharded parameter, one flat buffer in memory at a time."""
    engine.synchronize()
    for flat in engine.flats:
        whole = _gathered(engine, flat)
        for slot in flat.layout.slots:
            yield slot.name, whole[slot.offset : slot.end].view(slot.shape)


@torch.no_grad()
def full_state_dict(engine: ShardedModel) -> dict[str, Tensor]:
    """A plain state dict in master precision, on the CPU, equal on every rank; tied names repeat."""
    values = {name: value.detach().cpu().clone() for name, value in named_values(engine)}
    names = {id(m.parameter): m.name for flat in engine.flats for m in flat.managed}
    found: dict[str, Tensor] = {}
    for name, tensor in _entries(engine).items():
        known = names.get(id(tensor))
        found[name] = values[known] if known is not None else tensor.detach().cpu().clone()
    return found


def _entries(engine: ShardedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers under every name that a state dict would give them."""
    entries: dict[str, Tensor] = {}
    for prefix, module in engine.model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                entries[start + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                entries[start + name] = buffer
    return entries


def unsharded_values(engine: ShardedModel) -> dict[str, Tensor]:
    """Values whole on every rank: persistent buffers and, in stages 1 and 2, frozen parameters (tied ones once)."""
    known = {id(p) for flat in engine.flats for p in flat.parameters}
    found = {}
    for name, tensor in _entries(engine).items():
        if id(tensor) not in known:
            known.add(id(tensor))
            found[name] = tensor
    return found


@torch.no_grad()
def load_full_state_dict(engine: ShardedModel, values: Mapping[str, Tensor]) -> None:
    """Loads this rank's part of every value; every rank passes the same state dict.

    Raises:
        SettingsError: it is no state dict; nothing was changed then.
        CheckpointError: names or shapes are not this model's; nothing was changed then.
    """
    if not isinstance(values, Mapping):
        raise refusal("the state dict", values, "a dict of tensors by name, as engine.state_dict() gives")
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise refusal(f"{name} in the state dict", value, "a tensor")
    entries = _entries(engine)
    missing, extra = sorted(entries.keys() - values.keys()), sorted(values.keys() - entries.keys())
    if missing or extra:
        raise CheckpointError(
            f"the state dict is of another model: it lacks {missing[:3]} and has unknown {extra[:3]}; "
            "load one that was saved from the same architecture"
        )
    for name, tensor in entries.items():
        if tuple(values[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {tuple(values[name].shape)} in the state dict and {tuple(tensor.shape)} in "
                "the model; load one that was saved from the same architecture"
            )
    engine.synchronize()
    for name, tensor in unsharded_values(engine).items():
        tensor.copy_(values[name])
    for flat in engine.flats:
        assign_pieces(flat, values)


def assign_pieces(flat: Flat, values: Mapping[str, Tensor]) -> None:
    """Writes whole values into this rank's slices, and into whole parameters that stay in memory."""
    layout = flat.layout
    masters = torch.zeros(layout.shard_numel, dtype=flat.master_dtype, device=flat.device)
    for piece in layout.pieces(flat.rank):
        source = values[layout.slots[piece.slot].name].reshape(-1)
        masters[piece.shard_offset : piece.shard_offset + piece.numel].copy_(
            source[piece.slot_offset : piece.slot_offset + piece.numel]
        )
    for chunk, master in zip(layout.chunks, flat.masters, strict=True):
        master.copy_(masters[chunk.shard_start : chunk.shard_start + chunk.shard_numel])
    flat.publish_master()
    if not flat.partitioned:
        for slot in layout.slots:
            flat.whole[slot.offset : slot.end].copy_(values[slot.name].reshape(-1))
