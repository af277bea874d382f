"""Buckets and depths change between steps on all ranks alike, change no bit, and stay only where they pay."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from autotuned_training import both
from hypothesis import given, settings
from hypothesis import strategies as st
from zero_models import MODELS, loss_of
from zero_world import World, group_of

from zerotune import zero_runtime
from zerotune.zero_runtime.autotune import variants
from zerotune.zero_runtime.autotune.agreement import COUNTED_STEPS, Boundaries
from zerotune.zero_runtime.autotune.choices import FINEST, Choices, StepSettings
from zerotune.zero_runtime.autotune.search import LEAST_GAIN, Search

CHOICES = Choices(tuple(1 << place for place in range(10, 16)), (0, 1, 2), layer_bytes=1000, variants=(0, 1, 2))
BEGIN = StepSettings(1 << 12, 1)
PLENTY = 1 << 40


def trained(n_ranks: int, stage: int, max_norm: float | None, precision: str | None) -> object:
    return both(group_of(n_ranks), stage, max_norm, precision=precision)


@pytest.mark.parametrize(
    ("n_ranks", "stage", "max_norm", "precision"),
    [
        pytest.param(2, 1, 0.1, None, marks=pytest.mark.slow),
        pytest.param(4, 2, None, "bf16", marks=pytest.mark.slow),
        (2, 3, 0.1, "bf16"),
    ],
)
def test_no_bit_changes(world: World, n_ranks: int, stage: int, max_norm: float | None, precision: str | None) -> None:
    answers = world.run(n_ranks, trained, n_ranks, stage, max_norm, precision)
    assert all(same for same, _ in answers)
    runs = [ran for _, ran in answers]
    assert all(ran == runs[0] for ran in runs)
    assert len(set(runs[0])) > 1


def trained_any(name: str, stage: int, autotune: bool) -> tuple[list[float], list[StepSettings | None]]:
    """Losses of a model whose layers are used in unusual ways; the layout is that of the smallest bucket."""
    make, batch = MODELS[name]
    model, bucket_bytes = make(), 2048
    settings = {"stage": stage, "bucket_bytes": bucket_bytes if autotune else bucket_bytes // FINEST}
    engine = zero_runtime.shard(model, group=group_of(2), autotune=autotune, **settings)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=0.01)
    losses, ran = [], []
    for n in range(21):
        loss = loss_of(model, batch(dist.get_rank(), n))
        ran.append(engine.step_settings)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, ran


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("fickle", 2),
        ("again-recomputed", 3),
        pytest.param("shared-by-layers", 3, marks=pytest.mark.slow),
        pytest.param("partly-frozen", 3, marks=pytest.mark.slow),
    ],
)
def test_no_bit_changes_whatever_is_done_with_layers(world: World, name: str, stage: int) -> None:
    fixed, tuned = (world.run(2, trained_any, name, stage, autotune) for autotune in (False, True))
    assert [losses for losses, _ in tuned] == [losses for losses, _ in fixed]
    runs = [ran for _, ran in tuned]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
    assert all(ran == [None] * len(ran) for _, ran in fixed)  # who did not ask for it has nothing changed


def varied_on_gloo() -> tuple[list[str], int]:
    logged: list[str] = []
    variants.logger.addFilter(lambda record: bool(logged.append(record.getMessage())))
    engine = zero_runtime.shard(
        torch.nn.Linear(4, 4), group=group_of(2), autotune=True, communicator_variants=[{"max_ctas": 8}]
    )
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.01)
    for _ in range(30):
        engine.model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert engine.step_settings is not None
    return logged, engine.step_settings.variant


def test_a_backend_without_variants_keeps_its_group(world: World) -> None:
    answers = world.run(2, varied_on_gloo)
    assert [logged for logged, _ in answers] == [
        ["zerotune: gathers stay on their process group: it does not run on NCCL"],
        [],
    ]
    assert [variant for _, variant in answers] == [0, 0]


def proposing_without() -> str:
    engine = zero_runtime.shard(torch.nn.Linear(4, 4), group=group_of(2))
    with pytest.raises(zero_runtime.LifecycleError) as caught:
        engine.propose(prefetch=2)
    return str(caught.value)


def test_nothing_can_be_proposed_without_autotune(world: World) -> None:
    for message in world.run(2, proposing_without):
        assert "autotune" in message


class Meeting:
    """The maximum over ranks that are threads; fails on all of them at the calls it is told to."""

    def __init__(self, n_ranks: int, failures: frozenset[int]) -> None:
        self.barrier = threading.Barrier(n_ranks)
        self.said: dict[int, Sequence[int]] = {}
        self.failures = failures

    def maximum(self, rank: int) -> Callable[[Sequence[int]], Sequence[int]]:
        n_calls = 0

        def call(numbers: Sequence[int]) -> Sequence[int]:
            nonlocal n_calls
            n_calls += 1
            self.said[rank] = numbers
            self.barrier.wait(20)
            greatest = [max(each) for each in zip(*self.said.values(), strict=True)]
            self.barrier.wait(20)
            if n_calls in self.failures:
                raise ConnectionError
            return greatest

        return call


@given(st.integers(0, 1 << 30), st.integers(2, 4), st.frozensets(st.integers(1, 12), max_size=3))
@settings(max_examples=25, deadline=None)
def test_ranks_never_differ(seed: int, n_ranks: int, failures: frozenset[int]) -> None:
    """Ranks measure and propose what they like, some are late, and some collectives fail."""
    meeting = Meeting(n_ranks, failures)
    ran: dict[int, list[StepSettings]] = {rank: [] for rank in range(n_ranks)}

    def rank_of(rank: int) -> None:
        chance = random.Random(seed * 8 + rank)
        now_us = 0.0

        def clock() -> float:
            return now_us

        part = Boundaries(
            CHOICES, BEGIN, rank, n_ranks, meeting.maximum(rank), clock, lambda: chance.choice([0, 2000, PLENTY])
        )
        running = BEGIN
        for _ in range(20 * (COUNTED_STEPS + 1)):
            now_us += chance.lognormvariate(5, 1)
            if chance.random() < 0.05:
                part.propose(chance.choice([None, 1, 5000, 1 << 20]), chance.choice([None, 0, 9]))
            with suppress(ConnectionError):
                running = part.step_ended() or running
            ran[rank].append(running)
            assert running == part.search.running

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(ran[rank] == ran[0] for rank in ran)
    assert len(ran[0]) == 20 * (COUNTED_STEPS + 1)
    assert all(one.bucket_bytes in CHOICES.buckets_bytes and one.prefetch in CHOICES.prefetches for one in ran[0])
    assert all(one.variant in CHOICES.variants for one in ran[0])


def searched(cost: Callable[[StepSettings], float], noise: float, seed: int) -> tuple[Search, list[StepSettings]]:
    chance, search, ran = random.Random(seed), Search(CHOICES, BEGIN), [BEGIN]
    while not search.is_settled:
        ran.append(search.ended(1000 * cost(ran[-1]) * chance.lognormvariate(0, noise), PLENTY))
        assert len(ran) < 500
    return search, ran


@given(st.lists(st.floats(0.5, 2), min_size=54, max_size=54), st.floats(0, 0.02), st.integers(0))
@settings(max_examples=60, deadline=None)
def test_no_search_ends_slower_than_it_began(costs: list[float], noise: float, seed: int) -> None:
    def cost(one: StepSettings) -> float:
        return costs[9 * CHOICES.buckets_bytes.index(one.bucket_bytes) + 3 * one.prefetch + one.variant]

    search, _ = searched(cost, noise, seed)
    assert cost(search.leader) <= (1 + LEAST_GAIN + noise) * cost(BEGIN)


@given(st.integers(0, 20_000))
def test_nothing_runs_that_memory_does_not_hold(free_bytes: int) -> None:
    search = Search(CHOICES, BEGIN)
    n = 0
    while not search.is_settled:
        n += 1
        before, leader = search.running, search.leader
        after = search.ended(1000 - n, free_bytes)
        if after != before and after != leader and search.leader == leader:
            assert CHOICES.more_bytes(leader, after) <= free_bytes
