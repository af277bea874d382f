"""Checkpoints: any number of ranks, interrupted saves, interchange with FSDP2 and plain state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zero_models import MODELS
from zero_world import World, group_of

from zerotune import zero_runtime
from zerotune.zero_runtime import checkpoint
from zerotune.zero_runtime.layout.rectangles import boxes


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_boxes_cover_a_run_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(int(torch.Size(shape).numel())).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(start, whole.numel()))
    found: list[int] = []
    cut = boxes(shape, start, end)
    for offsets, sizes in cut:
        box = whole
        for dim, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, offset, length)
        found += box.reshape(-1).tolist()
    assert found == list(range(start, end))
    assert len(cut) <= max(1, 2 * len(shape) - 1)


def step(engine: Any, optimizer: Any, batch: Any, n: int) -> None:
    """The same global batch on any number of ranks, so that losses agree: every rank computes all of it."""
    engine.model(*batch(0, n)).backward()
    optimizer.step()


def build(name: str, n_ranks: int, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    make, batch = MODELS[name]
    engine = zero_runtime.shard(make(), group=group_of(n_ranks), **settings)
    return engine, engine.optimizer(torch.optim.AdamW, lr=1e-2), batch


def save_after(name: str, n_ranks: int, settings: dict[str, Any], folder: str) -> dict[str, Tensor]:
    engine, optimizer, batch = build(name, n_ranks, settings)
    for n in range(2):
        step(engine, optimizer, batch, n)
    engine.save_checkpoint(folder, 2, extra={"seen": 17})
    step(engine, optimizer, batch, 2)
    values: dict[str, Tensor] = engine.state_dict()
    return values


def resume(name: str, n_ranks: int, settings: dict[str, Any], folder: str) -> dict[str, Tensor]:
    engine, optimizer, batch = build(name, n_ranks, settings)
    with torch.no_grad(), engine.full_parameters(write=True):
        for p in engine.model.parameters():
            if p.requires_grad:
                p.mul_(3)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    assert engine.load_checkpoint(folder) == {"step": 2, "extra": {"seen": 17}}
    step(engine, optimizer, batch, 2)
    values: dict[str, Tensor] = engine.state_dict()
    return values


@pytest.mark.parametrize(
    ("name", "saved_on", "resumed_on", "settings"),
    [
        ("gpt", 4, 2, {"stage": 3}),
        pytest.param("odd", 4, 1, {"stage": 3, "precision": "bf16"}, marks=pytest.mark.slow),
        ("odd", 1, 4, {"stage": 2}),
        pytest.param("gpt", 2, 4, {"stage": 1, "precision": "bf16", "bucket_bytes": 500}, marks=pytest.mark.slow),
        ("gpt", 2, 2, {"stage": 2, "bucket_bytes": 500}),  # a rank has parts of one parameter in several slices
        pytest.param("quantised", 4, 2, {"stage": 3}, marks=pytest.mark.slow),
        ("hollow", 2, 4, {"stage": 1, "precision": "bf16", "bucket_bytes": 500}),
    ],
)
def test_resume_on_another_number_of_ranks(
    world: World, tmp_path: Path, name: str, saved_on: int, resumed_on: int, settings: dict[str, Any]
) -> None:
    expected = world.run(saved_on, save_after, name, saved_on, settings, str(tmp_path))[0]
    for found in world.run(resumed_on, resume, name, resumed_on, settings, str(tmp_path)):
        for key, value in expected.items():
            # all ranks add the same gradient n times and divide by n: exact for powers of two
            assert torch.equal(found[key], value), key


class PartlyFrozen(torch.nn.Module):
    """A frozen layer used under two names, one that trains, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)
        self.again = self.body
        self.body.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.again(torch.tanh(self.body(x)))) * self.scale).square().mean()


def save_partly_frozen(folder: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine, optimizer = partly_frozen(4, settings)
    engine.save_checkpoint(folder, 2)
    return train_on(engine, optimizer)


def resume_partly_frozen(folder: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine, optimizer = partly_frozen(2, settings)
    with torch.no_grad(), engine.full_parameters(write=True):
        for p in engine.model.parameters():
            p.add_(1)
    engine.model.scale.add_(1)
    engine.load_checkpoint(folder)
    return train_on(engine, optimizer)


def partly_frozen(n_ranks: int, settings: dict[str, Any]) -> tuple[Any, Any]:
    engine = zero_runtime.shard(PartlyFrozen(), group=group_of(n_ranks), **settings)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-2)
    train_on(engine, optimizer)
    return engine, optimizer


def train_on(engine: Any, optimizer: Any) -> dict[str, Tensor]:
    engine.model(torch.arange(10.0).view(2, 5) / 10).backward()
    optimizer.step()
    values: dict[str, Tensor] = engine.state_dict()
    return values


@pytest.mark.parametrize(("saved_in", "resumed_in"), [(3, 1), (1, 3), (2, 3)])
def test_frozen_parameters_and_buffers_move_between_stages(
    world: World, tmp_path: Path, saved_in: int, resumed_in: int
) -> None:
    expected = world.run(4, save_partly_frozen, str(tmp_path), {"stage": saved_in})[0]
    found = world.run(2, resume_partly_frozen, str(tmp_path), {"stage": resumed_in})[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def load_damaged(folder: str) -> str:
    engine, _, _ = build("gpt", 2, {"stage": 3})
    try:
        engine.load_checkpoint(folder)
    except zero_runtime.CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_file_is_one_sentence_on_every_rank(world: World, tmp_path: Path, damage: str) -> None:
    world.run(2, save_after, "gpt", 2, {"stage": 3}, str(tmp_path))
    shard = max(tmp_path.glob("step-*/*.distcp"))
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-500])
    else:
        shard.unlink()
    for message in world.run(2, load_damaged, str(tmp_path)):
        assert message != "no error"
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize("manifest", ["[]", "{", '{"shapes": {}, "param_groups": [], "step": 1}'])
def test_a_damaged_manifest_is_one_sentence_on_every_rank(world: World, tmp_path: Path, manifest: str) -> None:
    world.run(2, save_after, "gpt", 2, {"stage": 3}, str(tmp_path))
    (path,) = tmp_path.glob("step-*/zero.json")
    path.write_text(manifest)
    for message in world.run(2, load_damaged, str(tmp_path)):
        assert message != "no error"
        assert len(message.splitlines()) == 1


def interrupted(folder: str) -> str:
    engine, optimizer, batch = build("gpt", 2, {"stage": 3})
    step(engine, optimizer, batch, 0)
    engine.save_checkpoint(folder, 1)
    before = engine.state_dict()
    original = dcp.FileSystemWriter.write_data

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the disk is full")
        return original(self, *args, **kwargs)

    dcp.FileSystemWriter.write_data = fail
    try:
        step(engine, optimizer, batch, 1)
        engine.save_checkpoint(folder, 2)
        message = "no error"
    except zero_runtime.CheckpointError as error:
        message = str(error)
    finally:
        dcp.FileSystemWriter.write_data = original
    assert engine.load_checkpoint(folder)["step"] == 1
    assert all(torch.equal(v, before[k]) for k, v in engine.state_dict().items())
    engine.save_checkpoint(folder, 2)
    assert engine.load_checkpoint(folder)["step"] == 2
    return message


def test_an_interrupted_save_leaves_the_last_good_one(world: World, tmp_path: Path) -> None:
    for message in world.run(2, interrupted, str(tmp_path)):
        assert message != "no error"


def saved_wrongly(folder: str, wrong_ranks: tuple[int, ...]) -> list[str]:
    """What each of some wrong saves, and a right one after them, says."""
    engine, _, _ = build("gpt", 2, {"stage": 3})
    messages = []
    for wrong in (
        {"extra": {"seen": 17, "rng": torch.zeros(2)}},
        {"extra": ["no dict"]},
        {"step": -1},
        {"step": "x"},
        {"step": 1.0},
        {"step": True},
        {},
    ):
        given: dict[str, Any] = {"step": 1, **(wrong if torch.distributed.get_rank() in wrong_ranks else {})}
        try:
            engine.save_checkpoint(folder, **given)
            messages.append("")
        except zero_runtime.SettingsError as error:
            messages.append(str(error))
        if messages[-1]:
            assert list(Path(folder).iterdir()) == []
        dist.barrier(group=group_of(2))
    return messages


@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)])
def test_unsavable_values_are_refused_on_all_ranks_before_writing(
    world: World, tmp_path: Path, wrong_ranks: tuple[int, ...]
) -> None:
    messages, others = world.run(2, saved_wrongly, str(tmp_path), wrong_ranks)
    assert messages == others
    for message, value in zip(messages, ["extra['rng']", "'no dict'", "-1;", "'x';", "1.0;", "True;"], strict=False):
        assert value in message
    assert messages[-1] == ""
    assert checkpoint.latest(tmp_path).name == "step-00000001"


@pytest.mark.parametrize("step", [-1, "x", 1.0])
def test_a_wrong_step_number_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(zero_runtime.SettingsError, match=str(step)):
        checkpoint.load(None, tmp_path, step)  # type: ignore[arg-type]  # refused before the engine is looked at


def of_another_model(folder: str) -> list[str]:
    messages = []
    for name in ("odd", "gpt"):
        engine, _, _ = build(name, 2, {"stage": 3})
        for action in (
            lambda e=engine: e.save_checkpoint(folder, 1),
            lambda e=engine: e.load_checkpoint(folder),
        ):
            try:
                action()
                messages.append("")
            except zero_runtime.CheckpointError as error:
                messages.append(str(error))
    return messages


def test_a_checkpoint_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    for messages in world.run(2, of_another_model, str(tmp_path)):
        assert messages[:2] == ["", ""]
        assert "" not in messages[2:4]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zero_runtime.CheckpointError, match=str(tmp_path)):
        checkpoint.latest(tmp_path)


def fsdp2_reads_ours_and_we_read_fsdp2s(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    engine, optimizer, batch = build("gpt", 4, {"stage": 3})
    step(engine, optimizer, batch, 0)
    ours = engine.save_checkpoint(folder, 1)
    expected = engine.state_dict()
    make, _ = MODELS["gpt"]
    mesh = init_device_mesh("cpu", (4,))
    theirs = make()
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    state = {"model": {k: v for k, v in theirs.state_dict().items() if k != "head.weight"}}
    dcp.load(state, checkpoint_id=ours)
    for key, value in state["model"].items():
        assert torch.equal(value.full_tensor(), expected[key]), key
    dcp.save(state, checkpoint_id=f"{folder}/fsdp2")
    other, _, _ = build("gpt", 4, {"stage": 2})
    with torch.no_grad(), other.full_parameters(write=True):
        for p in other.model.parameters():
            p.zero_()
    checkpoint.load_weights(other, f"{folder}/fsdp2")
    for key, value in other.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_interchange_with_fsdp2(world: World, tmp_path: Path) -> None:
    world.run(4, fsdp2_reads_ours_and_we_read_fsdp2s, str(tmp_path))


def plain_round_trip() -> None:
    engine, optimizer, batch = build("gpt", 2, {"stage": 3})
    step(engine, optimizer, batch, 0)
    values = engine.state_dict()
    make, _ = MODELS["gpt"]
    plain = make()
    plain.load_state_dict(values)  # all names, the tied one too
    other, _, _ = build("gpt", 2, {"stage": 1})
    other.load_state_dict(plain.state_dict())
    assert all(torch.equal(v, values[k]) for k, v in other.state_dict().items())
    assert torch.equal(other.model(*batch(0, 5)), plain(*batch(0, 5)))


def test_interchange_with_a_plain_state_dict(world: World) -> None:
    world.run(2, plain_round_trip)
