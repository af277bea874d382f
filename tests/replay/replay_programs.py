"""Programs of training steps, and the logs that they would have written."""

from __future__ import annotations

import numpy as np
from replay_traces import FABRIC, MIB

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.records import Algorithm, Collective, Phase, Protocol
from zerotune.store.trace_format import STEP_FIELDS
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.advice.prediction.timeline import Op, OpKind, Program, run
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape
from zerotune.tuner.offline.replay.usual_steps import TimelineCall

GATHER, SCATTER, REDUCE = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce


def call(phase: Phase, collective: Collective, us: float, message_bytes: int = MIB, stream: int = 0) -> TimelineCall:
    return TimelineCall(stream, us, 8, shape=Shape(2, 2, collective, phase, message_bytes))


def compute(us: float) -> Op:
    return Op(OpKind.compute, us=us)


def issue(at: int) -> Op:
    return Op(OpKind.issue, at)


def wait(at: int) -> Op:
    return Op(OpKind.wait, at)


def ddp(gradient_us: float = 300.0, n_buckets: int = 4) -> Program:
    """Buckets issued every 200 us of the backward pass, waited for at its end."""
    calls = [call(Phase.gradient_scatter, REDUCE, gradient_us, MIB * (1 + at % 2)) for at in range(n_buckets)]
    ops = [compute(800.0)]
    for at in range(n_buckets):
        ops += [compute(200.0), issue(at)]
    return Program(tuple(calls), (*ops, *(wait(at) for at in range(n_buckets)), compute(100.0)))


def zero3(gather_us: float = 150.0, scatter_us: float = 150.0, n_units: int = 4, layer_us: float = 100.0) -> Program:
    """Each unit's gather is prefetched by one unit, forward and backward; scatters are waited for at the end."""
    forward = [call(Phase.forward_gather, GATHER, gather_us) for _ in range(n_units)]
    backward = [call(Phase.backward_gather, GATHER, gather_us) for _ in range(n_units)]
    scatters = [call(Phase.gradient_scatter, SCATTER, scatter_us) for _ in range(n_units)]
    ops: list[Op] = [issue(0)]
    for at in range(n_units):
        ops += [wait(at)]
        ops += [issue(at + 1)] if at + 1 < n_units else []
        ops += [compute(layer_us)]
    ops += [compute(20.0), issue(n_units)]
    for at in range(n_units):
        ops += [wait(n_units + at)]
        ops += [issue(n_units + at + 1)] if at + 1 < n_units else []
        ops += [compute(2 * layer_us), issue(2 * n_units + at)]
    ops += [wait(2 * n_units + at) for at in range(n_units)]
    return Program((*forward, *backward, *scatters), (*ops, compute(60.0)))


def log_of(program: Program, *, noise: float = 0.05, n_steps: int = 30, seed: int = 3) -> CollectiveTable:
    """What --log-trace would have written, had `program` run with noisy durations."""
    chance = np.random.default_rng(seed)
    logged_us = np.array([one.logged_us for one in program.calls])
    durations_us = logged_us * chance.lognormal(0.0, noise, (n_steps, len(logged_us)))
    runs = run(program, durations_us.tolist())
    rows = np.zeros(durations_us.size, OBSERVATION_FIELDS)
    shapes = [one.shape for one in program.calls] * n_steps
    rows["message_bytes"] = [shape.message_bytes for shape in shapes]
    rows["collective"] = [shape.collective for shape in shapes]
    rows["phase"] = [shape.phase for shape in shapes]
    rows["n_ranks"], rows["n_nodes"], rows["n_channels"] = 2, 2, 8
    rows["algorithm"], rows["protocol"], rows["flags"] = Algorithm.ring, Protocol.simple, 2
    rows["comm_id"] = np.tile([7 + one.stream for one in program.calls], n_steps)
    rows["step"] = np.repeat(np.arange(n_steps), len(logged_us))
    rows["sequence"] = np.arange(len(rows))
    rows["duration_us"] = durations_us.ravel()
    rows["start_ns"] = (np.array([one.starts_us for one in runs]).ravel() * 1e3).astype(np.int64)
    order = np.argsort(rows["start_ns"], kind="stable")
    ends_us = np.array([one.end_us for one in runs])
    steps = np.zeros(n_steps, STEP_FIELDS)
    steps["step"] = np.arange(n_steps)
    steps["duration_us"] = np.diff(ends_us, prepend=0.0)
    steps["exposed_us"] = [one.exposed_us for one in runs]
    described = fabrics.load(FABRIC)
    return CollectiveTable(
        rows=rows[order],
        duration_us=rows["duration_us"][order],
        is_default=np.ones(len(rows), bool),
        steps=steps,
        fabric_id=described.fabric_id,
        fabric=described.describe(),
        is_emulated=True,
    )
