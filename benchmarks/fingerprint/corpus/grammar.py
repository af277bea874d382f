"""Sequences of frameworks that do not exist: random draws of all that a data-parallel framework may do.

The kind of training fixes what a run must move. Everything else is drawn: the packing of pieces into calls,
their collective, their order, how far ahead they come, which of them are kept, and the small all-reduces of each step.
An encoder cannot learn one framework's order from it. Models are drawn as well, from no family of `model_shapes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np

from benchmarks.fingerprint.corpus.packing import (
    MAX_CALLS_PER_PASS,
    GeneratedCall,
    Packing,
    Pieces,
    draw_pieces,
    packed,
    rounded,
)
from benchmarks.fingerprint.corpus.timeline import AG, AR, BROADCAST, REDUCE, RS, Speed, Timeline
from benchmarks.fingerprint.corpus.training_kind import TrainingKind
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.steps.anatomy import TINY_BYTES, Ints

Rng = np.random.Generator

KINDS: Final = ("reduce", "update", "update", "ahead", "ahead", "twice", "twice", "twice", "alone")
"""Kinds of training.

`reduce`: gradients summed everywhere; `update`: parameters back after the step; `ahead`: gathered before forward and
kept; `twice`: gathered for forward and again for backward; `alone`: tensor parallelism alone.
"""
MIN_SHARE_TWICE: Final = 0.02
"""Least share of all parameters that is gathered a second time; with less, ZeRO-3 is not visible."""


@dataclass(frozen=True)
class DrawnRun:
    """The calls that a run repeats in every step."""

    training: TrainingKind
    units: tuple[int, ...]
    """Elements of each part that runs at once, in forward order."""
    send: Collective
    sends: tuple[GeneratedCall, ...]
    """In the order of backward: positions count from the last unit."""
    n_replicas: int
    """Number of replicas over which scattered shards are summed in a second call; 0 = there are none."""
    forward: tuple[GeneratedCall, ...]
    backward: tuple[GeneratedCall, ...]
    ahead: int
    updates: tuple[int, ...]
    """Bytes of the calls that share updated parameters."""
    update: Collective
    buffers: tuple[int, ...]
    before: tuple[int, ...]
    """Small all-reduces before the optimizer."""
    after: tuple[int, ...]
    activation_bytes: int
    n_sums: int
    """Activations summed per unit, in each direction."""
    n_partitions: int
    """Activations gathered per unit."""
    loss_bytes: int
    recomputes: bool
    scatters_activations: bool
    sends_late: bool
    """Gradients wait whole for the end of backward; no framework that frees parameters does that."""
    speed: Speed

    @property
    def n_calls(self) -> int:
        """About the number of calls per step."""
        sums = 4 * len(self.units) * self.n_sums if self.activation_bytes else 0
        return self.training.n_micro * (len(self.forward) + len(self.backward) + len(self.sends) + sums)


def draw(rng: Rng) -> DrawnRun:
    kind = str(rng.choice(KINDS))
    pieces = draw_pieces(rng)
    n_micro = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 16], p=[0.42, 0.14, 0.1, 0.12, 0.05, 0.05, 0.06, 0.03, 0.03]))
    tensor_parallel = kind == "alone" or rng.random() < 0.35
    # One unit alone that gathers its activations once looks like one bucket that is sent over and over.
    partitioned = tensor_parallel and (kind != "alone" or len(pieces) > 1) and rng.random() < 0.5
    parameter_bytes = int(rng.choice([2, 4]))
    gradient_bytes = int(rng.choice([parameter_bytes, parameter_bytes, 4]))
    n_ranks = int(rng.choice([2, 4, 8, 16, 64, 256]))
    align = int(rng.choice([1, 2 * n_ranks, 16 * n_ranks, 128 * n_ranks]))
    small = _small_all_reduces(rng)
    n_before = int(rng.integers(0, len(small) + 1))
    send = AR
    sends: tuple[GeneratedCall, ...] = ()
    if kind != "alone":
        ways = {"reduce": [0.0, 1.0, 0.0], "update": [0.4, 0.5, 0.1]}.get(kind, [0.6, 0.3, 0.1])
        send = Collective(rng.choice([RS, AR, REDUCE], p=ways))
        sends = packed([unit[::-1] for unit in pieces[::-1]], gradient_bytes, align, rng, even=kind != "reduce")
    forward, backward, leftover = _gathers(kind, pieces, parameter_bytes, align, rng)
    if kind == "twice" and len(forward) < 2:
        return draw(rng)  # all parameters at once: nothing would be saved by freeing them
    updates, update = leftover, AG
    if kind == "update":
        update = BROADCAST if send == AR and rng.random() < 0.5 else AG
        order = pieces if rng.random() < 0.6 else pieces[::-1]
        # Tensors that have one owner each need no common buffer.
        how = Packing("piece", 1.0) if update == BROADCAST and rng.random() < 0.6 else None
        updates = tuple(n_bytes for _, n_bytes in packed(order, parameter_bytes, align, rng, how))
        if how is None and rng.random() < 0.4:  # as they were sent
            updates = tuple(n_bytes * parameter_bytes // gradient_bytes for _, n_bytes in sends)
            updates = updates if rng.random() < 0.5 else updates[::-1]
    if kind == "alone" and not small and not partitioned:
        small, n_before = (4,), 1
    gathers_each = kind in ("ahead", "twice")
    training = TrainingKind(
        {"reduce": Stage.ddp, "update": Stage.zero1, "ahead": Stage.zero2, "twice": Stage.zero3}.get(
            kind, Stage.unknown
        ),
        n_micro,
        n_micro == 1 or rng.random() < (0.3 if kind == "reduce" else 0.6 if kind == "update" else 0.7),
        gathers_each or n_micro == 1,
        bool(small) or bool(leftover),
        partitioned,
        tensor_parallel,
        update == BROADCAST,
    )
    return DrawnRun(
        training, tuple(sum(unit) for unit in pieces), send, sends,
        int(rng.choice([2, 4, 8])) if send == RS and rng.random() < 0.12 else 0,
        forward, backward, int(rng.choice([0, 0, 1, 1, 2, 4, 100 if kind == "ahead" else 3])), updates, update,
        tuple(int(n) for n in rng.integers(48, 65536, 2)) if kind == "reduce" and rng.random() < 0.12 else (),
        small[:n_before], small[n_before:],
        rounded(float(np.exp(rng.uniform(np.log(4096), np.log(2e8)))), 512) if tensor_parallel else 0,
        int(rng.choice([1, 2, 2, 2, 3, 4])), int(rng.choice([1, 1, 1, 2])) if partitioned else 0,
        int(rng.choice([4096, 8192, 16384])) if tensor_parallel and rng.random() < 0.2 else 0,
        partitioned or rng.random() < 0.2,
        tensor_parallel and not partitioned and kind != "alone" and send in (AR, RS) and rng.random() < 0.2,
        kind != "twice" and bool(rng.random() < 0.15), Speed.draw(rng),
    )  # fmt: skip


def play(run: DrawnRun, n_steps: int, rng: Rng) -> tuple[tuple[Ints, Ints, Ints], list[int]]:
    """(collective, message_bytes, start in us) of all calls, and the index of each step's first call."""
    timeline, starts = Timeline(run.speed, rng), []
    for _ in range(n_steps):
        starts.append(len(timeline.collectives))
        for micro in range(run.training.n_micro):
            _micro(run, timeline, run.training.sends_each or micro == run.training.n_micro - 1)
        timeline.drain()
        for n_bytes in run.before:
            timeline.call(AR, n_bytes, waits=True)
        timeline.compute(0.1 * sum(run.units))
        for n_bytes in run.updates:
            timeline.call(run.update, n_bytes)
        for n_bytes in run.after:
            timeline.call(AR, n_bytes, waits=True)
    return timeline.columns(), starts


def _micro(run: DrawnRun, timeline: Timeline, sends: bool) -> None:
    n = len(run.units)
    if sends:
        for n_bytes in run.buffers:
            timeline.call(BROADCAST, n_bytes)
    done = 0
    for index in range(n):
        done = _issue(timeline, AG, run.forward, done, index + run.ahead)
        _pass(run, timeline, run.units[index])
    for _ in range(2 if run.loss_bytes else 0):
        timeline.call(AR, run.loss_bytes, waits=True)
    gathered = sent = 0
    for index in range(n):
        gathered = _issue(timeline, AG, run.backward, gathered, index + run.ahead)
        for _ in range(run.n_partitions):
            timeline.call(AG, run.activation_bytes, waits=True)
        if run.recomputes:
            _pass(run, timeline, run.units[n - 1 - index])
        _pass(run, timeline, 2 * run.units[n - 1 - index])
        if sends and not run.sends_late:
            sent = _send(run, timeline, sent, index)
    if sends:
        _send(run, timeline, sent, n)
        timeline.drain()


def _pass(run: DrawnRun, timeline: Timeline, n_elements: int) -> None:
    """One unit in one direction, with the sums of activations that tensor parallelism needs."""
    parts = run.n_sums if run.activation_bytes else 1
    for _ in range(parts):
        timeline.compute(n_elements / parts)
        if run.scatters_activations:
            timeline.call(AG, run.activation_bytes, waits=True)
            timeline.call(RS, run.activation_bytes, waits=True)
        elif run.activation_bytes:
            timeline.call(AR, run.activation_bytes, waits=True)


def _issue(timeline: Timeline, collective: Collective, calls: tuple[GeneratedCall, ...], done: int, until: int) -> int:
    while done < len(calls) and calls[done][0] <= until:
        timeline.call(collective, calls[done][1])
        done += 1
    return done


def _send(run: DrawnRun, timeline: Timeline, done: int, until: int) -> int:
    while done < len(run.sends) and run.sends[done][0] <= until:
        timeline.call(run.send, run.sends[done][1])
        if run.n_replicas:
            timeline.call(AR, run.sends[done][1] // run.n_replicas)
        done += 1
    return done


def _small_all_reduces(rng: Rng) -> tuple[int, ...]:
    n = int(rng.choice([0, 1, 2, 3, 4], p=[0.3, 0.3, 0.2, 0.1, 0.1]))
    return tuple(
        int(rng.choice([1, 4, 4, 8, 8, 16])) if rng.random() < 0.7 else int(rng.integers(1, TINY_BYTES + 1))
        for _ in range(n)
    )


def _gathers(
    kind: str, pieces: Pieces, n_bytes: int, align: int, rng: Rng
) -> tuple[tuple[GeneratedCall, ...], tuple[GeneratedCall, ...], tuple[int, ...]]:
    """(for forward, for backward, once after the step) of parameters that are sharded between uses."""
    if kind not in ("ahead", "twice"):
        return (), (), ()
    leftover: tuple[int, ...] = ()
    if rng.random() < 0.45:  # small tensors stay whole, and are gathered once they are updated
        limit = float(rng.choice([1000, 10_000, 100_000]))
        small = [n for unit in pieces for n in unit if n < limit]
        large = [[n for n in unit if n >= limit] for unit in pieces]
        if small and sum(map(sum, large)) > 20 * sum(small):
            pieces = large
            each = rng.random() < 0.6
            leftover = tuple(n * n_bytes for n in small) if each else (sum(small) * n_bytes,)
            leftover = leftover[: 3 * MAX_CALLS_PER_PASS]
    how = Packing.draw(rng)
    forward = packed(pieces, n_bytes, align, rng, how, starts=True)
    if kind == "ahead":
        return forward, (), leftover
    again = [list(unit) for unit in pieces[::-1]]
    for _ in range(8):
        kept = [list(unit) for unit in again]
        for index in range(int(rng.choice([0, 0, 1, 1, 2]))):
            kept[min(index, len(kept) - 1)] = []
        if rng.random() < 0.5:
            kept[-1] = []
        if sum(map(sum, kept)) >= MIN_SHARE_TWICE * sum(map(sum, again)):
            again = kept
            break
    if rng.random() < 0.7:
        again = [unit[::-1] for unit in again]
    if rng.random() < 0.25:  # a group that holds both ends of the model is needed first
        again.insert(0, again.pop())
    backward = packed(again, n_bytes, align, rng, how if rng.random() < 0.85 else Packing.draw(rng), starts=True)
    if rng.random() < 0.06:  # a unit is computed again before its backward, and freed between
        units = [list(calls) for _, calls in groupby(backward, key=itemgetter(0))]
        backward = tuple(call for calls in units for call in (*calls[::-1], *calls))
    return forward, backward, leftover
