"""Another job's step from this one's: other buckets, another ZeRO stage, more ranks.

All changes keep the computation and its order; collectives are moved, merged, split, dropped or added at
*positions*, the amount of the step's computation done before them. Gradients become ready evenly over the
computation between the issues of their buckets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from ....store.errors import UserError
from ....store.records import Collective, Phase
from ...advice.prediction.timeline import Op, OpKind, Program, Slowdown
from .table import Shape
from .usual_steps import TimelineCall

StepProgram = Program[TimelineCall]

GATHERS: Final = (Phase.forward_gather, Phase.backward_gather)
ALIKE: Final = 0.01
"""Bucket sizes that differ by less count as equal: users round, and ranks pad."""
BACKWARD_OVER_FORWARD: Final = 2.0
"""A backward pass computes twice as much as the forward pass."""


@dataclass(frozen=True)
class _Event:
    """An issue or a wait at a position; a collective's two events share `call`."""

    position_us: float
    call: TimelineCall
    is_wait: bool


@dataclass
class _Step:
    """A program as a list of events."""

    events: list[_Event]
    compute_us: float

    @classmethod
    def of(cls, program: StepProgram) -> _Step:
        position_us, events = 0.0, []
        # Equal calls must stay distinct, so each gets its own object.
        calls = [replace(call) for call in program.calls]
        for kind, at, compute_us in program.ops:
            if kind is OpKind.compute:
                position_us += compute_us
            else:
                events.append(_Event(position_us, calls[at], kind is OpKind.wait))
        return cls(events, position_us)

    def issues(self, phase: Phase) -> list[_Event]:
        return [event for event in self.events if not event.is_wait and event.call.shape.phase is phase]

    def waits_of(self, call: TimelineCall) -> list[_Event]:
        return [event for event in self.events if event.is_wait and event.call is call]

    def drop(self, *phases: Phase) -> None:
        self.events = [event for event in self.events if event.call.shape.phase not in phases]

    def add(self, issue_us: float, wait_us: float, call: TimelineCall) -> None:
        """Issue `call` after the operations at its position, and wait for it before those at the wait's position."""
        at = self._index(issue_us, bisect_right)
        self.events.insert(at, _Event(issue_us, call, is_wait=False))
        at = self._index(wait_us, bisect_left) if wait_us > issue_us else at + 1
        self.events.insert(at, _Event(wait_us, call, is_wait=True))

    def _index(self, position_us: float, bisect: Callable[[list[float], float], int]) -> int:
        return bisect([event.position_us for event in self.events], position_us)

    def program(self, slowdown: Slowdown | None) -> StepProgram:
        ordered = sorted(self.events, key=lambda event: event.position_us)
        numbers: dict[int, int] = {}
        calls: list[TimelineCall] = []
        for event in ordered:
            if not event.is_wait:
                numbers[id(event.call)] = len(calls)
                calls.append(event.call)
        ops: list[Op] = []
        position_us = 0.0
        for event in ordered:
            if event.position_us > position_us:
                ops.append(Op(OpKind.compute, us=event.position_us - position_us))
                position_us = event.position_us
            ops.append(Op(OpKind.wait if event.is_wait else OpKind.issue, numbers[id(event.call)]))
        if self.compute_us > position_us:
            ops.append(Op(OpKind.compute, us=self.compute_us - position_us))
        return Program(tuple(calls), tuple(ops), slowdown)


def _new_call(origin: TimelineCall, shape: Shape) -> TimelineCall:
    """A collective that the trace does not have; its `logged_us` is unknown until its cost is estimated."""
    return replace(origin, shape=shape, logged_us=0.0, launch_us=0.0, logged_channels=0)


def _gather_of(unit: TimelineCall, phase: Phase) -> TimelineCall:
    return _new_call(unit, replace(unit.shape, collective=Collective.all_gather, phase=phase))


def with_ranks(program: StepProgram, n_ranks: int, n_nodes: int) -> StepProgram:
    """The model's step on another number of ranks: communicators of all ranks change, total bytes stay.

    Durations of changed collectives are unknown until their costs are estimated.
    """
    world = max(call.shape.n_ranks for call in program.calls)

    def changed(call: TimelineCall) -> TimelineCall:
        if call.shape.n_ranks != world:
            return call
        return _new_call(call, replace(call.shape, n_ranks=n_ranks, n_nodes=n_nodes))

    return replace(program, calls=tuple(map(changed, program.calls)))


def with_buckets(program: StepProgram, bucket_bytes: int) -> StepProgram:
    """The step with gradients in buckets of `bucket_bytes` (the last may be smaller), each sent once it is complete.

    If the gathers after the step move the same bytes as the gradients' buckets, they change in the same way.

    Raises:
        UserError: the step has no gradient collectives, or a single one, which does not show when they were ready.
    """
    step = _Step.of(program)
    sizes = [event.call.shape.message_bytes for event in step.issues(Phase.gradient_scatter)]
    if sizes and _are_filled_to(sizes, bucket_bytes):
        return program
    if len(sizes) < 2:
        raise UserError(
            "the trace's steps have no two gradient buckets: when gradients became ready is not known",
            "log a run with smaller buckets",
        )
    gathered = [event.call.shape.message_bytes for event in step.issues(Phase.post_step_gather)]
    _rebucket(step, Phase.gradient_scatter, bucket_bytes)
    if sorted(gathered) == sorted(sizes):
        _rebucket(step, Phase.post_step_gather, bucket_bytes)
    return step.program(program.slowdown)


def _rebucket(step: _Step, phase: Phase, bucket_bytes: int) -> None:
    buckets = step.issues(phase)
    sizes = [float(event.call.shape.message_bytes) for event in buckets]
    ready_bytes, ready_us = _readiness(buckets)
    total_bytes = int(sum(sizes))
    step_end_us = max(wait.position_us for event in buckets for wait in step.waits_of(event.call))
    held_back = [step.waits_of(event.call)[0].position_us > event.position_us for event in buckets]
    step.drop(phase)
    n_buckets = -(-total_bytes // bucket_bytes)
    ends = [min((number + 1) * bucket_bytes, total_bytes) for number in range(n_buckets)]
    positions = np.interp(ends, ready_bytes, ready_us).tolist()
    waits_at_end = sum(held_back) * 2 >= len(held_back)
    before = 0
    for end, position_us in zip(ends, positions, strict=True):
        origin = buckets[min(int(np.searchsorted(np.cumsum(sizes), end)), len(buckets) - 1)].call
        unit = origin.shape.n_ranks
        message_bytes = -(-(end - before) // unit) * unit
        call = _new_call(origin, replace(origin.shape, message_bytes=message_bytes))
        step.add(position_us, max(step_end_us, position_us) if waits_at_end else position_us, call)
        before = end


def _are_filled_to(sizes: Sequence[int], bucket_bytes: int) -> bool:
    """Whether the buckets were filled up to `bucket_bytes`: none is larger, and no two neighbours fit into one."""
    most = bucket_bytes * (1 + ALIKE)
    return max(sizes) <= most and all(one + other > most for one, other in pairwise(sizes))


def _readiness(buckets: Sequence[_Event]) -> tuple[list[float], list[float]]:
    """Cumulated gradient bytes, and the positions at which they are ready, from the start of backward."""
    sizes = np.array([event.call.shape.message_bytes for event in buckets], np.float64)
    positions = np.maximum.accumulate([event.position_us for event in buckets])
    span_us = positions[-1] - positions[0]
    rate = span_us / sizes[1:].sum() if len(sizes) > 1 else 0.0
    begin_us = max(positions[0] - rate * sizes[0], 0.0)
    return [0.0, *np.cumsum(sizes).tolist()], [begin_us, *positions.tolist()]


def stage_of(program: StepProgram) -> int:
    """The ZeRO stage of the step's collectives; 0 is plain data parallelism, 2 stands for 1 too.

    Raises UserError if they are of no stage.
    """
    kinds = {(call.shape.collective, call.shape.phase) for call in program.calls}
    if any(phase in GATHERS for _, phase in kinds):
        return 3
    if (Collective.reduce_scatter, Phase.gradient_scatter) in kinds:
        return 2
    if (Collective.all_reduce, Phase.gradient_scatter) in kinds:
        return 0
    raise UserError(
        "the trace's steps have no gradient collectives that are marked as such", "drop --stage for this trace"
    )


def with_stage(program: StepProgram, stage: int) -> StepProgram:
    """The model's step under another ZeRO stage (1 and 2 communicate alike, 0 is plain DDP).

    Raises:
        UserError: the trace's own stage is not recognised, or `stage` does not exist.
    """
    if stage not in (0, 1, 2, 3):
        raise UserError(f"there is no ZeRO stage {stage}", "use 0 (DDP), 1, 2 or 3")
    now, wanted = stage_of(program), 2 if stage == 1 else stage
    if now == wanted:
        return program
    step = _Step.of(program)
    scatters = step.issues(Phase.gradient_scatter)
    gathers = step.issues(Phase.forward_gather)
    units = [event.call for event in gathers or step.issues(Phase.post_step_gather) or reversed(scatters)]
    _, ready_us = _readiness(scatters)
    backward_us, end_us = ready_us[0], ready_us[-1]
    step.drop(*GATHERS, Phase.post_step_gather)
    collective = Collective.all_reduce if wanted == 0 else Collective.reduce_scatter
    renamed = {
        id(event.call): replace(event.call, shape=replace(event.call.shape, collective=collective), logged_us=0.0)
        for event in scatters
        if event.call.shape.collective is not collective
    }
    step.events = [replace(event, call=renamed.get(id(event.call), event.call)) for event in step.events]
    if wanted == 3:
        _add_unit_gathers(step, units, backward_us, end_us)
    elif wanted == 2:
        # Every parameter must be gathered when the forward pass begins.
        last_wait_us = max((event.position_us for event in step.events if event.is_wait), default=end_us)
        forward_us = gathers[0].position_us if gathers else 0.0
        at_us = forward_us if forward_us > end_us else max(last_wait_us, end_us)
        added = [_gather_of(unit, Phase.post_step_gather) for unit in units]
        step.events += [_Event(at_us, call, is_wait) for is_wait in (False, True) for call in added]
    return step.program(program.slowdown)


def _add_unit_gathers(step: _Step, units: Sequence[TimelineCall], backward_us: float, end_us: float) -> None:
    """Issue each unit's gather when its predecessor begins to compute, and wait for it before the unit computes.

    The last unit of the forward pass is the first of the backward pass, and is still gathered.
    """
    forward_span_us = min((end_us - backward_us) / BACKWARD_OVER_FORWARD, backward_us)
    shares = np.cumsum([0.0, *(float(unit.shape.message_bytes) for unit in units)])
    shares /= shares[-1]
    begins = {
        Phase.forward_gather: (backward_us - forward_span_us + shares[:-1] * forward_span_us).tolist(),
        Phase.backward_gather: (backward_us + (1 - shares[1:-1][::-1]) * (end_us - backward_us)).tolist(),
    }
    for phase, begin_us in begins.items():
        ordered = units if phase is Phase.forward_gather else reversed(units[:-1])
        calls = [_gather_of(unit, phase) for unit in ordered]
        events = [_Event(begin_us[0], call, is_wait=False) for call in calls[:1]]
        for at, call in enumerate(calls):
            events.append(_Event(begin_us[at], call, is_wait=True))
            events.extend(_Event(begin_us[at], following, is_wait=False) for following in calls[at + 1 : at + 2])
        # Before gradients that are ready at the same position.
        step.events = events + step.events
