"""Gathers of FSDP2 and of the ZeRO runtime on communicators of another config: same on all ranks, same to the bit."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_world import World
from torch import nn

import zerotune
from zerotune import zero_runtime
from zerotune.agent import launch
from zerotune.agent.nccl.emulated import Graph, journal
from zerotune.agent.nccl.emulated.device import clock
from zerotune.agent.nccl.emulated.device.memory import device
from zerotune.agent.nccl.emulated.torch_backend.process_group import Options
from zerotune.store.records import Collective
from zerotune.zero_runtime.autotune import variants
from zerotune.zero_runtime.autotune.fsdp2 import Gathers, vary

N_RANKS = 2
WIDTH = 512
FEW, ONE = {"max_ctas": 8}, {"max_ctas": 1}
N_STEPS = 40
"""Twice as many as a verdict takes."""
READY = variants.READY_AFTER
N_GATHERS = 8
"""Of a step."""
MOST_STEPS = 300
RESERVE_MB = 140
"""Two thirds of what the communicator with eight channels takes."""
COMPUTE_US = 60.0
"""Of a layer, forward; more than its gather takes, so that what slows computation counts."""


@pytest.fixture(scope="module")
def few_sms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """On this fabric channels slow computation: 24 of them more than they speed a gather up."""
    made = World(
        N_RANKS, tmp_path_factory.mktemp("few"), ZEROTUNE_FABRIC="few_sms_node", ZEROTUNE_COMPUTE="none",
        ZEROTUNE_BACKEND_NAME="nccl", ZEROTUNE_AGENT="0",
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def usual(few_sms: World) -> list[Any]:
    """Trainings without variants."""
    return few_sms.run(fsdp2, ())


class Layer(nn.Module):
    """Takes its time on the virtual clock, more of it on some ranks than on others."""

    def __init__(self, compute_us: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compute_us = compute_us

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        clock.mark_compute_us(self.compute_us)
        output = torch.tanh(self.linear(batch))
        if output.requires_grad:
            output.register_hook(lambda _: clock.mark_compute_us(2 * self.compute_us))
        return output


def model_of(rank: int, compute_us: float) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(compute_us * (1 + rank / 50)) for _ in range(3)), nn.Linear(WIDTH, 2))


@contextmanager
def told() -> Iterator[list[str]]:
    """What is logged of variants."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign] - of this one handler
    variants.logger.addHandler(handler)
    variants.logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        variants.logger.removeHandler(handler)


class Gathered:
    """Which communicators each step gathered on, numbered in the order in which they came."""

    def __init__(self, known: dict[int, int]) -> None:
        journal().keep_calls, self.known, self.steps = True, known, list[tuple[int, ...]]()
        journal().calls.clear()

    def step_ended(self) -> None:
        ran = [call.comm_id for call in journal().calls if call.collective is Collective.all_gather]
        self.steps.append(tuple(sorted({self.known.setdefault(one, len(self.known)) for one in ran})))
        journal().calls.clear()


def enable(wanted: Sequence[dict[str, int]]) -> None:
    zerotune.enable(communicator_variants=wanted)


def fsdp2(
    rank: int,
    wanted: Sequence[dict[str, int]],
    compute_us: float = COMPUTE_US,
    n_steps: int = N_STEPS,
    accumulate: int | dict[int, int] = 1,
    shape: Sequence[int] = (),
    only_rank: int | None = None,
    turn_on: Callable[[Any], None] = vary,
    known: dict[int, int] | None = None,
) -> tuple[list[str], list[tuple[int, ...]], list[str]]:
    """Losses of FSDP2 on this rank, where each step gathered, and what was told."""
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    usual = fsdp.fully_shard
    with told() as lines:
        if wanted and only_rank in (None, rank):
            turn_on(wanted)
        shape = tuple(shape) or (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = model_of(rank, compute_us)
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        for module in (fsdp._fully_shard, fsdp._fully_shard._fully_shard, fsdp):
            module.fully_shard = usual  # type: ignore[attr-defined] - a module's name is set
        model._set_unshard_async_op(True)  # type: ignore[operator] - an FSDPModule by now; gathers overlap as on GPUs
        for layer, ahead in zip(model, list(model)[1:], strict=False):
            layer.set_modules_to_forward_prefetch([ahead])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(rank)
        losses, gathered = [], Gathered({} if known is None else known)
        n_passes = accumulate if isinstance(accumulate, int) else accumulate[rank]
        for n in range(1, n_steps * n_passes + 1):
            loss = model(torch.randn(2, WIDTH, generator=draw)).square().mean()
            loss.backward()
            if n % n_passes == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            gathered.step_ended()
    return losses, gathered.steps, lines


def zero(rank: int, stage: int, wanted: Sequence[dict[str, int]]) -> Any:
    """Losses of the ZeRO runtime where the usual group has one channel; what each step ran with; what proved best."""
    options = Options()
    options.config.max_ctas = 1
    usual = dist.new_group(backend="nccl", pg_options=options)
    engine = zero_runtime.shard(
        model := model_of(rank, 0.0),
        group=usual, stage=stage, bucket_bytes=1 << 21, autotune=True, communicator_variants=wanted,
    )  # fmt: skip
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    losses, ran, gathered = [], [], Gathered({})
    for _ in range(MOST_STEPS):
        ran.append(engine.step_settings)
        loss = model(torch.randn(2, WIDTH, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        gathered.step_ended()
        if engine.best_step_settings is not None:
            break
    return losses, ran, engine.best_step_settings, gathered.steps


def alike(answers: Sequence[Any]) -> Any:
    """What all ranks have answered."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_fsdp2_keeps_a_faster_communicator(few_sms: World, usual: list[Any]) -> None:
    assert alike([steps for _, steps, _ in usual]) == [(0,)] * N_STEPS
    varied = few_sms.run(fsdp2, (FEW,), COMPUTE_US, N_STEPS, 1, (), None, enable)
    assert [losses for losses, *_ in varied] == [losses for losses, *_ in usual]
    steps = alike([steps for _, steps, _ in varied])
    assert steps[: variants.READY_AFTER - 1] == [(0,)] * (variants.READY_AFTER - 1)
    assert steps[-1] == (1,)
    assert (0,) in steps[variants.READY_AFTER :]  # in turns
    lines = [line for *_, lines in varied for line in lines]
    assert sum("gathers use max_ctas=8: steps" in line for line in lines) == 1
    assert sum("MB of device memory" in line for line in lines) == 1


def test_fsdp2_leaves_a_slower_communicator(few_sms: World) -> None:
    varied = few_sms.run(fsdp2, (ONE,), 0.0)
    steps = alike([steps for _, steps, _ in varied])
    assert (1,) in steps  # it was tried
    assert steps[-1] == (0,)
    assert any("gathers stay with the usual config" in line for line in varied[0][2])


def test_accumulated_gradients_make_one_step_of_several_passes(few_sms: World) -> None:
    varied = few_sms.run(fsdp2, (FEW,), COMPUTE_US, 18, 3)
    steps = alike([steps for _, steps, _ in varied])
    changes = [n for n in range(variants.READY_AFTER, 54) if steps[n] != steps[n - 1]]
    assert len(changes) > 1  # the first is back from what was gathered where it was made
    assert all(n % 3 == 0 for n in changes[1:])


def test_ranks_whose_optimizers_step_unequally(few_sms: World) -> None:
    varied = few_sms.run(unequal)
    steps = alike([steps for _, steps, _ in varied])
    assert (1,) in steps


def unequal(rank: int) -> Any:
    return fsdp2(rank, (FEW,), COMPUTE_US, N_STEPS // (1 + rank), {0: 1, 1: 2})


def is_back(rank: int, left_bytes: int) -> int:
    group: Any = dist.group.WORLD
    return group.left_bytes() - left_bytes if left_bytes else int(group.left_bytes())


@pytest.mark.parametrize("n_free_reserves", [1.5, 2.1])
def test_memory_is_not_taken_where_it_is_short(few_sms: World, n_free_reserves: float) -> None:
    """Too little is left before one is made, or beside it."""
    few_sms.run(fsdp2, (), 0.0, 1)
    before = few_sms.run(is_back, 0)
    varied = few_sms.run(short_of_memory, n_free_reserves)
    steps = alike([steps for _, steps, _ in varied])
    is_made = n_free_reserves > 2
    assert [step for step in steps if step != (0,)] == [(0, 1)] * is_made
    (said,) = (line for *_, lines in varied for line in lines)
    assert "gathers do not try max_ctas=8" in said
    assert ("destroyed again" in said) == is_made
    assert few_sms.run(is_back, before[0]) == [0] * N_RANKS


def short_of_memory(rank: int, n_free_reserves: float) -> Any:
    """Only rank 1 is short."""
    group: Any = dist.group.WORLD
    usual, variants.RESERVE_BYTES = variants.RESERVE_BYTES, RESERVE_MB * 1_000_000  # type: ignore[misc] - Final but here
    device().reserve_mb = group.left_bytes() / 1e6 - n_free_reserves * RESERVE_MB if rank == 1 else 0.0
    try:
        return fsdp2(rank, (FEW,), 0.0, 12)
    finally:
        variants.RESERVE_BYTES, device().reserve_mb = usual, 0.0  # type: ignore[misc] - as above


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (({"nvls_ctas": 4},), "NCCL's config has no nvls_ctas in this torch build, only max_ctas"),
        (({"max_ctas": 4}, 0.0, 12, 1, (), 0), "not all ranks enabled the same communicator_variants"),
        (({"max_ctas": 4}, 0.0, 12, 1, (), 1), "not all ranks enabled the same communicator_variants"),
    ],
)
def test_unknown_or_unequal_variants_are_left_alone(few_sms: World, arguments: tuple[Any, ...], why: str) -> None:
    wanted, *others = arguments
    varied = few_sms.run(fsdp2, (wanted,), *(others or (0.0, 12)))
    assert alike([steps for _, steps, _ in varied]) == [(0,)] * 12
    (said,) = (line for *_, lines in varied for line in lines)
    assert why in said


@pytest.mark.slow
def test_replicas_are_left_alone(world: World) -> None:
    varied = world.run(fsdp2, (FEW,), 0.0, 12, 1, (2, 2))
    assert alike([steps for _, steps, _ in varied]) == [(0,)] * 12
    (said,) = (line for *_, lines in varied for line in lines)
    assert "it does not have all ranks of the job" in said


def captured(rank: int) -> tuple[bool, list[str]]:
    group: Any = dist.group.WORLD
    gathers = Gathers(group, (FEW,), torch.device("cpu"))
    place = object()
    with told() as lines:
        assert gathers.next_group(place) is group
        with Graph().capture():
            assert gathers.next_group(place) is group
    return gathers._is_over, lines


def test_captured_gathers_are_left_alone(few_sms: World) -> None:
    answers = few_sms.run(captured)
    assert all(is_over for is_over, _ in answers)
    assert ["captured in a CUDA graph" in line for _, lines in answers for line in lines] == [True]


def models_one_after_another(rank: int) -> Any:
    """Each is gone before the next one is made; the communicators stay, and so does what was found."""
    turn_on: list[Any] = []

    def once(wanted: Any) -> None:
        if not turn_on:
            vary(wanted)
            turn_on.append(fsdp.fully_shard)
        for module in (fsdp._fully_shard, fsdp._fully_shard._fully_shard, fsdp):
            module.fully_shard = turn_on[0]

    from torch.distributed import fsdp

    group: Any = dist.group.WORLD
    seen, known = [], dict[int, int]()
    for n_steps in (N_STEPS, 2 * READY, 2 * READY):
        _, steps, lines = fsdp2(rank, (FEW,), COMPUTE_US, n_steps, 1, (), None, once, known)
        gc.collect()
        seen.append((steps, sum("MB of device memory" in line for line in lines), group.left_bytes()))
    return seen


def test_models_that_come_later_share_communicators_and_what_was_found(few_sms: World) -> None:
    first, *later = few_sms.run(models_one_after_another)[0]
    assert (first[0][-1], first[1]) == ((1,), 1)
    for seen in later:
        assert seen == ([(1,)] * 2 * READY, 0, first[2])


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the first gather": lambda patch: patch.setattr(Gathers, "_joined", fails),
    "while groups are made": lambda patch: patch.setattr(variants.Variants, "_changed_options", fails),
    "in NCCL, on all ranks": lambda patch: patch.setattr(dist, "new_group", fails),
    "while steps are compared": lambda patch: patch.setattr(Gathers, "_is_captured", Later(READY + 3)),
    "at every later gather": lambda patch: patch.setattr(Gathers, "_is_captured", Later(READY + 3, N_STEPS * 10)),
    "where the verdict is told": lambda patch: patch.setattr(variants.Variants, "report", fails),
}
"""What fails, on rank 1 only unless the name says otherwise."""


FAULTS_SAID = {
    "before the first gather": "not all ranks enabled the same communicator_variants",
    "while groups are made": "gathers do not try max_ctas=8: another rank cannot",
    "in NCCL, on all ranks": "gathers do not try max_ctas=8: ZeroDivisionError: an error of zerotune",
    "while steps are compared": "stay as they are: zerotune failed on another rank",
    "at every later gather": "stay as they are: zerotune failed on another rank",
    "where the verdict is told": "stay as they are: zerotune failed on another rank",
}


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("an error of zerotune")


class Later:
    """Answers False for some steps, then fails."""

    def __init__(self, n_steps: int, n_times: int = 1) -> None:
        self.n_left, self.n_times = n_steps * N_GATHERS, n_times

    def __call__(self) -> bool:
        self.n_left -= 1
        if -self.n_times <= self.n_left < 0:
            fails()
        return False


def failing(rank: int, fault: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 or "all ranks" in fault:
            FAULTS[fault](patch)
        return fsdp2(rank, (FEW,))


BY_DEFAULT = ("before the first gather", "while steps are compared")
"""Each fault takes a training of its own: one before variants exist and one after run always, the others when asked."""


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=() if one in BY_DEFAULT else pytest.mark.slow) for one in FAULTS]
)
def test_an_error_of_zerotune_on_one_rank_leaves_training_as_it_is(
    few_sms: World, usual: list[Any], fault: str
) -> None:
    """No rank waits for another, and none keeps the communicator."""
    before = few_sms.run(is_back, 0)
    failed = few_sms.run(failing, fault)
    assert [losses for losses, *_ in failed] == [losses for losses, *_ in usual]
    assert alike([steps for _, steps, _ in failed])[-1] == (0,)
    lines = [line for *_, lines in failed for line in lines]
    assert sum(FAULTS_SAID[fault] in line for line in lines) == 1, lines
    assert few_sms.run(is_back, before[0]) == [0] * N_RANKS


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_zero_runtime_keeps_a_faster_communicator(few_sms: World, stage: int) -> None:
    varied = few_sms.run(zero, stage, (FEW,))
    usual = few_sms.run(zero, stage, ())
    for (losses, *_), (expected, *_) in zip(varied, usual, strict=True):
        assert all(loss == other for loss, other in zip(losses, expected, strict=False))
    ran, best, steps = alike([others for _, *others in varied])
    assert best.variant == 1
    assert steps[-1] == (1,)
    for n, (step, one) in enumerate(zip(steps, ran, strict=True)):
        assert step == (one.variant,) or n in (0, variants.READY_AFTER - 1)
    assert all(one.variant == 0 for one in usual[0][1])


def test_one_message_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    for wanted, words in (
        ([{}], "communicator_variants[0] is {}"),
        ([FEW, {"max_cta": 8}], "communicator_variants[1] has 'max_cta'; choose from cga_cluster_size, cta_policy"),
        ([{"min_ctas": 16}], "communicator_variants[0] is {'min_ctas': 16}; NCCL refuses min_ctas without a max_ctas"),
        ([{"max_ctas": 0}], "communicator_variants[0]['max_ctas'] is 0; it must be an int of at least 1"),
        ([FEW] * 4, "it must be a list of at most 3 dicts"),
        (FEW, "communicator_variants is {'max_ctas': 8}; it must be a list"),
    ):
        with pytest.raises(zero_runtime.SettingsError) as caught:
            zero_runtime.Settings(autotune=True, communicator_variants=wanted)  # type: ignore[arg-type] - wrong on purpose
        assert words in str(caught.value)
        caplog.clear()
        from zerotune.zero_runtime.autotune.fsdp2 import vary

        vary(wanted)  # type: ignore[arg-type] - wrong on purpose
        assert [str(caught.value) in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(zero_runtime.SettingsError, match="autotune=True"):
        zero_runtime.Settings(communicator_variants=(FEW,))


@pytest.mark.slow
def test_a_script_with_one_line_more(tmp_path: Path) -> None:
    """With the agent and its plugin; the line comes before torch is imported."""
    script = Path(__file__).parents[2] / "frameworks" / "scripts" / "fsdp2_variants.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    request = launch.LaunchRequest(command, fabric="few_sms_node", environment=dict(os.environ))
    done = subprocess.run(
        command, env=launch.environment(request), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gathers stay with the usual config: steps" in done.stderr
    assert "the agent is off" not in done.stderr
