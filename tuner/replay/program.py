"""One training step as a program on two kinds of timelines: computation, and one stream per communicator.

The program is a list of operations in the order in which a rank carries them out: compute for so long, issue
a collective, wait for one. A collective starts when it has been issued and its stream is free; a wait holds
computation up until the collective's end, and what it holds up is *exposed* communication. A step's program
is repeated without end, so a wait may stand before its own issue: then it is for the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tuner.replay.table import Shape


class OpKind(IntEnum):
    """What an operation does."""

    compute = 0
    issue = 1
    wait = 2


class Op(NamedTuple):
    """`at` is the collective's number in the step, for issue and wait; `us` the time, for compute."""

    kind: OpKind
    at: int = -1
    us: float = 0.0


@dataclass(frozen=True)
class Call:
    """One collective of the step."""

    shape: Shape
    stream: int
    logged_us: float
    """Median of what the trace shows at this place of the step."""
    launch_us: float = 0.0
    """From the end of its predecessor on the stream to its own start, where it had been queued."""


@dataclass(frozen=True)
class Program:
    """A step: its collectives, and the order of everything."""

    calls: tuple[Call, ...]
    ops: tuple[Op, ...]

    @property
    def compute_us(self) -> float:
        """Computation in one step."""
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


def run(program: Program, durations_us: Iterable[Sequence[float]]) -> list[StepRun]:
    """Repeat `program`, each time with the durations given for its collectives."""
    calls = program.calls
    free_us = [0.0] * (1 + max((call.stream for call in calls), default=0))
    ends_us = [0.0] * len(calls)
    now_us = 0.0
    runs = []
    for durations in durations_us:
        exposed_us = 0.0
        starts_us = [0.0] * len(calls)
        for kind, at, compute_us in program.ops:
            if kind == OpKind.compute:
                now_us += compute_us
            elif kind == OpKind.issue:
                call = calls[at]
                queued_us = free_us[call.stream] + call.launch_us
                start_us = now_us if now_us > queued_us else queued_us
                starts_us[at] = start_us
                ends_us[at] = free_us[call.stream] = start_us + durations[at]
            elif ends_us[at] > now_us:
                exposed_us += ends_us[at] - now_us
                now_us = ends_us[at]
        runs.append(StepRun(now_us, exposed_us, tuple(starts_us)))
    return runs


def steady_step(program: Program, durations_us: Sequence[float] | None = None) -> StepTime:
    """Step time and exposed communication once steps repeat; `durations_us` instead of the logged ones."""
    durations = [call.logged_us for call in program.calls] if durations_us is None else durations_us
    # The first repetition fills the pipeline; what is left to settle settles in a few more.
    before, last = run(program, [durations] * 4)[-2:]
    return StepTime(last.end_us - before.end_us, last.exposed_us)
