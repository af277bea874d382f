"""One training step as a program on two kinds of timelines: computation, and one stream per communicator.

The program is a list of operations in the order in which a rank carries them out: compute for so long, issue
a collective, wait for one. A collective starts when it has been issued and its stream is free; a wait holds
computation up until the collective's end, and what it holds up is *exposed* communication. While collectives
run they hold channels, which take processors from computation. A step's program is repeated without end, so a
wait may stand before its own issue: then it is for the step before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from zerotune.tuner.offline.replay.table import Shape

Slowdown = Callable[[int], float]


class OpKind(IntEnum):
    """What an operation does."""

    compute = 0
    issue = 1
    wait = 2


class Op(NamedTuple):
    """One operation: an issue or wait has `at`, the collective's number in the step; computation has `us`, its time."""

    kind: OpKind
    at: int = -1
    us: float = 0.0


@dataclass(frozen=True)
class TimelineCall:
    """One collective of the step."""

    shape: Shape
    stream: int
    logged_us: float
    """Median of what the trace shows at this place of the step."""
    logged_channels: int = 0
    """Channels it ran on, usually; 0 = unknown."""
    launch_us: float = 0.0
    """Time from the end of its predecessor on the stream to its own start, where it had been queued."""


@dataclass(frozen=True)
class Program:
    """A step: its collectives, and the order of everything."""

    calls: tuple[TimelineCall, ...]
    ops: tuple[Op, ...]
    slowdown: Slowdown | None = None
    """Factor >= 1 on computation, by the number of channels that are held; None: not known, taken as 1."""

    @property
    def compute_us(self) -> float:
        """Computation in one step, undisturbed."""
        return sum(op.us for op in self.ops if op.kind is OpKind.compute)

    @property
    def communication_us(self) -> float:
        """Sum of the logged durations."""
        return sum(call.logged_us for call in self.calls)


class StepRun(NamedTuple):
    """One repetition of a program."""

    end_us: float
    exposed_us: float
    starts_us: tuple[float, ...]
    """Start of each collective."""


class StepTime(NamedTuple):
    """A step in the steady state."""

    step_us: float
    exposed_us: float


class _Timeline:
    """A rank's computation, its streams, and who holds channels beside the computation."""

    def __init__(self, program: Program, channels: Sequence[int] | None = None) -> None:
        calls = program.calls
        self._program = program
        self._channels = [call.logged_channels for call in calls] if channels is None else channels
        self._free_us = [0.0] * (1 + max((call.stream for call in calls), default=0))
        self._ends_us = [0.0] * len(calls)
        self._holds: list[tuple[float, float, int]] = []
        self._now_us = 0.0

    def step(self, durations_us: Sequence[float], compute: Callable[[float], None]) -> StepRun:
        """Play the program once; `compute` is called with the time of each computation and moves the clock."""
        calls, ends_us = self._program.calls, self._ends_us
        exposed_us = 0.0
        starts_us = [0.0] * len(calls)
        for kind, at, compute_us in self._program.ops:
            if kind == OpKind.compute:
                compute(compute_us)
            elif kind == OpKind.issue:
                call = calls[at]
                start_us = max(self._now_us, self._free_us[call.stream] + call.launch_us)
                starts_us[at] = start_us
                ends_us[at] = self._free_us[call.stream] = start_us + durations_us[at]
                if self._channels[at]:
                    self._holds.append((start_us, ends_us[at], self._channels[at]))
            elif ends_us[at] > self._now_us:
                exposed_us += ends_us[at] - self._now_us
                self._now_us = ends_us[at]
        return StepRun(self._now_us, exposed_us, tuple(starts_us))

    def work(self, work_us: float, slowdown: Slowdown) -> None:
        """Compute what takes `work_us` undisturbed."""
        while work_us > 1e-9:
            factor, until_us = self._factor(slowdown)
            done_us = min((until_us - self._now_us) / factor, work_us)
            work_us -= done_us
            self._now_us += done_us * factor

    def elapse(self, elapsed_us: float, slowdown: Slowdown) -> float:
        """Compute for `elapsed_us`; returns the time that this would have taken undisturbed (us)."""
        work_us = 0.0
        while elapsed_us > 1e-9:
            factor, until_us = self._factor(slowdown)
            passed_us = min(until_us - self._now_us, elapsed_us)
            work_us += passed_us / factor
            elapsed_us -= passed_us
            self._now_us += passed_us
        return work_us

    def pause(self, elapsed_us: float) -> None:
        """Compute for `elapsed_us`, not slowed by collectives."""
        self._now_us += elapsed_us

    def _factor(self, slowdown: Slowdown) -> tuple[float, float]:
        """Factor by which computation is slowed now, and until when (us)."""
        now_us = self._now_us
        self._holds = [hold for hold in self._holds if hold[1] > now_us + 1e-9]
        n_channels = sum(hold[2] for hold in self._holds if hold[0] <= now_us)
        until_us = min((hold[1] if hold[0] <= now_us else hold[0] for hold in self._holds), default=math.inf)
        return (slowdown(n_channels) if n_channels else 1.0), until_us


def run(
    program: Program, durations_us: Iterable[Sequence[float]], channels: Sequence[int] | None = None
) -> list[StepRun]:
    """Repeat a program, each time with other durations.

    Args:
        program: the step.
        durations_us: for each repetition, the durations of its collectives, shape (n_calls,).
        channels: that each collective holds, shape (n_calls,); None: as logged.

    Returns:
        One run per repetition.
    """
    timeline, slowdown = _Timeline(program, channels), program.slowdown
    compute = timeline.pause if slowdown is None else partial(timeline.work, slowdown=slowdown)
    return [timeline.step(durations, compute) for durations in durations_us]


def steady_step(
    program: Program, durations_us: Sequence[float] | None = None, channels: Sequence[int] | None = None
) -> StepTime:
    """Step time and exposed communication once steps repeat.

    Args:
        program: the step.
        durations_us: of its collectives, shape (n_calls,); None: as logged.
        channels: that each collective holds, shape (n_calls,); None: as logged.

    Returns:
        The step's times in us.
    """
    durations = [call.logged_us for call in program.calls] if durations_us is None else durations_us
    # The first repetition fills the pipeline; what is left to settle settles in a few more.
    before, last = run(program, [durations] * 4, channels)[-2:]
    return StepTime(last.end_us - before.end_us, last.exposed_us)


def undisturbed(program: Program, slowdown: Slowdown) -> Program:
    """`program` with the time its computation takes alone; it was timed while collectives slowed it down."""
    timeline = _Timeline(program)
    works_us: list[float] = []
    logged_us = [call.logged_us for call in program.calls]
    for _ in range(3):  # the last repetition counts
        works_us.clear()
        timeline.step(logged_us, lambda elapsed_us: works_us.append(timeline.elapse(elapsed_us, slowdown)))
    works = iter(works_us)
    ops = tuple(op._replace(us=next(works)) if op.kind is OpKind.compute else op for op in program.ops)
    return replace(program, ops=ops, slowdown=slowdown)
