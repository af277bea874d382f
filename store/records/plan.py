"""Plans: which calls run under which setting."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import msgspec

from .keys import Phase
from .nccl import Candidate, Collective, CommunicatorClass
from .numbers import MessageBytes, Ordinal, Text


class PlanRow(msgspec.Struct, frozen=True):
    """One row of a plan: for messages of `min_bytes` to `max_bytes` (inclusive), use `candidate`.

    A row with a phase applies only to calls whose phase is known from the communicator's history; None: to all calls.
    """

    communicator: CommunicatorClass
    collective: Collective
    phase: Phase | None
    min_bytes: MessageBytes
    max_bytes: MessageBytes
    candidate: Candidate
    reason: Text = ""
    model_id: Text = ""

    def __post_init__(self) -> None:
        if self.candidate.lacks_protocol:
            raise ValueError(f"{self.candidate} cannot be asked for: name the protocol")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that the row applies to."""
        return tuple(Phase) if self.phase is None else (self.phase,)

    def holds_for(
        self, communicator: CommunicatorClass, collective: Collective, phase: Phase, message_bytes: int
    ) -> bool:
        """Whether the row applies to a call of a known phase."""
        place = self.communicator, self.collective
        is_there = place == (communicator, collective) and self.phase in (None, phase)
        return is_there and self.min_bytes <= message_bytes <= self.max_bytes


class NextStage(msgspec.Struct, frozen=True):
    """A plan's next stage, which comes into force under the next epoch, whatever the daemon does until then.

    `n_steps` after the previous stage came into force, `rows` replace its first `n_rows` rows.
    """

    n_steps: Ordinal
    n_rows: Ordinal
    rows: tuple[PlanRow, ...] = ()

    def __post_init__(self) -> None:
        if self.n_steps < 1 or self.n_rows < 0:
            raise ValueError(f"a stage that begins after {self.n_steps} steps and replaces {self.n_rows} rows")


MAX_STAGES: Final = 16
"""Stages that one plan may have: ZT_MAX_STAGES of zerotune_plugin.h."""


class Plan(msgspec.Struct, frozen=True):
    """An immutable table of decisions, or a short schedule of them.

    `epoch` is unique and rising within a job; 0 is the empty plan that every job starts with. `gathers_after_step` says
    that all-gathers outside backward belong to `post_step_gather` (ZeRO-1 and 2) and not to `forward_gather`
    (ZeRO-3). `then` are the stages that follow without a new plan; the last one stays in force.
    """

    epoch: Ordinal
    rows: tuple[PlanRow, ...] = ()
    gathers_after_step: bool = False
    then: tuple[NextStage, ...] = ()

    def __post_init__(self) -> None:
        if len(self.then) >= MAX_STAGES:
            raise ValueError(f"a plan of {1 + len(self.then)} stages; {MAX_STAGES} are possible")

    @property
    def control_epochs(self) -> tuple[int, ...]:
        """Epochs of its control windows: empty stages between two stages with rows."""
        stages = [stage for _, stage in self.stages()]
        three = zip(stages, stages[1:], stages[2:], strict=False)
        return tuple(own.epoch for before, own, after in three if before.rows and after.rows and not own.rows)

    @property
    def last_epoch(self) -> int:
        """Epoch of the stage that stays in force."""
        return self.epoch + len(self.then)

    def stages(self) -> list[tuple[int, Plan]]:
        """Each stage as a plan of its own, with the number of steps after which it follows the first one."""
        stages, n_steps, rows = [(0, Plan(self.epoch, self.rows, self.gathers_after_step))], 0, self.rows
        for number, stage in enumerate(self.then, 1):
            n_steps, rows = n_steps + stage.n_steps, (*stage.rows, *rows[stage.n_rows :])
            stages.append((n_steps, Plan(self.epoch + number, rows, self.gathers_after_step)))
        return stages

    def at(self, n_steps: int) -> Plan:
        """The plan in force `n_steps` after this one came into force, if no other plan comes."""
        if not self.then or n_steps < self.then[0].n_steps:
            return self
        rows = (*self.then[0].rows, *self.rows[self.then[0].n_rows :])
        return Plan(self.epoch + 1, rows, self.gathers_after_step, self.then[1:])

    def without(self, collectives: Container[Collective]) -> Plan:
        """This plan without the rows of these collectives."""
        rows, then = self.rows, []
        for stage in self.then:
            n_left = sum(row.collective not in collectives for row in rows[: stage.n_rows])
            left = tuple(row for row in stage.rows if row.collective not in collectives)
            then.append(NextStage(stage.n_steps, n_left, left))
            rows = (*stage.rows, *rows[stage.n_rows :])
        left = tuple(row for row in self.rows if row.collective not in collectives)
        return Plan(self.epoch, left, self.gathers_after_step, tuple(then))

    def at_last(self) -> Plan:
        """The stage that stays in force if no other plan comes."""
        return self.stages()[-1][1]
