"""A plan judged by NCCL's own library before it goes to a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from ....agent.nccl.twin.protocol import Answer, Question
from ....agent.nccl.twin.twin import Cluster, ask_nccl
from ....store.records import Collective, CommunicatorClass, Phase, PlanRow, phase_name
from .choices import shareable

_MOST_BYTES: Final = 1 << 30


class RowEffect(str, Enum):
    """The effect of a row."""

    applies = "applies"
    fewer_channels = "fewer_channels"
    """NCCL runs the setting on fewer channels than the row requests."""
    ignored = "ignored"
    """NCCL does not offer this algorithm and protocol here."""
    never_matches = "never_matches"
    """No call on this cluster can match the row: another communicator, or sizes that ranks cannot share."""

    @property
    def does_something(self) -> bool:
        """Whether the row changes anything."""
        return self in (RowEffect.applies, RowEffect.fewer_channels)


class JudgedRow(msgspec.Struct, frozen=True):
    """One row with its effect."""

    row: int
    """The row's number in the plan, from 1 on."""
    collective: str
    phase: str
    min_bytes: int
    max_bytes: int
    asked: str
    effect: RowEffect
    message_bytes: int | None
    """The tried size: the largest of the row's range, at which a channel count can have an effect."""
    ran: str | None


def judge(library: Path, cluster: Cluster, rows: Sequence[PlanRow]) -> list[JudgedRow]:
    """Run each row in a libnccl.so.2; rows for other communicators never match.

    Raises:
        UserError: the ranks do not fit the topology, or a file is invalid.
        PluginError: the library failed, or NCCL does not know a row's setting.
    """
    judged, n_nodes = _judge_on(library, cluster, rows, cluster.n_nodes)
    return judged if n_nodes == cluster.n_nodes else _judge_on(library, cluster, rows, n_nodes)[0]


def _judge_on(
    library: Path, cluster: Cluster, rows: Sequence[PlanRow], n_nodes: int
) -> tuple[list[JudgedRow], int]:
    """Judge rows for a communicator of `n_nodes`; NCCL may count a node whose rings leave it as several nodes."""
    here = CommunicatorClass(cluster.n_ranks, n_nodes)
    tried = {
        number: size
        for number, row in enumerate(rows)
        if row.communicator == here and (size := _largest(row, cluster.n_ranks)) is not None
    }
    questions = [
        Question(rows[number].collective, size, phase=rows[number].phase or Phase.other)
        for number, size in tried.items()
    ]
    anything = Question(Collective.all_gather, shareable(1, cluster.n_ranks))
    own = [row for row in rows if row.communicator == here]
    *found, counted = ask_nccl(library, cluster, [*questions, anything], own).answers
    answers = dict(zip(tried, found, strict=True))
    judged = [_judged(number, row, answers.get(number)) for number, row in enumerate(rows)]
    return judged, counted.n_nodes or n_nodes


def _largest(row: PlanRow, n_ranks: int) -> int | None:
    """The largest size within the row's range that ranks can share, up to a limit; None: there is none."""
    lowest = shareable(max(row.min_bytes, 1), n_ranks)
    unit = 16 * n_ranks
    highest = min(row.max_bytes, max(_MOST_BYTES, lowest)) // unit * unit
    return highest if highest >= lowest else None


def _judged(number: int, row: PlanRow, answer: Answer | None) -> JudgedRow:
    return JudgedRow(
        row=number + 1,
        collective=row.collective.name,
        phase=phase_name(row.phase),
        min_bytes=row.min_bytes,
        max_bytes=row.max_bytes,
        asked=str(row.candidate),
        effect=_effect(row, answer),
        message_bytes=None if answer is None else answer.question.message_bytes,
        ran=None if answer is None else _ran(answer),
    )


def _effect(row: PlanRow, answer: Answer | None) -> RowEffect:
    if answer is None or not (answer.matched or answer.ignored):
        return RowEffect.never_matches
    if answer.ignored:
        return RowEffect.ignored
    is_clamped = 0 < answer.n_channels < row.candidate.n_channels
    return RowEffect.fewer_channels if is_clamped else RowEffect.applies


def _ran(answer: Answer) -> str | None:
    if answer.algorithm is None or answer.protocol is None:
        return None
    channels = f"/{answer.n_channels}ch" if answer.n_channels else ""
    return f"{answer.algorithm.name}/{answer.protocol.name}{channels}"


def without_phases(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """One of the rows that are repeated for every phase, as in tables that have no phases."""
    seen: dict[PlanRow, None] = {}
    for row in rows:
        seen[msgspec.structs.replace(row, phase=Phase.other)] = None
    return list(seen)
