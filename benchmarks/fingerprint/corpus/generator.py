"""Sequences as frameworks would emit them for models and settings that nobody recorded.

Each rule below follows a framework's recordings and sources. `setup` draws one training run, `play` its calls with
start times.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from benchmarks.fingerprint.corpus import model_shapes
from benchmarks.fingerprint.corpus.deepspeed import Gathering, gathers
from benchmarks.fingerprint.corpus.grammar import MIN_SHARE_TWICE
from benchmarks.fingerprint.corpus.timeline import AG, AR, BROADCAST, RS, Speed, Timeline
from benchmarks.fingerprint.corpus.training_kind import TrainingKind
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.steps.anatomy import Ints

MiB = 1 << 20
MAX_BUCKETS = 64
MAX_PERSISTENT = 0.05
"""Most of a model, as a share, that stays whole: users of ZeRO-3 choose DeepSpeed's threshold accordingly."""
Rng = np.random.Generator


@dataclass(frozen=True)
class Setup:
    framework: str
    training: TrainingKind
    model: model_shapes.ModelShape
    speed: Speed
    n_ranks: int
    parameter_bytes: int
    gradient_bytes: int
    bucket_bytes: int
    markers: tuple[int, ...] = ()
    """Bytes of the small all-reduces that come once per step, before the optimizer."""
    markers_last: bool = False
    """They come after the updated parameters were shared."""
    send: Collective = AR
    """Collective that carries gradients if parameters are replicated."""
    post: str = ""
    """How updated parameters are shared: chunks, one, groups, broadcasts or not at all."""
    prefetch: int = 1
    keeps_last: bool = True
    """The last block is not gathered a second time for its backward."""
    keeps_root: bool = True
    gathering: Gathering | None = None
    """DeepSpeed's ZeRO-3; others gather unit by unit."""
    activation_bytes: int = 0
    recomputes: bool = False
    sequence_parallel: bool = False
    units: tuple[tuple[int, ...], ...] = field(default=())


REPLICATED = {
    "ddp": Stage.ddp, "horovod": Stage.ddp, "megatron_ddp": Stage.ddp, "zero_redundancy": Stage.zero1,
    "megatron_optimizer": Stage.zero1, "ours_1": Stage.zero1, "ours_1_reduce": Stage.zero1, "deepspeed_1": Stage.zero1,
    "ours_2": Stage.zero2, "deepspeed_2": Stage.zero2,
}  # fmt: skip
SHARDED = {
    "fsdp2_keep": Stage.zero2, "fsdp1_keep": Stage.zero2, "fsdp2": Stage.zero3, "fsdp1": Stage.zero3,
    "ours_3": Stage.zero3, "deepspeed_3": Stage.zero3, "deepspeed_keep": Stage.zero2,
}  # fmt: skip
FRAMEWORKS = (*REPLICATED, *SHARDED, "none")


def setup(framework: str, rng: Rng) -> Setup:
    """Draw a training run of `framework`, one of FRAMEWORKS."""
    model = model_shapes.draw(str(rng.choice(list(model_shapes.FAMILIES))), rng)
    stage = {**REPLICATED, **SHARDED}.get(framework, Stage.unknown)
    tensor_parallel = framework == "none" or (not framework.startswith("deepspeed") and rng.random() < 0.3)
    partitioned = tensor_parallel and rng.random() < 0.5
    n_micro = int(rng.choice([1, 1, 1, 2, 3, 4, 8, 16], p=[0.2, 0.2, 0.1, 0.15, 0.1, 0.15, 0.06, 0.04]))
    element = int(rng.choice([2, 4]))
    n_markers = int(rng.choice([0, 1, 2, 4], p=[0.35, 0.35, 0.2, 0.1]))
    markers = tuple(int(rng.choice([1, 4, 4, 8, 64])) for _ in range(n_markers))
    if framework == "none" and not markers:
        markers = (4,)
    speed = Speed.draw(rng)
    width = 2 if tensor_parallel else 1
    base = Setup(
        framework=framework,
        training=TrainingKind(stage, n_micro, partitioned_activations=partitioned, tensor_parallel=tensor_parallel),
        model=model,
        speed=speed,
        n_ranks=int(rng.choice([2, 4, 8, 16, 64])),
        parameter_bytes=element,
        gradient_bytes=int(rng.choice([element, 4])),
        bucket_bytes=int(rng.choice([0.2, 1, 5, 25, 25, 32, 50, 100, 500]) * MiB),
        markers=markers,
        markers_last=bool(rng.random() < 0.3),
        activation_bytes=int(rng.choice([1, 2, 4, 8])) * int(rng.choice([32, 128, 512, 1024])) * model.width * element,
        recomputes=partitioned or (tensor_parallel and rng.random() < 0.2),
        sequence_parallel=tensor_parallel and not partitioned and framework in ("megatron_ddp", "megatron_optimizer")
        and rng.random() < 0.4,
        units=tuple(tuple(max(1, n // width) for n in block) for block in model.blocks),
    )  # fmt: skip
    return _finish(base, rng)


def _finish(run: Setup, rng: Rng) -> Setup:
    """Settings that follow from the framework: when gradients leave, when parameters are gathered."""
    name = run.framework
    sends_each, gathers_each, broadcasts = False, False, False
    if name in ("ddp", "megatron_ddp") and rng.random() < 0.25:
        sends_each = True
    if name == "ddp" or name == "zero_redundancy":
        run = replace(run, bucket_bytes=int(rng.choice([0.2, 1, 5, 25, 25, 25, 100]) * MiB))
    if name == "horovod":
        run = replace(run, bucket_bytes=int(rng.choice([64, 128])) * MiB)
    if name.startswith("megatron"):
        run = replace(run, bucket_bytes=int(rng.choice([80, 160, 1 << 20])) * MiB, markers=(*run.markers, 480, 128)[:4])
    if name == "megatron_optimizer":
        run = replace(run, send=RS, post=str(rng.choice(["chunks", "one"])))
    if name == "zero_redundancy":
        run, broadcasts = replace(run, post="broadcasts"), True
    if name in ("ours_1", "ours_2"):
        run = replace(run, send=RS, post="chunks")
    if name == "ours_1_reduce":
        run = replace(run, post="chunks")
    if name in ("ours_2",):
        sends_each = True
    if name in ("deepspeed_1", "deepspeed_2"):
        run = replace(run, post="groups", markers=(*run.markers, 4)[:4])
        sends_each = name == "deepspeed_2"
    if name.startswith("deepspeed_") and name in SHARDED:
        run = replace(run, send=RS, markers=(8, *run.markers)[:4])  # it always asks for overflows
    if name in SHARDED:
        gathers_each = True
        sends_each = name.endswith("_keep") or rng.random() < 0.8
        run = replace(
            run,
            prefetch=int(rng.choice([0, 1, 1, 2])),
            keeps_last=bool(rng.random() < 0.7),
            keeps_root=bool(rng.random() < 0.7),
        )
    if name in ("deepspeed_3", "deepspeed_keep"):
        run = replace(run, gathering=_gathering(run, rng), recomputes=bool(rng.random() < 0.3))
        run = replace(run, training=_as_gathered(run))
    training = run.training
    # Nobody cuts a model into hundreds of buckets.
    run = replace(run, bucket_bytes=max(run.bucket_bytes, _elements(run) * run.gradient_bytes // MAX_BUCKETS))
    return replace(
        run,
        training=TrainingKind(
            training.stage, training.n_micro,
            sends_each or training.n_micro == 1, gathers_each or training.n_micro == 1, bool(run.markers),
            training.partitioned_activations, training.tensor_parallel, broadcasts,
        ),
    )  # fmt: skip


def _gathering(run: Setup, rng: Rng) -> Gathering:
    """Parts of the model, or Hugging Face's settings: DeepSpeed's defaults are for models of billions."""
    total, width = _elements(run), run.model.width
    tensors = np.array(_tensors(run))
    thresholds = [n for n in (100_000, 10 * width, 10_000) if tensors[tensors < n].sum() <= MAX_PERSISTENT * total]
    ahead = int(rng.choice([0.0, 0.9 * width**2, total * np.exp(rng.uniform(np.log(0.003), np.log(0.1)))]))
    live, reuse = rng.uniform(0.02, 0.3, 2) * (rng.random(2) < 0.7)
    if run.framework == "deepspeed_keep":
        ahead, live, reuse = int(rng.choice([ahead, 50_000_000])), 4.0, 4.0
    return Gathering(int(rng.choice(thresholds or [0])), ahead, int(live * total), int(reuse * total))


def _as_gathered(run: Setup) -> TrainingKind:
    """The visible kind of training: if hardly anything is gathered twice, ZeRO-3 moves the same as ZeRO-2."""
    assert run.gathering
    tensors, (uses, _) = _tensors(run), _uses(run)
    gathered = sum(map(sum, gathers(tensors, uses, run.gathering)))
    is_kept = gathered < (1 + MIN_SHARE_TWICE) * sum(n for n in tensors if n >= run.gathering.persistence)
    return msgspec.structs.replace(run.training, stage=Stage.zero2) if is_kept else run.training


def play(run: Setup, n_steps: int, rng: Rng) -> tuple[tuple[Ints, Ints, Ints], list[int]]:
    """(collective, message_bytes, start in us) of all calls, and the index of each step's first call."""
    timeline = Timeline(run.speed, rng)
    starts = []
    for _ in range(n_steps):
        starts.append(len(timeline.collectives))
        for micro in range(run.training.n_micro):
            is_last = micro == run.training.n_micro - 1
            sends = is_last or run.training.sends_each
            if run.gathering:
                _deepspeed_micro(run, timeline, sends)
            elif run.framework in SHARDED:
                _sharded_micro(run, timeline, sends)
            else:
                _replicated_micro(run, timeline, sends and run.framework != "none")
        timeline.drain()
        _markers(run, timeline, last=False)
        timeline.compute(0.1 * _elements(run))
        _share_updates(run, timeline)
        _markers(run, timeline, last=True)
    return timeline.columns(), starts


def _markers(run: Setup, timeline: Timeline, *, last: bool) -> None:
    if run.markers_last == last:
        for n_bytes in run.markers:
            timeline.call(AR, n_bytes, waits=True)


def _tensors(run: Setup) -> tuple[int, ...]:
    return (*run.model.first, *(n for unit in run.units for n in unit), *run.model.last)


def _elements(run: Setup) -> int:
    return sum(_tensors(run))


def _half_forward(run: Setup, timeline: Timeline, n_elements: float) -> None:
    timeline.compute(0.5 * n_elements)
    if run.sequence_parallel:
        timeline.call(AG, run.activation_bytes, waits=True)
        timeline.call(RS, run.activation_bytes, waits=True)
    elif run.training.tensor_parallel:
        timeline.call(AR, run.activation_bytes, waits=True)


def _block_forward(run: Setup, timeline: Timeline, index: int) -> None:
    for _ in range(2):
        _half_forward(run, timeline, sum(run.units[index]))


def _block_backward(run: Setup, timeline: Timeline, index: int) -> None:
    n_elements = sum(run.units[index])
    if run.training.partitioned_activations:
        timeline.call(AG, run.activation_bytes, waits=True)
    if run.recomputes:
        _block_forward(run, timeline, index)
    for _ in range(2):
        timeline.compute(n_elements)
        if run.sequence_parallel:
            timeline.call(AG, run.activation_bytes, waits=True)
            timeline.call(RS, run.activation_bytes, waits=True)
        elif run.training.tensor_parallel:
            timeline.call(AR, run.activation_bytes, waits=True)


def _replicated_micro(run: Setup, timeline: Timeline, sends: bool) -> None:
    """Whole parameters everywhere: buckets fill from the last parameter on, and leave when they are full."""
    if sends and run.framework == "ddp" and run.model.has_buffers:
        timeline.call(BROADCAST, 8 * len(run.units) * 64)
        timeline.call(BROADCAST, 8 * len(run.units))
    timeline.compute(0.1 * sum(run.model.first))
    for index in range(len(run.units)):
        _block_forward(run, timeline, index)
    buckets = _Buckets(run, timeline, sends)
    timeline.compute(2 * sum(run.model.last))
    buckets.fill(run.model.last)
    for index in reversed(range(len(run.units))):
        _block_backward(run, timeline, index)
        buckets.fill(run.units[index])
    buckets.fill(run.model.first)
    buckets.flush()
    if sends:
        timeline.drain()


class _Buckets:
    """Gradients on their way out of one backward."""

    def __init__(self, run: Setup, timeline: Timeline, sends: bool) -> None:
        self._run, self._timeline, self._sends = run, timeline, sends
        self._n_bytes = 0
        # DDP's first bucket is smaller, so that communication begins early.
        self._limit = min(run.bucket_bytes, MiB) if run.framework in ("ddp", "zero_redundancy") else run.bucket_bytes
        self._is_even = run.framework.startswith("ours")
        self._fits = run.framework.startswith(("deepspeed", "horovod"))
        """A bucket leaves before the tensor that would overfill it; else with the tensor that fills it."""
        total = _elements(run) * run.gradient_bytes
        n_equal = max(1, -(-total // run.bucket_bytes))
        if self._is_even:
            self._limit = -(-total // n_equal)

    def fill(self, parameters: tuple[int, ...]) -> None:
        for n_elements in reversed(parameters):
            if self._fits and self._n_bytes + n_elements * self._run.gradient_bytes > self._limit:
                self.flush()
            self._n_bytes += n_elements * self._run.gradient_bytes
            while self._is_even and self._n_bytes >= self._limit:
                self._send(self._limit)
                self._n_bytes -= self._limit
            if not self._is_even and not self._fits and self._n_bytes >= self._limit:
                self.flush()

    def flush(self) -> None:
        if self._n_bytes:
            self._send(self._n_bytes)
        self._n_bytes = 0
        if not self._is_even:
            self._limit = self._run.bucket_bytes

    def _send(self, n_bytes: int) -> None:
        if self._sends:
            even = -(-n_bytes // (16 * self._run.n_ranks)) * 16 * self._run.n_ranks
            self._timeline.call(self._run.send, even if self._run.send == RS else n_bytes)


def _share_updates(run: Setup, timeline: Timeline) -> None:
    total = _elements(run) * run.parameter_bytes
    if run.post == "one":
        timeline.call(AG, total)
    elif run.post == "chunks":
        even = run.framework.startswith("ours")
        n_chunks = max(1, -(-_elements(run) * run.gradient_bytes // run.bucket_bytes))
        left = total
        for _ in range(n_chunks):
            share = -(-total // n_chunks) if even else min(left, run.bucket_bytes)
            share = min(share, left)
            if share <= 0:
                break
            timeline.call(AG, -(-share // (16 * run.n_ranks)) * 16 * run.n_ranks)
            left -= share
    elif run.post == "groups":
        timeline.call(AG, -(-total // (2 * run.n_ranks)) * 2 * run.n_ranks, waits=True)
    elif run.gathering:
        for parameter in _tensors(run):
            if parameter < run.gathering.persistence:
                _gather(run, timeline, (parameter,))
    elif run.post == "broadcasts":
        for parameter in _tensors(run):
            timeline.call(BROADCAST, parameter * run.parameter_bytes)


def _sharded_micro(run: Setup, timeline: Timeline, sends: bool) -> None:
    """Parameters are gathered block by block, ahead of their use, and freed after it."""
    keeps = run.training.stage is Stage.zero2
    n = len(run.units)
    ahead = run.prefetch
    gathered = 0
    _gather(run, timeline, (*run.model.first, *run.model.last))
    for index in range(n):
        while gathered < min(n, index + 1 + ahead):
            _gather(run, timeline, run.units[gathered])
            gathered += 1
        _block_forward(run, timeline, index)
    timeline.compute(2 * sum(run.model.last))
    if not keeps and not run.keeps_root:
        _gather(run, timeline, (*run.model.first, *run.model.last))
    pending = n - 1 - (1 if run.keeps_last else 0)
    for index in reversed(range(n)):
        while not keeps and pending >= max(0, index - ahead):
            _gather(run, timeline, run.units[pending])
            pending -= 1
        _block_backward(run, timeline, index)
        if sends:
            _scatter(run, timeline, run.units[index])
    if sends:
        _scatter(run, timeline, (*run.model.first, *run.model.last))


def _deepspeed_micro(run: Setup, timeline: Timeline, sends: bool) -> None:
    """Tensor by tensor: the settings decide which of them are in one call, not the model's blocks."""
    assert run.gathering
    tensors = _tensors(run)
    uses, is_last = _uses(run)
    root, *calls = gathers(tensors, uses, run.gathering)
    buckets = _Buckets(run, timeline, sends)
    for elements in root:
        _gather(run, timeline, (elements,))
    for one, now, is_backward in zip(uses, calls, is_last, strict=True):
        for elements in now:
            _gather(run, timeline, (elements,))
        timeline.compute((2 if is_backward else 1) * tensors[one])
        if is_backward:
            buckets.fill((tensors[one],))
    buckets.flush()


def _uses(run: Setup) -> tuple[list[int], list[bool]]:
    """Numbers of the tensors in the order of their use, and which of the uses are backward's."""
    numbers = list(range(len(_tensors(run))))
    n_first, n_last = len(run.model.first), len(run.model.last)
    uses, is_backward = list(numbers), [False] * len(numbers)
    ends = np.cumsum([n_first, *(len(unit) for unit in run.units), n_last]).tolist()
    for start, end in reversed(list(zip([0, *ends], ends, strict=False))):
        if run.recomputes and n_first <= start < ends[-2]:
            uses += numbers[start:end]
            is_backward += [False] * (end - start)
        uses += numbers[start:end][::-1]
        is_backward += [True] * (end - start)
    return uses, is_backward


def _gather(run: Setup, timeline: Timeline, unit: tuple[int, ...]) -> None:
    align = 16 * run.n_ranks
    timeline.call(AG, -(-sum(unit) * run.parameter_bytes // align) * align)


def _scatter(run: Setup, timeline: Timeline, unit: tuple[int, ...]) -> None:
    align = 16 * run.n_ranks
    timeline.call(RS, -(-sum(unit) * run.gradient_bytes // align) * align)
