"""Counts of a job's measured calls, damaged rows included."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from ...records import Collective, CommunicatorClass, DecisionKey, Outcome, Phase, size_class
from ..damage.sound_rows import EVERY_SERIES, sound_condition


class MeasuredCalls(NamedTuple):
    """Counts of a job's measurements; damaged rows count, too."""

    of_keys: dict[DecisionKey, int]
    """Only successful calls."""
    n_damaged: int
    """Rows with an impossible cell or a wrong checksum; they serve only for counting."""
    n_steps: int
    """Steps in which something was measured."""


def measured_calls(connection: sqlite3.Connection, job_id: str) -> MeasuredCalls:
    """See `Store.measured_calls`."""
    # This reads tables instead of views: a damaged row's series and job are valid if they join.
    rows = connection.execute(
        "SELECT s.n_ranks, s.n_nodes, s.collective, s.phase, s.message_bytes, s.outcome, m.n, m.n_sound FROM"
        f" (SELECT series, count(*) AS n, sum({sound_condition(connection, 'measurements')}) AS n_sound"
        " FROM main.measurements WHERE job = (SELECT id FROM jobs WHERE job_id = ?) GROUP BY series) m"
        f" JOIN {EVERY_SERIES} s ON s.id = m.series",
        (job_id,),
    ).fetchall()
    of_keys: dict[DecisionKey, int] = {}
    for n_ranks, n_nodes, collective, phase, message_bytes, outcome, n_calls, _ in rows:
        if outcome == Outcome.ok:
            communicator = CommunicatorClass(n_ranks, n_nodes)
            key = DecisionKey(communicator, Collective(collective), Phase(phase), size_class(message_bytes))
            of_keys[key] = of_keys.get(key, 0) + n_calls
    ((n_steps,),) = connection.execute(
        "SELECT count(DISTINCT step) FROM main.measurements WHERE job = (SELECT id FROM jobs WHERE job_id = ?)",
        (job_id,),
    )
    return MeasuredCalls(of_keys, sum(row[-2] - row[-1] for row in rows), n_steps)
