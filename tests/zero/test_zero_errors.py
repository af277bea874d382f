"""Mistakes: one clear sentence on every rank, and no hang."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zero_models import gpt_batch, make_gpt, make_odd
from zero_world import World, group_of

from zerotune import zero_runtime
from zerotune.zero_runtime.stages.order_changes import N_BEHIND, OrderChanges


def message_of(scene: Callable[[], None]) -> str:
    try:
        scene()
    except zero_runtime.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrong_stage() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2), stage=4)


def unknown_setting() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2), stages=3)


def wrong_precision() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2), precision="int3")


def nothing_to_shard() -> None:
    zero_runtime.shard(nn.ReLU(), group=group_of(2))


def nothing_trains() -> None:
    zero_runtime.shard(make_gpt().requires_grad_(False), group=group_of(2), stage=2)


def foreign_layer() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2), layers=[nn.Linear(2, 2)])


def different_models() -> None:
    rank = torch.distributed.get_rank()
    zero_runtime.shard(make_gpt() if rank == 0 else make_odd(), group=group_of(2))


def different_settings() -> None:
    rank = torch.distributed.get_rank()
    zero_runtime.shard(make_gpt(), group=group_of(2), bucket_bytes=1000 + rank)


def different_frozen() -> None:
    model = make_gpt()
    next(model.parameters()).requires_grad_(torch.distributed.get_rank() == 0)
    zero_runtime.shard(model, group=group_of(2))


def forward_of_a_part() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2), stage=3)
    model.blocks[0].up(torch.zeros(2, 12))


def forward_without_call() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2), stage=3)
    model.forward(*gpt_batch(0, 0))


class ReadsAnother(nn.Module):
    """The root reads what belongs to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layers[1](self.layers[0](x)), self.layers[0].weight)


def read_of_another_layer(compiled: bool) -> None:
    model = ReadsAnother()
    zero_runtime.shard(model, group=group_of(2), stage=3)
    if compiled:
        model.compile(backend="eager")
    model(torch.ones(2, 4))


def read_outside() -> None:
    model = ReadsAnother()
    zero_runtime.shard(model, group=group_of(2), stage=3)
    torch.stack([p.square().sum() for p in model.parameters()]).sum()


def tampered(stage: int, what: str, on: tuple[int, ...]) -> None:
    """Something is done on some ranks only; every rank goes on training, unaware."""
    model = make_gpt()
    engine = zero_runtime.shard(model, group=group_of(2), stage=stage, debug=True)
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    for n in range(2):
        if n == 1 and torch.distributed.get_rank() in on:
            if what == "replaced":
                model.blocks[1].up.weight = nn.Parameter(torch.zeros(1))  # a forward with it would fail
            elif what == "new storage":
                model.blocks[1].up.weight.data = torch.zeros(48, 12)
            else:
                with torch.no_grad():
                    model.norm.weight.zero_()
        model(*gpt_batch(0, n)).backward()
        optimizer.step()


def steps_with_gradients_of_this_rank_only() -> None:
    engine = zero_runtime.shard(make_gpt(), group=group_of(2), stage=2)
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    with engine.no_sync():
        engine.model(*gpt_batch(0, 0)).backward()
    optimizer.step()


def late_backward(stage: int) -> None:
    engine = zero_runtime.shard(make_gpt(), group=group_of(2), stage=stage)
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    early = engine.model(*gpt_batch(0, 0))
    engine.model(*gpt_batch(0, 1)).backward()
    optimizer.step()
    early.backward()


def two_optimizers() -> None:
    engine = zero_runtime.shard(make_gpt(), group=group_of(2))
    engine.optimizer(torch.optim.Adam)
    engine.optimizer(torch.optim.Adam)


def optimizer_beside_the_engine(stage: int) -> None:
    model = make_gpt()
    beside = torch.optim.AdamW(model.parameters())
    zero_runtime.shard(model, group=group_of(2), stage=stage)
    model(*gpt_batch(0, 0)).backward()
    beside.step()


def whole_tensor_optimizer() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2)).optimizer(torch.optim.Adafactor)


def incomplete_groups() -> None:
    model = make_gpt()
    engine = zero_runtime.shard(model, group=group_of(2))
    engine.optimizer(torch.optim.Adam, groups=[{"params": [model.norm.weight]}])


def closure() -> None:
    engine = zero_runtime.shard(make_gpt(), group=group_of(2))
    engine.optimizer(torch.optim.SGD).step(lambda: 0.0)


def converted_after_shard(stage: int) -> None:
    model = make_gpt()
    engine = zero_runtime.shard(model, group=group_of(2), stage=stage)
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    model.double()
    optimizer.step()


def load_other_names() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2)).load_state_dict(make_odd().state_dict())


def load_other_shapes() -> None:
    values = make_gpt().state_dict()
    values["norm.weight"] = torch.zeros(3)
    zero_runtime.shard(make_gpt(), group=group_of(2)).load_state_dict(values)


def module_load(stage: int) -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2), stage=stage)
    model.load_state_dict(make_gpt().state_dict())


def module_save() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2), stage=3)
    model.state_dict()


def setting(name: str, value: object) -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2), **{name: value})


def no_group() -> None:
    zero_runtime.shard(make_gpt(), group="x")


def no_model() -> None:
    zero_runtime.shard("x", group=group_of(2))


def optimizer(cls: object, groups: object = None) -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2)).optimizer(cls, groups)


def groups_of_parameters() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2)).optimizer(torch.optim.AdamW, model.parameters())


def load_what_is_none(values: object) -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2)).load_state_dict(values)


def clip(max_norm: object, norm_type: object = 2.0) -> None:
    engine = zero_runtime.shard(make_gpt(), group=group_of(2), stage=2)
    engine.optimizer(torch.optim.SGD)
    engine.model(*gpt_batch(0, 0)).backward()
    engine.clip_grad_norm_(max_norm, norm_type)


def sharded_part() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2))
    zero_runtime.shard(model.blocks[0], group=group_of(2))


def sharded_within() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2))
    zero_runtime.shard(nn.Sequential(model, nn.Linear(2, 2)), group=group_of(2))


def odd_world() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(3), n_ranks_per_shard=2)


def sharded_twice() -> None:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2))
    zero_runtime.shard(model, group=group_of(2))


SCENES: list[tuple[Callable[..., None], tuple[object, ...], str, str]] = [
    (wrong_stage, (), "SettingsError", "stage is 4;"),
    (unknown_setting, (), "SettingsError", "stages"),
    (wrong_precision, (), "SettingsError", "'int3'"),
    (nothing_to_shard, (), "SettingsError", "ReLU"),
    (nothing_trains, (), "SettingsError", "GPT"),
    (foreign_layer, (), "SettingsError", "Linear"),
    (different_models, (), "SettingsError", "[1]"),
    (different_settings, (), "SettingsError", "[1]"),
    (different_frozen, (), "SettingsError", "[1]"),
    (forward_of_a_part, (), "LifecycleError", "blocks.0.up"),
    (forward_without_call, (), "LifecycleError", "tokens.weight"),
    (read_of_another_layer, (False,), "LifecycleError", "layers.0.weight"),
    (read_of_another_layer, (True,), "LifecycleError", "layers.0.weight"),
    (read_outside, (), "LifecycleError", "layers.0.weight"),
    (tampered, (1, "replaced", (1,)), "LifecycleError", "blocks.1.up.weight"),
    (tampered, (2, "new storage", (0,)), "LifecycleError", "blocks.1.up.weight"),
    (tampered, (3, "new storage", (0, 1)), "LifecycleError", "blocks.1.up.weight"),
    (tampered, (1, "written", (1,)), "LifecycleError", "norm.weight"),
    (steps_with_gradients_of_this_rank_only, (), "LifecycleError", ""),
    (late_backward, (1,), "LifecycleError", ""),
    (late_backward, (3,), "LifecycleError", ""),
    (two_optimizers, (), "SettingsError", ""),
    (optimizer_beside_the_engine, (1,), "LifecycleError", "AdamW"),
    (optimizer_beside_the_engine, (3,), "LifecycleError", "AdamW"),
    (whole_tensor_optimizer, (), "SettingsError", "torch.optim.Adafactor"),
    (incomplete_groups, (), "SettingsError", "tokens.weight"),
    (closure, (), "LifecycleError", "step(closure)"),
    *[(converted_after_shard, (stage,), "LifecycleError", "has new storage") for stage in (1, 2)],
    (load_other_names, (), "CheckpointError", ""),
    (load_other_shapes, (), "CheckpointError", "norm.weight"),
    (module_load, (1,), "LifecycleError", "model.load_state_dict"),
    (module_load, (3,), "LifecycleError", "model.load_state_dict"),
    (module_save, (), "LifecycleError", "model.state_dict"),
    (odd_world, (), "SettingsError", "3 "),
    (sharded_twice, (), "SettingsError", ""),
    (sharded_part, (), "SettingsError", ""),
    (sharded_within, (), "SettingsError", ""),
    *[
        (setting, (name, value), "SettingsError", f"{name} is {value!r};")
        for name, value in [
            ("stage", 3.0),
            ("precision", ["bf16"]),
            ("bucket_bytes", "32MB"),
            ("bucket_bytes", 0),
            ("prefetch", 1.5),
            ("n_buckets_in_flight", None),
            ("n_ranks_per_shard", 1.0),
            ("autotune", "yes"),
            ("reshard_after_forward", 1),
        ]
    ],
    (no_group, (), "SettingsError", "'x';"),
    (no_model, (), "SettingsError", "'x';"),
    (optimizer, ("adam",), "SettingsError", "'adam';"),
    (optimizer, (torch.optim.AdamW, [{"lr": 1.0}]), "SettingsError", "{'lr': 1.0};"),
    (groups_of_parameters, (), "SettingsError", "Parameter"),
    (load_what_is_none, (None,), "SettingsError", "None;"),
    (load_what_is_none, ({"norm.weight": "x"},), "SettingsError", "'x';"),
    *[(clip, (value,), "SettingsError", f"{value!r};") for value in (math.nan, "1")],
    *[(clip, (1.0, value), "SettingsError", f"{value!r};") for value in (-2.0, "inf")],
]


def compiled_step() -> None:
    zero_runtime.shard(make_gpt(), group=group_of(2), stage=2)
    elsewhere = nn.Linear(2, 2)
    elsewhere(torch.ones(2)).sum().backward()
    torch.compile(torch.optim.SGD(elsewhere.parameters()).step, backend="eager")()


def test_a_step_may_be_compiled(world: World) -> None:
    world.run(2, compiled_step)


def play(index: int) -> str:
    scene, args, *_ = SCENES[index]
    return message_of(lambda: scene(*args))


@pytest.mark.parametrize("index", range(len(SCENES)), ids=[f"{s.__name__}{a}" for s, a, *_ in SCENES])
def test_mistake(world: World, index: int) -> None:
    scene, _, error, named = SCENES[index]
    messages = world.run(3 if scene is odd_world else 2, play, index)
    for message in messages:
        assert message.startswith(f"{error}: ")
        assert named in message
        assert "; " in message  # names the remedy
        assert "\n" not in message
    assert len(set(messages)) == 1


def alone(settings: dict[str, object]) -> str:
    """Rank 1 alone asks for `settings`."""
    mine = settings if torch.distributed.get_rank() == 1 else {}
    return message_of(lambda: zero_runtime.shard(make_gpt(), group=group_of(2), **mine))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stage": 7}, "stage is 7;"),
        ({"stages": 3}, "stages"),
        ({"layers": [nn.Linear(2, 2)]}, "Linear"),
        ({"n_ranks_per_shard": 1}, "ranks [1]"),
    ],
)
def test_a_mistake_of_one_rank_leaves_nobody_waiting(world: World, settings: dict[str, object], named: str) -> None:
    other, mine = world.run(2, alone, settings)
    assert mine.startswith("SettingsError: ")
    assert named in mine
    assert other.startswith("SettingsError: ranks [1] ")


def heard_behind() -> list[bool]:
    """What each pass's end says on a device that runs behind; rank 1 sees a new order before the second."""
    changes = OrderChanges(group_of(2), torch.device("cpu"), runs_behind=True)
    heard = []
    for n_pass in range(3 * N_BEHIND):
        if n_pass == 1 and torch.distributed.get_rank() == 1:
            changes.seen_here = True
        changes.open()
        heard.append(changes.close())
        if heard[-1]:
            changes.seen_here = False
    return heard


def test_a_device_that_runs_behind_is_not_waited_for_and_all_ranks_hear_it_in_the_same_pass(world: World) -> None:
    once = [n_pass == 1 + N_BEHIND for n_pass in range(3 * N_BEHIND)]
    assert world.run(2, heard_behind) == [once, once]


def told_of_a_placeholder() -> tuple[object, ...]:
    model = make_gpt()
    zero_runtime.shard(model, group=group_of(2), stage=3)
    weight = model.blocks[0].up.weight
    weight.requires_grad_()
    told = tuple(weight.shape), weight.dtype, weight.numel(), weight.grad, weight.untyped_storage().nbytes()
    return *told, isinstance(weight, nn.Parameter), f"{weight}" != ""


def test_a_partitioned_parameter_tells_what_is_no_value_and_takes_four_bytes(world: World) -> None:
    assert world.run(2, told_of_a_placeholder) == [((48, 12), torch.float32, 576, None, 4, True, True)] * 2
