"""`shard` turns a plain module into a ZeRO-sharded one, in place; the module is called as before.

engine = zero_runtime.shard(model, stage=3)
optimizer = engine.optimizer(torch.optim.AdamW, lr=3e-4)
model(tokens).backward()
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import checkpoint, collectives, phases
from .autotune.autotuner import Autotuner
from .autotune.choices import StepSettings, chunk_cap_bytes
from .checks import number, refusal
from .errors import LifecycleError, SettingsError
from .layout.discovery import Part, agree_on_model, assign, default_layers, report_mistake
from .layout.flat_buffer import Flat, Managed
from .layout.groups import hybrid_groups
from .optimizer.clipping import counted, global_norm
from .optimizer.foreign import is_marked, mark
from .optimizer.sharded import ShardedGradients, build_optimizer
from .parameter_check import ParameterCheck
from .settings import Settings
from .stages.backward import BackwardPass
from .stages.gradients import FlatGradients, PendingReductions, ReduceSettings, Schedule
from .stages.partitioned import PartitionedParameters
from .stages.replicated import ReplicatedParameters
from .stages.unit import State, Unit
from .state import assign_pieces, full_state_dict, load_full_state_dict

_FEWEST_BUCKETS = 6
_LEAST_BUCKET_BYTES = 1 << 20


class Engine:
    """A sharded model's runtime; made by `shard`."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        layers: Sequence[nn.Module],
        parts: Sequence[Part],
        world: dist.ProcessGroup,
        model_parallel_group: dist.ProcessGroup | None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.world = world
        self.model_parallel_group = model_parallel_group
        self._agree(parts)  # before making groups, in which all ranks take part, too
        self.group, self.replicate_group = hybrid_groups(world, settings.n_ranks_per_shard)
        beside = [] if model_parallel_group is None else [model_parallel_group]
        self.disjoint_groups = [self.group, *beside]  # these together have every element once
        self.collectives = collectives.for_group(self.group)
        self.pending = PendingReductions(settings.n_buckets_in_flight)
        self._positions = {id(p): position for position, p in enumerate(model.parameters())}
        if settings.stage < 3:
            everything = [managed for _, _, part in parts for managed in part]
            everything.sort(key=lambda managed: self._positions[id(managed.parameter)])
            parts = [("", model, everything)]
        self.units = [self._unit(module, managed) for _, module, managed in parts]
        self.flats: list[Flat] = [flat for unit in self.units for flat in unit.flats]
        self.gradients: list[FlatGradients] = [g for unit in self.units for g in unit.gradients]
        self._adopt_values()
        self._parameters: PartitionedParameters | ReplicatedParameters
        if settings.stage == 3:
            self._parameters = PartitionedParameters(
                model, self.units, settings.prefetch, settings.reshard_after_forward, world
            )
        else:
            self._parameters = ReplicatedParameters(
                model, self.units[0], layers, settings.overlap_post_step_gather
            )
        self._backward = BackwardPass(self.units, self.pending, self._parameters)
        self._parameters.backward = self._backward
        self._check: ParameterCheck | None = None
        if settings.debug:
            self._check = ParameterCheck(model, self.flats, [world, *beside], self._backward)
        self.sharded = ShardedGradients(self.gradients, self.pending, self.collectives, settings.find_unused_parameters)
        self.current_optimizer: torch.optim.Optimizer | None = None
        self._autotuner: Autotuner | None = None
        if settings.autotune:
            partitioned = self._parameters if isinstance(self._parameters, PartitionedParameters) else None
            self._autotuner = Autotuner(self.units, partitioned, settings, [world, *beside])
        self._guard_state_dict()
        if settings.precision is not None:
            model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)

    # construction

    def _guard_state_dict(self) -> None:
        """Refuses the module's own state dict if it would be wrong, as it ignores shards."""

        def before_load(*_: Any) -> None:
            raise LifecycleError(
                "model.load_state_dict() does not reach the shards; call engine.load_state_dict() instead"
            )

        def before_save(*_: Any) -> None:
            if self.settings.stage == 3:
                raise LifecycleError(
                    "model.state_dict() would hold parameters that are partitioned; call engine.state_dict()"
                )
            self.synchronize()

        self.model.register_load_state_dict_pre_hook(before_load)  # type: ignore[no-untyped-call]
        self.model.register_state_dict_pre_hook(before_save)  # type: ignore[no-untyped-call]

    def _agree(self, parts: Sequence[Part]) -> None:
        lines = [repr(sorted(asdict(self.settings).items()))]
        for name, _, part in parts:
            for managed in part:
                p = managed.parameter
                lines.append(f"{name} {managed.name} {tuple(p.shape)} {p.dtype} {p.requires_grad}")
        agree_on_model("\n".join(lines), self.world, parts[0][2][0].parameter.device)

    def _unit(self, module: nn.Module, managed: Sequence[Managed]) -> Unit:
        settings = self.settings

        def kind(m: Managed) -> tuple[str, bool]:
            return str(m.parameter.dtype), m.parameter.requires_grad

        flats, gradients = [], []
        for _, members in groupby(sorted(managed, key=kind), key=kind):
            part = list(members)
            compute = settings.compute_dtype(part[0].parameter.dtype)
            trainable = part[0].parameter.requires_grad
            if not trainable and settings.stage < 3:
                for m in part:  # frozen parameters have no states to shard
                    m.parameter.data = m.parameter.data.to(compute)
                continue
            n_bytes = sum(m.parameter.numel() for m in part) * compute.itemsize
            cap = settings.bucket_bytes or self.collectives.bucket_bytes
            if trainable:  # sums in a wider type than that of gathers move no more bytes, either
                cap = cap * compute.itemsize // max(compute.itemsize, settings.reduce_dtype(compute).itemsize)
            if settings.stage < 3:  # a small model still gets a few buckets, so that backward overlaps
                cap = min(cap, max(_LEAST_BUCKET_BYTES, n_bytes // _FEWEST_BUCKETS))
            chunk_cap = chunk_cap_bytes(cap) if settings.autotune else cap
            flat = Flat(part, self.group, self.collectives, compute, settings.stage == 3, chunk_cap)
            flat.coalesce(cap)
            flats.append(flat)
            if trainable:
                gradients.append(FlatGradients(flat, self.collectives, self.pending, self._reduce_settings(compute)))
        at_rest = State.SHARDED if settings.stage == 3 else State.WHOLE
        return Unit(module, flats, gradients, Schedule(gradients, self._positions), at_rest)

    def _reduce_settings(self, compute: torch.dtype) -> ReduceSettings:
        dtype = self.settings.reduce_dtype(compute)
        replicas = 1 if self.replicate_group is None else dist.get_world_size(self.replicate_group)
        divisor = dist.get_world_size(self.group) * replicas
        is_exact = dtype == compute and dtype != torch.float16 and divisor & (divisor - 1) == 0
        return ReduceSettings(
            dtype=dtype,
            keep_local=self.settings.stage == 1,
            all_reduce=self.settings.all_reduce_gradients,
            prescale=is_exact or dtype == torch.float16,
            n_replicas=replicas,
            replicate_group=self.replicate_group,
        )

    def _adopt_values(self) -> None:
        source = self.world if self.settings.broadcast_initial_values else None
        if source is not None:
            frozen = [p for p in self.model.parameters() if not p.requires_grad and self.settings.stage < 3]
            for value in [*self.model.buffers(), *frozen]:
                phases.announce(phases.OTHER)
                dist.broadcast(value.detach(), group=source, group_src=0)
        for flat in self.flats:
            flat.adopt(source)

    # training

    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """The model's inputs; floating-point ones are in the precision of its computation."""
        dtype = self.settings.compute_dtype(torch.float32)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tree_map(cast, (args, kwargs))

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]] | None = None,
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """A genuine `cls` whose state is sharded; `step()` consumes the gradients.

        Its parameters are this rank's shards; torch's learning rate schedulers take it.

        Args:
            cls: an optimizer that works element by element, such as `torch.optim.AdamW`.
            groups: torch's param groups over the model's parameters, e.g. to decay some weights only; None: all in one
                group.

        Raises:
            SettingsError: `cls` is no optimizer or needs whole tensors, the groups are no partition of the parameters,
                or an optimizer exists already.
        """
        if self.current_optimizer is not None:
            raise SettingsError("this model has an optimizer already; use param groups instead of a second one")
        optimizer = build_optimizer(
            cls, self.sharded, self.gradients, groups, self.settings.find_unused_parameters, defaults
        )
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        setattr(optimizer, "zero_grad", self.zero_grad)  # noqa: B010  (an instance attribute, on purpose)
        self.current_optimizer = optimizer
        return optimizer

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in [*args[1:], *kwargs.values()]):
            raise LifecycleError("step(closure) would compute gradients too late; call backward before step()")
        if isinstance(self._parameters, ReplicatedParameters):
            for flat in self.flats:
                if flat.managed and flat.managed[0].parameter.data_ptr() != flat.shown[0].data_ptr():
                    raise LifecycleError(
                        f"parameter {flat.managed[0].name} has new storage, as after model.double() or model.to(); "
                        "convert the model before shard()"
                    )
        self.finish_gradients()

    def finish_gradients(self) -> list[Tensor]:
        """Waits for all reductions; returns the gradients that the optimizer will see.

        Raises:
            LifecycleError: gradients were accumulated under `no_sync` and never reduced.
        """
        if any(gradients.has_unsent for gradients in self.gradients):
            raise LifecycleError(
                "gradients were accumulated on this rank only and not reduced; run the last backward before a "
                "step outside engine.no_sync(), or drop them by engine.zero_grad()"
            )
        return self.sharded.finish()

    def _after_step(self, *_: Any) -> None:
        self.sharded.clear()
        self._backward.n_steps += 1
        if self._autotuner is not None:
            self._autotuner.step_ended()
        for flat in self.flats:
            flat.publish_master()
        if isinstance(self._parameters, ReplicatedParameters):
            self._parameters.after_step()
        else:
            for unit in self.units:
                unit.free()

    @property
    def step_settings(self) -> StepSettings | None:
        """Bucket and prefetch depth in use with `autotune`; None without it."""
        return None if self._autotuner is None else self._autotuner.running

    @property
    def best_step_settings(self) -> StepSettings | None:
        """Bucket and prefetch depth that `autotune` found best; None: it is not done, or off."""
        return None if self._autotuner is None else self._autotuner.chosen

    def propose(self, bucket_bytes: int | None = None, prefetch: int | None = None) -> StepSettings:
        """Requests a bucket or a prefetch depth to try next, for example a suggestion of `zerotune advise --watch`.

        Any rank may ask at any time; all ranks try the same, and keep it only if steps get shorter. None keeps the
        present value, and `prefetch` counts layers gathered ahead. Returns the nearest existing values, which will be
        tried.

        Raises:
            LifecycleError: the model was sharded without `autotune`.
        """
        if self._autotuner is None:
            raise LifecycleError("nothing can be proposed without autotune; shard the model with autotune=True")
        return self._autotuner.propose(bucket_bytes, prefetch)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every gradient, reduced or not."""
        self.sharded.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate on this rank only; the next one outside reduces the sum."""
        self._backward.sync = False
        try:
            yield
        finally:
            self._backward.sync = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

        Like `torch.nn.utils.clip_grad_norm_` over the whole model, including all model-parallel ranks.

        Raises:
            SettingsError: `max_norm` is negative, `norm_type` is not positive, or one is no number.
        """
        number("max_norm", max_norm, "a number of at least 0", lambda norm: norm >= 0)
        number("norm_type", norm_type, "a number above 0, or float('inf')", lambda p: p > 0)
        gradients = self.finish_gradients()
        parts = counted(self.sharded.slices, self.model_parallel_group)
        total = global_norm(parts, norm_type, self.collectives, self.disjoint_groups, self.flats[0].device)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if gradients:  # a rank may own nothing of a small model
            torch._foreach_mul_(gradients, factor)
        return total

    # whole values

    def state_dict(self) -> dict[str, Tensor]:
        """A plain state dict in master precision, on the CPU, the same on every rank (a collective call)."""
        return full_state_dict(self)

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Loads a plain state dict; every rank passes the same one.

        Raises:
            SettingsError: it is no state dict; nothing was changed then.
            CheckpointError: it is of another model; nothing was changed then.
        """
        load_full_state_dict(self, values)

    @contextmanager
    def full_parameters(self, write: bool = False) -> Iterator[None]:
        """Gives whole parameters inside the block, to read, or with `write` to change equally on every rank."""
        self.synchronize()
        if self.settings.stage == 3:
            for unit in self.units:
                unit.ensure_whole(phases.OTHER)
        try:
            yield
        finally:
            if write:
                values = {m.name: m.parameter.detach().clone() for f in self.flats for m in f.managed}
                for flat in self.flats:
                    assign_pieces(flat, values)
                if self._check is not None:
                    self._check.accept_writes()
            if self.settings.stage == 3:
                for unit in self.units:
                    unit.free()

    @torch.no_grad()
    def after_load(self) -> None:
        """Publishes master copies that were written from outside."""
        for flat in self.flats:
            flat.publish_master()
            if not flat.partitioned:
                flat.start_gather(phases.OTHER)
                flat.finish_gather()

    def save_checkpoint(self, folder: str | Path, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes `folder/step-<eight digits>`; every rank calls it, with a folder that all ranks see.

        Arguments and errors are those of `zerotune.zero_runtime.checkpoint.save`.
        """
        return checkpoint.save(self, folder, step, extra)

    def load_checkpoint(self, folder: str | Path, step: int | None = None) -> dict[str, Any]:
        """See `zerotune.zero_runtime.checkpoint.load`."""
        return checkpoint.load(self, folder, step)

    def synchronize(self) -> None:
        """Waits until every parameter of stages 1 and 2 is up to date."""
        if isinstance(self._parameters, ReplicatedParameters):
            self._parameters.finish()


def shard(
    model: nn.Module,
    *,
    layers: Sequence[nn.Module] | None = None,
    group: dist.ProcessGroup | None = None,
    model_parallel_group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> Engine:
    """Shards `model` in place over `group` and returns its engine; call on every rank of the group.

    The model is called as before.

    Args:
        layers: modules that are gathered one by one in stage 3; by default the members of the model's module lists, or
            its children.
        group: ranks that train the model together; by default all.
        model_parallel_group: ranks that hold other parts of the same model, each part sharded over its own `group`;
            clipping, loss scaling and errors then span both. `parameter.tensor_model_parallel = True` marks parameters
            that are parts; others count as equal copies.
        settings: see `Settings`; the default is `stage=3`.

    Raises:
        SettingsError: on every rank, if settings, model and world do not fit, or ranks differ.
    """
    if not isinstance(model, nn.Module):
        raise refusal("model", model, "a torch.nn.Module")
    for name, given in (("group", group), ("model_parallel_group", model_parallel_group)):
        if not isinstance(given, dist.ProcessGroup | None):
            raise refusal(name, given, "a torch.distributed process group that this rank is in, or None")
    if not dist.is_initialized():
        raise SettingsError("there is no process group; call torch.distributed.init_process_group() first")
    world = dist.group.WORLD if group is None else group
    assert world is not None
    try:
        chosen = _checked(model, settings)
        named = default_layers(model) if layers is None else list(layers)
        parts = assign(model, named)
        if not parts:
            raise SettingsError(f"{type(model).__name__} has no parameters; there is nothing to shard")
        if chosen.stage < 3 and not any(parameter.requires_grad for parameter in model.parameters()):
            raise SettingsError(f"no parameter of {type(model).__name__} trains; stage=3 alone shards frozen ones")
    except SettingsError as error:
        report_mistake(error, model, world)
        raise
    if chosen.stage == 3 and dist.get_rank(world) == 0:
        collectives.warn_of_held_memory(dist.get_backend(world), torch.__version__)
    engine = Engine(model, chosen, named, parts, world, model_parallel_group)
    for flat in engine.flats:
        mark(flat.parameters)
    return engine


def _checked(model: nn.Module, settings: dict[str, Any]) -> Settings:
    if any(is_marked(parameter) for parameter in model.parameters()):
        raise SettingsError("this model, or a part of it, is sharded already; build a new one to shard it differently")
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            raise SettingsError(f"there is no setting {name!r}; choose from {', '.join(known)}")
    return Settings(**settings)
