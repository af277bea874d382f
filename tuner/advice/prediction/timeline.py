"""The one simulator of a training step: computation beside streams of collectives, for `replay`, `advise` and reports.

A program is a list of operations in the order in which a rank carries them out: compute for so long, issue a
collective, wait for one. A collective starts when it has been issued and its stream is free. A wait stops computation
until the collective's end; that time is *exposed* communication. While collectives run they hold channels, which take
processors from computation. A program may be repeated, so a wait may precede its own issue: then it is for the
previous step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

Slowdown = Callable[[int], float]


class OpKind(IntEnum):
    """The kind of an operation."""

    compute = 0
    issue = 1
    wait = 2


class Op(NamedTuple):
    """One operation: an issue or wait has `at`, the collective's number in the step; computation has `us`, its time."""

    kind: OpKind
    at: int = -1
    us: float = 0.0


@dataclass(frozen=True)
class StreamCall:
    """One collective of the step."""

    stream: int
    logged_us: float
    """Its duration, unless durations are given."""
    logged_channels: int = 0
    """Channels it holds, unless channels are given; 0 = unknown."""
    launch_us: float = 0.0
    """Time from its predecessor's end on the stream to its start, if it was queued."""
    skew_us: float = 0.0
    """Time from its issue to its start if the stream is free, as the last rank arrives later."""
    after: int = -1
    """Number of a collective on another stream that must have ended; -1: none."""


Call = TypeVar("Call", bound=StreamCall)


@dataclass(frozen=True)
class Program(Generic[Call]):
    """A step: its collectives, and the order of its operations."""

    calls: tuple[Call, ...]
    ops: tuple[Op, ...]
    slowdown: Slowdown | None = None
    """Factor >= 1 on computation, by the number of held channels; None: unknown, hence 1."""

    @property
    def compute_us(self) -> float:
        """Computation in one step, undisturbed."""
        return sum(op.us for op in self.ops if op.kind is OpKind.compute)

    @property
    def communication_us(self) -> float:
        """Sum of the collectives' durations."""
        return sum(call.logged_us for call in self.calls)


class StepRun(NamedTuple):
    """One repetition of a program."""

    end_us: float
    exposed_us: float
    starts_us: tuple[float, ...]


class StepTime(NamedTuple):
    """A step in the steady state."""

    step_us: float
    exposed_us: float


class Span(NamedTuple):
    """The time of an operation: computation, a collective on its stream, or the held-up part of a wait."""

    op: Op
    begin_us: float
    end_us: float


class Timeline:
    """A rank's computation, its streams, and the channels held beside the computation."""

    def __init__(self) -> None:
        self._free_us: dict[int, float] = {}
        self._ends_us: list[float] = []
        self._holds: list[tuple[float, float, int]] = []
        self._now_us = 0.0

    def step(
        self,
        program: Program[Call],
        durations_us: Sequence[float] | None = None,
        channels: Sequence[int] | None = None,
        spans: list[Span] | None = None,
        compute: Callable[[float, Slowdown], None] | None = None,
    ) -> StepRun:
        """Simulate a program once, from the end of the previous one; returns its end, since the first step began.

        If the program differs from the previous one, no wait may precede its issue.

        Args:
            durations_us: of its collectives, shape (n_calls,); None: as logged.
            channels: of each collective, shape (n_calls,); None: as logged.
            spans: gets the times of all operations.
            compute: moves the clock by computation that held channels slow down; None: `_work`.
        """
        calls, slowdown, free_us = program.calls, program.slowdown, self._free_us
        if len(self._ends_us) != len(calls):
            self._ends_us = [0.0] * len(calls)
        compute, ends_us, starts_us = compute or self._work, self._ends_us, [0.0] * len(calls)
        is_compute, is_issue = OpKind.compute, OpKind.issue  # names of the inner loop
        now_us, exposed_us = self._now_us, 0.0
        for op in program.ops:
            kind, at, compute_us = op
            begin_us = now_us
            if kind is is_compute:
                if slowdown is None:
                    now_us += compute_us
                else:
                    self._now_us = now_us
                    compute(compute_us, slowdown)
                    now_us = self._now_us
            elif kind is is_issue:
                call = calls[at]
                begin_us = max(begin_us + call.skew_us, free_us.get(call.stream, 0.0) + call.launch_us)
                if call.after >= 0:
                    begin_us = max(begin_us, ends_us[call.after])
                end_us = begin_us + (call.logged_us if durations_us is None else durations_us[at])
                starts_us[at], ends_us[at], free_us[call.stream] = begin_us, end_us, end_us
                if slowdown is not None and (held := call.logged_channels if channels is None else channels[at]):
                    self._holds.append((begin_us, end_us, held))
                if spans is not None:
                    spans.append(Span(op, begin_us, end_us))
                continue
            elif ends_us[at] > now_us:
                exposed_us += ends_us[at] - now_us
                now_us = ends_us[at]
            if spans is not None and now_us > begin_us:
                spans.append(Span(op, begin_us, now_us))
        self._now_us = now_us
        return StepRun(now_us, exposed_us, tuple(starts_us))

    def _work(self, work_us: float, slowdown: Slowdown) -> None:
        """Compute for a time that is `work_us` if undisturbed."""
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

    def _factor(self, slowdown: Slowdown) -> tuple[float, float]:
        """Factor by which computation is slowed now, and until when (us)."""
        now_us = self._now_us
        self._holds = [hold for hold in self._holds if hold[1] > now_us + 1e-9]
        n_channels = sum(hold[2] for hold in self._holds if hold[0] <= now_us)
        until_us = min((hold[1] if hold[0] <= now_us else hold[0] for hold in self._holds), default=math.inf)
        return (slowdown(n_channels) if n_channels else 1.0), until_us


def run(
    program: Program[Call], durations_us: Iterable[Sequence[float]], channels: Sequence[int] | None = None
) -> list[StepRun]:
    """Repeat a program, each time with other durations, shape (n_calls,); `channels` as in `Timeline.step`."""
    timeline = Timeline()
    return [timeline.step(program, durations, channels) for durations in durations_us]


def steady_step(
    program: Program[Call], durations_us: Sequence[float] | None = None, channels: Sequence[int] | None = None
) -> StepTime:
    """Step time and exposed communication in the steady state; the arguments are those of `Timeline.step`."""
    timeline = Timeline()
    # The first repetition fills the pipeline; a few more reach the steady state.
    before, last = [timeline.step(program, durations_us, channels) for _ in range(4)][-2:]
    return StepTime(last.end_us - before.end_us, last.exposed_us)


def undisturbed(program: Program[Call], slowdown: Slowdown) -> Program[Call]:
    """`program` with its computation's time alone; the log has it slowed down by collectives."""
    timeline, program = Timeline(), replace(program, slowdown=slowdown)
    works_us: list[float] = []
    for _ in range(3):  # the last repetition counts
        works_us.clear()
        timeline.step(program, compute=lambda us, slowed: works_us.append(timeline.elapse(us, slowed)))
    works = iter(works_us)
    ops = tuple(op._replace(us=next(works)) if op.kind is OpKind.compute else op for op in program.ops)
    return replace(program, ops=ops)
