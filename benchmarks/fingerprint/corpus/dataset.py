"""Sequences to learn from and to be tested on: recorded from frameworks, generated, and of other workloads.

`group` names the framework: all its variants, recorded and generated alike.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fingerprint.corpus import generator, grammar, no_training
from benchmarks.fingerprint.corpus.others import OTHERS, other
from benchmarks.fingerprint.corpus.training_kind import TrainingKind, visible
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.ambiguity import unambiguous
from zerotune.tuner.fingerprint.labels import Shown
from zerotune.tuner.fingerprint.steps.anatomy import TINY_BYTES, Floats, Ints, encode

RECORDINGS: Final = Path(__file__).parent / "recordings.jsonl.gz"
MAX_BLOCKS_PER_STEP: Final = 160
"""Most units times micro-steps of a generated run: its steps are shorter than the longest that is recognised."""
SHARE_NO_TRAINING: Final = 1 / 6
MAX_CALLS_PER_STEP: Final = 1500
"""Most calls of a step of hypothetical runs; longer ones teach nothing more."""
SETTLED_STEP: Final = 2
"""Frameworks learn bucket and prefetch orders in their first steps."""
_GROUPS: Final = ("zero_redundancy", "deepspeed", "megatron", "horovod", "fsdp1", "fsdp2", "ours", "ddp", "none")


@dataclass(frozen=True)
class Sequence:
    """Several steps of one run. Only tests use `step_starts`: the recogniser never sees it."""

    origin: str
    """`recorded`, `generated` or `real`."""
    group: str
    name: str
    training: TrainingKind
    collectives: Ints
    message_bytes: Ints
    start_us: Ints
    step_starts: tuple[int, ...]

    @cached_property
    def shown(self) -> Shown:
        """The right answer for this kind of training and this very sequence."""
        return unambiguous(
            visible(self.training), self.codes()[self.step(min(SETTLED_STEP, len(self.step_starts) - 1))]
        )

    def codes(self) -> Ints:
        return encode(self.collectives, self.message_bytes)

    def gaps_us(self) -> Floats:
        """Time since the call before."""
        return np.maximum(0.0, np.diff(self.start_us, prepend=self.start_us[:1])).astype(np.float64)

    def step(self, number: int) -> slice:
        ends = (*self.step_starts[1:], len(self.collectives))
        return slice(self.step_starts[number], ends[number])


def recorded(path: Path = RECORDINGS) -> list[Sequence]:
    """Calls of real frameworks that trained small models on the emulated NCCL."""
    with gzip.open(path, "rt") as lines:
        runs = [json.loads(line) for line in lines]
    return [_recorded(run) for run in runs]


def _recorded(run: dict[str, Any]) -> Sequence:
    collectives, n_bytes = np.array(run["collective"], np.int64), np.array(run["message_bytes"], np.int64)
    starts = tuple(run["step_starts"])
    settled = slice(starts[SETTLED_STEP], starts[SETTLED_STEP + 1])
    tiny = (collectives[settled] == Collective.all_reduce) & (n_bytes[settled] <= TINY_BYTES)
    framework, stage, n_micro = run["framework"], Stage[run["stage"]], run["n_micro"]
    sharded = framework.startswith("fsdp") or stage is Stage.zero3
    if framework == "deepspeed" and stage is Stage.zero3 and not run.get("releases"):
        stage = Stage.zero2  # parameters stay from forward to backward, as in FSDP without resharding: 2 x the model
    sends_last = run.get("sync_last_only") or framework in ("ddp", "zero_redundancy") or stage is Stage.zero1
    training = TrainingKind(
        stage, n_micro, not sends_last or n_micro == 1, sharded or n_micro == 1, bool(tiny.any()),
        bool(run.get("partitioned")), run.get("tensor_parallel", 1) > 1, framework == "zero_redundancy",
    )  # fmt: skip
    options = ("clip", "log_loss", "bucket_mb", "sync_last_only", "all_reduce", "partitioned")
    tags = ",".join(f"{name}={run[name]}" for name in options if run.get(name))
    return Sequence(
        "recorded", framework, f"{framework} {stage.name} {run['model']} x{n_micro} {tags}",
        training, collectives, n_bytes, np.array(run["start_us"], np.int64), starts,
    )  # fmt: skip


def generated(n_each: int, seed: int, n_steps: int = 4) -> Iterator[Sequence]:
    """Runs of every framework that the generator knows, and of each other workload.

    Args:
        n_each: runs per framework and workload; runs with too many blocks per step are left out.
        n_steps: steps per run.
    """
    rng = np.random.default_rng(seed)
    for framework in generator.FRAMEWORKS:
        for _ in range(n_each):
            run = generator.setup(framework, rng)
            if len(run.units) * run.training.n_micro > MAX_BLOCKS_PER_STEP:
                continue
            (collectives, n_bytes, start_us), starts = generator.play(run, n_steps, rng)
            group = next(group for group in _GROUPS if framework.startswith(group))
            name = f"{framework} {run.model.family} x{run.training.n_micro}"
            yield Sequence(
                "generated", group, name, run.training, collectives, n_bytes, start_us, tuple(starts)
            )
    for kind in OTHERS:
        for _ in range(n_each):
            (collectives, n_bytes, start_us), starts = other(kind, rng, n_steps)
            yield Sequence(
                "generated", f"other_{kind}", kind,
                TrainingKind(Stage.unknown, has_marker=True, tensor_parallel=kind == "inference"), collectives, n_bytes,
                start_us, tuple(starts),
            )  # fmt: skip


def hypothetical(n: int, seed: int, n_steps: int = 4) -> Iterator[Sequence]:
    """`n` runs of frameworks that do not exist; one of six is no training at all."""
    rng = np.random.default_rng(seed)
    n_found = 0
    while n_found < n:
        if rng.random() < SHARE_NO_TRAINING:
            kind = str(rng.choice(no_training.KINDS))
            training = TrainingKind(Stage.unknown, has_marker=True, tensor_parallel=kind == "activations")
            columns, starts = no_training.play(kind, n_steps, rng)
        else:
            run = grammar.draw(rng)
            if run.n_calls > MAX_CALLS_PER_STEP:
                continue
            kind, training = run.training.stage.name, run.training
            columns, starts = grammar.play(run, n_steps, rng)
        n_found += 1
        yield Sequence("hypothetical", "hypothetical", kind, training, *columns, tuple(starts))


def disturbed(codes: Ints, gaps_us: Floats, rng: np.random.Generator, rate: float) -> tuple[Ints, Floats]:
    """Disturb calls as records are: some lost, neighbours exchanged, noise on the gaps.

    Args:
        codes: calls, shape [n].
        gaps_us: time before each, shape [n].
        rate: share of the calls, 0 to 1: half of them lost, half exchanged with a neighbour of another kind.
    """
    keep = rng.random(len(codes)) >= rate / 2
    if not keep.any():
        return codes, gaps_us
    codes, gaps_us = codes[keep], gaps_us[keep] * np.exp(0.2 * rng.standard_normal(int(keep.sum())))
    for at in np.flatnonzero(rng.random(len(codes) - 1) < rate / 2).tolist():
        if codes[at] != codes[at + 1]:
            codes[[at, at + 1]] = codes[[at + 1, at]]
    return codes, gaps_us


def one_step(sequence: Sequence, rng: np.random.Generator, *, has_gaps: bool, rate: float) -> tuple[Ints, Floats]:
    """One settled step, cut at a random place and reduced to its period, as the step cutter returns it.

    Args:
        has_gaps: False: all gaps are 0, as if times were unknown.
        rate: see `disturbed`; 0: nothing is disturbed.

    Returns:
        Codes and gaps (us) of the calls, each [n].
    """
    number = int(rng.integers(min(SETTLED_STEP, len(sequence.step_starts) - 2), len(sequence.step_starts) - 1))
    where = sequence.step(number)
    length = where.stop - where.start
    shift = int(rng.integers(0, max(1, length)))
    cut = slice(where.start + shift, where.stop + shift)
    codes, gaps_us = sequence.codes()[cut], sequence.gaps_us()[cut]
    period = next((p for p in range(1, length) if length % p == 0 and (np.roll(codes, p) == codes).all()), length)
    codes, gaps_us = codes[:period], gaps_us[:period]
    if rate:
        codes, gaps_us = disturbed(codes, gaps_us, rng, rate)
    return codes, gaps_us if has_gaps else np.zeros(len(codes))
