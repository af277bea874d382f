"""Checkpoints through torch.distributed.checkpoint, readable on any number of ranks, and by FSDP2.

    folder/step-00000100/            complete, or missing
        model.*                      every parameter in master precision, as boxes of the whole tensor
        elementwise.*, scalar.*      the optimizer's state, by parameter and key
        zero.json                    names and shapes, param groups, other data of the caller

A checkpoint is written under another name and renamed when every rank has finished, so an interrupted save
never touches the last good one. Only DCP's own index is unpickled, by a reader that knows only the index's
classes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .checkpoint_reader import SafeReader
from .checks import json_dict, whole_number
from .errors import CheckpointError, SettingsError
from .layout.rectangles import boxes
from .sharded_model import ShardedModel
from .state import unsharded_values

MANIFEST = "zero.json"
_MISTAKE_BYTES = 1024  # of an error message that ranks exchange; a path has a few hundred
_Mistake = SettingsError | CheckpointError


class Share:
    """This rank's part of one whole tensor: boxes of it, each a view of a shard."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.parts: dict[tuple[int, ...], Tensor] = {}

    def add(self, start: int, values: Tensor) -> None:
        """Adds neighbouring elements of the flattened tensor from element `start` on."""
        position = 0
        for offsets, sizes in boxes(tuple(self.shape), start, start + values.numel()):
            n = torch.Size(sizes).numel()
            self.parts[offsets] = values[position : position + n].view(sizes)
            position += n

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.shape

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, part in self.parts.items():
            yield ChunkStorageMetadata(torch.Size(offsets), part.shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self._chunks())

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]


def _model_shares(engine: ShardedModel) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for flat in engine.flats:
        layout = flat.layout
        for slot in layout.slots:
            shares[f"model.{slot.name}"] = Share(slot.shape, flat.master_dtype)
        for chunk, master in zip(layout.chunks, flat.masters, strict=True):
            for piece in layout.pieces(flat.rank):
                at = piece.shard_offset - chunk.shard_start
                if 0 <= at < chunk.shard_numel:
                    slot = layout.slots[piece.slot]
                    shares[f"model.{slot.name}"].add(piece.slot_offset, master[at : at + piece.numel])
    for name, value in unsharded_values(engine).items():
        share = Share(tuple(value.shape), value.dtype)
        share.add(0, value.detach().reshape(-1))
        shares[f"model.{name}"] = share
    return shares


def _optimizer_shares(engine: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for shard_slice in engine.sharded.slices:
        for key, value in optimizer.state.get(shard_slice.parameter, {}).items():
            scalar = (
                not isinstance(value, Tensor) or value.numel() == 1 != shard_slice.parameter.numel() or key == "step"
            )
            for piece in shard_slice.pieces:
                slot = shard_slice.flat.layout.slots[piece.slot]
                if scalar:
                    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                    share = Share((), tensor.dtype)
                    share.add(0, tensor.reshape(1))
                    shares[f"scalar.{slot.name}.{key}"] = share
                else:
                    name = f"elementwise.{slot.name}.{key}"
                    share = shares.setdefault(name, Share(slot.shape, value.dtype))
                    at = piece.shard_offset - shard_slice.start
                    share.add(piece.slot_offset, value[at : at + piece.numel])
    return shares


def _spread_scalars(engine: ShardedModel, optimizer: torch.optim.Optimizer, shares: Mapping[str, Share]) -> None:
    """Copies scalars read once for a parameter, such as its step, to every slice with a part of it."""
    for shard_slice in engine.sharded.slices:
        slot = shard_slice.flat.layout.slots[shard_slice.pieces[0].slot]
        for key, value in optimizer.state.get(shard_slice.parameter, {}).items():
            share = shares.get(f"scalar.{slot.name}.{key}")
            if share is not None:
                value.copy_(share.parts[()].reshape(value.shape))


def _shapes(shares: Mapping[str, Share]) -> dict[str, list[int]]:
    """Shapes of the model's tensors by name; they are equal in every stage."""
    return {name.removeprefix("model."): list(s.shape) for name, s in shares.items() if name.startswith("model.")}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    def keep(value: Any) -> bool:
        return (
            value is None
            or isinstance(value, (bool, int, float, str))
            or (isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value))
        )

    return {key: value for key, value in group.items() if key != "params" and keep(value)}


def save(engine: ShardedModel, folder: str | Path, step: int, extra: Mapping[str, Any] | None = None) -> Path:
    """Writes `folder/step-<eight digits>`; every rank calls it, with a folder that all ranks see.

    The model, and its optimizer if there is one, are saved.

    Args:
        extra: anything that JSON can hold, e.g. a loss scaler's or scheduler's state; rank 0's is saved.

    Raises:
        SettingsError: on every rank: a rank's step is no number, or JSON cannot hold its `extra`; nothing was written.
        CheckpointError: on every rank: the step exists already, or a rank could not write; earlier checkpoints are
            untouched.
    """
    engine.synchronize()
    final = Path(folder)
    mistake: _Mistake | None = None
    try:
        final /= _name(step)
        json_dict("extra", extra)
        if final.exists():
            raise CheckpointError(f"{final} exists already; choose another step or folder")
    except (SettingsError, CheckpointError) as error:
        mistake = error
    _raise_alike(mistake, engine)
    partial = final.with_suffix(".partial")
    first = dist.get_rank(engine.world) == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted save
    dist.barrier(group=engine.world)
    optimizer = engine.current_optimizer
    shares = _model_shares(engine)
    if optimizer is not None:
        shares |= _optimizer_shares(engine, optimizer)
    try:
        dcp.save(
            dict(shares),
            storage_writer=dcp.FileSystemWriter(partial),
            planner=_SavePlanner(),
            process_group=engine.world,
        )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{partial} could not be written (rank {rank}: {cause}); the last checkpoint is untouched"
        ) from error
    if first:
        try:
            groups = [] if optimizer is None else [_plain(group) for group in optimizer.param_groups]
            manifest = {"step": step, "shapes": _shapes(shares), "param_groups": groups, "extra": dict(extra or {})}
            (partial / MANIFEST).write_text(json.dumps(manifest))
            os.rename(partial, final)
        except OSError as error:
            mistake = CheckpointError(f"{partial} could not be written ({error}); the last checkpoint is untouched")
    _raise_alike(mistake, engine)
    return final


def _name(step: int) -> str:
    return f"step-{whole_number('step', step, 0):08d}"


def _raise_alike(mistake: _Mistake | None, engine: ShardedModel) -> None:
    """Raises the first rank's mistake on every rank; waits until all ranks have called."""
    kinds = SettingsError, CheckpointError
    encoded = b"" if mistake is None else bytes([1 + kinds.index(type(mistake))]) + str(mistake).encode()
    mine = torch.tensor([*encoded[:_MISTAKE_BYTES].ljust(_MISTAKE_BYTES, b"\0")], dtype=torch.uint8)
    mine = mine.to(engine.flats[0].device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(engine.world))]
    dist.all_gather(everyone, mine, group=engine.world)  # text, as objects would be unpickled
    for rank, found in enumerate(everyone):
        kind, *text = found.tolist()
        if kind:
            raise kinds[kind - 1](f"on rank {rank}, {bytes(text).rstrip(bytes(1)).decode(errors='replace')}")


def latest(folder: str | Path) -> Path:
    """The complete checkpoint with the highest step.

    Raises:
        CheckpointError: there is none.
    """
    found = sorted(p for p in Path(folder).glob("step-*") if (p / MANIFEST).is_file() and p.suffix != ".partial")
    if not found:
        raise CheckpointError(f"{folder} holds no complete checkpoint; save one or name another folder")
    return found[-1]


def load(engine: ShardedModel, folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """Resumes from a checkpoint, perhaps of another number of ranks; every rank calls it.

    Args:
        engine: an engine of the same model; its optimizer, if there is one, gets the saved state.
        step: None: the latest complete checkpoint's.

    Returns:
        {"step": the step, "extra": the `extra` of `save`}.

    Raises:
        SettingsError: `step` is no number of a step.
        CheckpointError: there is no such checkpoint, or it is of another model, and nothing was changed; or one of its
            files is damaged.
    """
    path = latest(folder) if step is None else Path(folder) / _name(step)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        shapes, param_groups = manifest["shapes"], manifest["param_groups"]
        result = {"step": manifest["step"], "extra": manifest["extra"]}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({error}); choose another step") from None
    except KeyError as error:
        raise CheckpointError(f"{path / MANIFEST} has no {error}: it is damaged; choose another step") from None
    engine.synchronize()
    reader = SafeReader(path)
    shares = _model_shares(engine)
    _compare(path, shapes, _shapes(shares))
    optimizer = engine.current_optimizer
    if optimizer is not None:
        _make_room(engine, optimizer, reader.read_metadata())
        shares |= _optimizer_shares(engine, optimizer)
        for group, saved in zip(optimizer.param_groups, param_groups, strict=False):
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()})
    _read(engine, reader, shares)
    if optimizer is not None:
        _spread_scalars(engine, optimizer, shares)
    return result


def load_weights(engine: ShardedModel, path: str | Path) -> None:
    """Loads the `model.*` of any DCP folder, e.g. one that FSDP2 saved as {"model": model.state_dict()}.

    Raises:
        CheckpointError: it is of another model; nothing was changed then.
    """
    reader = SafeReader(path)
    shares = _model_shares(engine)
    stored = {
        name.removeprefix("model."): list(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name in shares and isinstance(entry, TensorStorageMetadata)
    }
    _compare(Path(path), stored, _shapes(shares))
    engine.synchronize()
    _read(engine, reader, shares)


def _compare(path: Path, stored: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> None:
    for name in [*own, *stored]:
        there, here = stored.get(name), own.get(name)
        if there != here:
            if there is None or here is None:
                what = f"{name} is not {'there' if there is None else 'here'}"
            else:
                what = f"{name} has shape {there} there and {here} here"
            raise CheckpointError(f"{path} is of another model: {what}; build the model that was saved")


@torch.no_grad()
def _read(engine: ShardedModel, reader: SafeReader, shares: dict[str, Share]) -> None:
    wanted = {name: share for name, share in shares.items() if 0 not in share.shape}  # empty ones were not written
    try:
        dcp.load(wanted, storage_reader=reader, planner=_LoadPlanner(), process_group=engine.world)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        raise CheckpointError(
            f"{reader.path} could not be read (rank {rank}: {reason}); a file is damaged or missing, and what was "
            "read of the others is in the model now: load another checkpoint before training on"
        ) from error
    engine.after_load()


def _make_room(engine: ShardedModel, optimizer: torch.optim.Optimizer, metadata: Metadata) -> None:
    """Makes empty optimizer states of the saved kinds, so that a fresh optimizer can be filled."""
    kinds: dict[str, list[tuple[str, bool, torch.dtype]]] = {}
    names = {slot.name for flat in engine.flats for slot in flat.layout.slots}
    for fqn, entry in metadata.state_dict_metadata.items():
        kind, _, rest = fqn.partition(".")
        name, _, key = rest.rpartition(".")
        if kind in ("elementwise", "scalar") and name in names and isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            kinds.setdefault(name, []).append((key, kind == "scalar", dtype))
    for shard_slice in engine.sharded.slices:
        slot = shard_slice.flat.layout.slots[shard_slice.pieces[0].slot]
        state = optimizer.state[shard_slice.parameter]
        for key, scalar, dtype in kinds.get(slot.name, []):
            shape = () if scalar else shard_slice.parameter.shape
            state[key] = torch.zeros(shape, dtype=dtype, device="cpu" if scalar else shard_slice.parameter.device)
