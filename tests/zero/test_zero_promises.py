"""Communication, order and memory, as the paper counts them."""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_models import TINY, gpt_batch, make_gpt
from zero_world import World, group_of

from zerotune import zero_runtime
from zerotune.tuner.advice import zero_formulas
from zerotune.zero_runtime import collectives, phases
from zerotune.zero_runtime.examples.gpt import GPT

Event = tuple[str, str, int]  # phase, kind, elements of the whole buffer


class Recorder:
    """Stands in for the collectives and writes down every one of a model's, and how many gathers were waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.n_waited = 0
        self._phase = ""

    def __enter__(self) -> Recorder:
        phases.set_listener(self._hear)
        self._original = collectives.for_group

        def for_group(group: dist.ProcessGroup) -> collectives.Collectives:
            real = self._original(group)

            def gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> collectives.Work:
                self.events.append((self._phase, "all_gather", whole.numel()))
                return Noted(real.all_gather(whole, shard, group), self)

            def scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> collectives.Work:
                self.events.append((self._phase, "reduce_scatter", whole.numel()))
                return real.reduce_scatter(shard, whole, group)

            def reduce(whole: Tensor, group: dist.ProcessGroup) -> collectives.Work:
                self.events.append((self._phase, "all_reduce", whole.numel()))
                return real.all_reduce(whole, group)

            return dataclasses.replace(real, all_gather=gather, reduce_scatter=scatter, all_reduce=reduce)

        collectives.for_group = for_group
        return self

    def _hear(self, phase: str) -> None:
        self._phase = phase

    def __exit__(self, *_: object) -> None:
        phases.set_listener(None)
        collectives.for_group = self._original


class Noted:
    """A gather that says when it is waited for."""

    def __init__(self, work: collectives.Work, recorder: Recorder) -> None:
        self._work, self._recorder = work, recorder

    def wait(self) -> None:
        self._recorder.n_waited += 1
        self._work.wait()


def record_steps(settings: dict[str, Any], checkpointed: bool = False) -> tuple[list[Event], int, int]:
    """Events of the third step, parameters, padding."""
    group = group_of(2)
    model = make_gpt()
    if checkpointed:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    with Recorder() as recorder:
        engine = zero_runtime.shard(model, group=group, **settings)
        optimizer = engine.optimizer(torch.optim.AdamW)
        for n in range(3):
            recorder.events.clear()
            model(*gpt_batch(dist.get_rank(group), n)).backward()
            optimizer.step()
        engine.synchronize()
        layouts = [flat.layout for flat in engine.flats]
        return recorder.events, sum(x.n_parameters for x in layouts), sum(x.padding for x in layouts)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_move_2_psi(world: World, stage: int) -> None:
    for events, psi, padding in world.run(2, record_steps, {"stage": stage, "bucket_bytes": 4096}):
        assert {(phase, kind) for phase, kind, _ in events} == {
            ("gradient_scatter", "reduce_scatter"),
            ("post_step_gather", "all_gather"),
        }
        assert sum(n for _, _, n in events) == zero_formulas.sent_elements(psi, stage) + 2 * padding


def waited_before_layers(stage: int) -> tuple[list[int], int]:
    """Of the gathers after a step, how many each layer has waited for when it begins; all of them."""
    with Recorder() as recorder:
        model = GPT(dataclasses.replace(TINY, n_layers=6))
        optimizer = zero_runtime.shard(model, group=group_of(2), stage=stage, bucket_bytes=2048).optimizer(
            torch.optim.SGD, lr=0.1
        )
        model(*gpt_batch(0, 0)).backward()
        recorder.events.clear()
        optimizer.step()
        recorder.n_waited, found = 0, []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: found.append(recorder.n_waited))
        model(*gpt_batch(0, 1))
        return found, len(recorder.events)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_waits_for_its_own_parameters_alone(world: World, stage: int) -> None:
    for waited, n_gathers in world.run(2, waited_before_layers, stage):
        assert waited == sorted(set(waited))  # each for more than the one before
        assert waited[0] < n_gathers / 3
        assert waited[-1] <= n_gathers


def test_stage_3_gathers_2n_minus_1_layers_and_moves_3_psi_less_what_it_keeps(world: World) -> None:
    n_layers = TINY.n_layers
    for events, psi, padding in world.run(2, record_steps, {"stage": 3}):
        gathers = [n for _, kind, n in events if kind == "all_gather"]
        assert len(gathers) == 2 * n_layers  # the root's, and 2n − 1
        root, layer = gathers[0], gathers[1]
        assert root + n_layers * layer == psi + padding
        assert sum(n for _, _, n in events) == 3 * (psi + padding) - root - layer


def test_the_variant_with_all_reduce_and_a_gather(world: World) -> None:
    for events, psi, padding in world.run(2, record_steps, {"stage": 1, "all_reduce_gradients": True}):
        assert [(kind, n) for _, kind, n in events] == [
            ("all_reduce", psi + padding),
            ("all_gather", psi + padding),
        ]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_order_of_gathers_and_scatters(world: World, prefetch: int) -> None:
    """Layers 0 1 2 below the root r: what is asked for when, with `prefetch` layers ahead."""
    for events, _, _ in world.run(2, record_steps, {"stage": 3, "prefetch": prefetch}):
        order = [phase for phase, _, _ in events]
        forward = order[:4]
        assert forward == ["forward_gather"] * 4
        backward = order[4:]
        gather, scatter = "backward_gather", "gradient_scatter"
        # layer 2 stayed; its scatter comes before the next gather only if nothing was asked for ahead
        assert (
            backward
            == {
                0: [scatter, gather, scatter, gather, scatter, scatter],
                1: [gather, scatter, gather, scatter, scatter, scatter],
                2: [gather, gather, scatter, scatter, scatter, scatter],
            }[prefetch]
        )


def test_activation_checkpointing_gathers_no_layer_twice(world: World) -> None:
    plain = world.run(2, record_steps, {"stage": 3}, False)
    again = world.run(2, record_steps, {"stage": 3}, True)
    assert [events for events, _, _ in plain] == [events for events, _, _ in again]


def hybrid_steps() -> list[Event]:
    with Recorder() as recorder:
        model = make_gpt()
        engine = zero_runtime.shard(model, stage=3, n_ranks_per_shard=2)
        optimizer = engine.optimizer(torch.optim.AdamW)
        for n in range(2):
            recorder.events.clear()
            model(*gpt_batch(0, n)).backward()
            optimizer.step()
        return recorder.events


def test_hybrid_sharding_reduces_shards_across(world: World) -> None:
    for events in world.run(4, hybrid_steps):
        scattered = [n for _, kind, n in events if kind == "reduce_scatter"]
        assert sorted(n // 2 for n in scattered) == sorted(n for _, kind, n in events if kind == "all_reduce")


def tensor_bytes(device: str = "cpu") -> int:
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if isinstance(value, Tensor) and value.device.type == device and not value.is_meta:
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def state_bytes(settings: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of tensors alive between backward and step, parameters, padding."""
    gc.freeze()  # what was there before is neither counted nor searched
    try:
        model = make_gpt()
        engine = zero_runtime.shard(model, group=group_of(4), **settings)
        optimizer = engine.optimizer(torch.optim.AdamW)
        for n in range(2):
            model(*gpt_batch(0, n)).backward()
            if n == 0:
                optimizer.step()
        engine.pending.complete_all()
        found = tensor_bytes()
        for _ in range(5):  # a thread of gloo's holds what it sent for a moment after it is done
            time.sleep(0.02)
            found = min(found, tensor_bytes())
    finally:
        gc.unfreeze()
    layouts = [flat.layout for flat in engine.flats]
    return found, sum(x.n_parameters for x in layouts), sum(x.padding for x in layouts)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_model_states_take_what_the_formula_says(world: World, stage: int, precision: str) -> None:
    for found, psi, padding in world.run(4, state_bytes, {"stage": stage, "precision": precision}):
        states = zero_formulas.model_states(psi + padding, stage, 4, precision=precision)
        expected = states.total_bytes
        if stage == 3 and precision == "bf16":  # the master copy is rounded where it is gathered
            expected -= states.parameters_bytes
        slack = 64 * TINY.n_layers + 256  # Adam's step counters, NaN placeholders
        assert abs(found - expected) <= slack, (found, expected)


def peak_temporary_bytes(n_layers: int, stage: int) -> int:
    """Most bytes at one time in buckets that are being filled or sent, and in what the sums are received into."""
    group = group_of(2)
    model = GPT(dataclasses.replace(TINY, n_layers=n_layers))
    engine = zero_runtime.shard(model, group=group, stage=stage, bucket_bytes=2048)
    engine.optimizer(torch.optim.SGD, lr=0.1)
    peak = 0

    def look(_: Tensor) -> None:
        nonlocal peak
        buckets = [bucket for gradients in engine.gradients for bucket in gradients.buckets if bucket is not None]
        for reduction in engine.pending.queue:
            for one in reduction.sums:
                buckets += [one.source] if one.first else [one.source, one.reduced]
        alive = {bucket.data_ptr(): bucket.untyped_storage().nbytes() for bucket in buckets}
        peak = max(peak, sum(alive.values()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    for n in range(2):  # the second pass adds to the first's sums
        model(*gpt_batch(0, n)).backward()
    return peak


def sent(stage: int, n_in_flight: int) -> tuple[int, int]:
    """Most bytes of a reduction, and most reductions under way at a time."""
    group = group_of(2)
    settings = {"stage": stage, "precision": "bf16", "reduce_precision": "fp32", "n_buckets_in_flight": n_in_flight}
    most_bytes = n_under_way = most_under_way = 0
    real = collectives.for_group(group)

    class Counted:
        def __init__(self, work: collectives.Work) -> None:
            self._work = work

        def wait(self) -> None:
            nonlocal n_under_way
            n_under_way -= 1
            self._work.wait()

    def scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> collectives.Work:
        nonlocal most_bytes, n_under_way, most_under_way
        most_bytes = max(most_bytes, whole.nbytes)
        n_under_way += 1
        most_under_way = max(most_under_way, n_under_way)
        return Counted(real.reduce_scatter(shard, whole, group))

    original = collectives.for_group
    collectives.for_group = lambda _: dataclasses.replace(real, reduce_scatter=scatter)
    try:
        model = make_gpt()
        zero_runtime.shard(model, group=group, bucket_bytes=2048, **settings)
        model(*gpt_batch(0, 0)).backward()
    finally:
        collectives.for_group = original
    return most_bytes, most_under_way


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("n_in_flight", [1, 2])
def test_no_more_is_under_way_than_was_asked_for(world: World, stage: int, n_in_flight: int) -> None:
    for most_bytes, most_under_way in world.run(2, sent, stage, n_in_flight):
        assert 1024 <= most_bytes <= 2048, "sums are wider than parameters"
        assert most_under_way == n_in_flight


@pytest.mark.parametrize("stage", [2, 3])
def test_temporary_buffers_do_not_grow_with_the_model(world: World, stage: int) -> None:
    """Two under way with what they receive, and those that one layer's largest parameter is being written to."""
    for n_layers in (6, 24):
        assert max(world.run(2, peak_temporary_bytes, n_layers, stage)) <= (5 + 2 + 2 * 0.5) * 2048


def peak_whole_bytes(prefetch: int) -> tuple[int, int]:
    """Most bytes of whole parameters at one time in stage 3, and of one layer."""
    model = GPT(dataclasses.replace(TINY, n_layers=8))
    engine = zero_runtime.shard(model, group=group_of(2), stage=3, prefetch=prefetch)
    engine.optimizer(torch.optim.SGD, lr=0.1)
    peak = 0

    def look(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, sum(f.whole.untyped_storage().nbytes() for f in engine.flats))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
    for n in range(2):
        model(*gpt_batch(0, n)).backward()
    root, layer = (unit.flats[0].layout.numel * 4 for unit in engine.units[:2])
    assert sum(f.whole.untyped_storage().nbytes() for f in engine.flats) == 0
    return peak - root, layer


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_whole_layers_alive_are_the_one_in_use_and_those_ahead(world: World, prefetch: int) -> None:
    for peak, layer in world.run(2, peak_whole_bytes, prefetch):
        assert peak <= (1 + prefetch) * layer
