"""Merges all jobs' measurements: each contributor counts once, and outlying contributors are set aside.

Each job of a contributor counts once. Many jobs give a contributor no more weight, as they cost nothing to invent.

    level       of a job: median ratio (log) of its times to those of others, over the settings that most others ran
    value       of a contributor at a cell (one setting at one key): the median of its jobs, at the usual level
    outlying    further from the median of all contributors than `OUTLYING_Z` times their spread (1.4826 MAD, and at
                least a floor), if `LEAST_JUDGED` or more measured it

Outlying values of a contributor are left out. The contributor is left out if its level is outlying, or more than half
of its values are.

Jobs and contributors are judged only by cells that most contributors measured. Otherwise a few contributors could shift
others by cells that only they measured, where they are the majority. Two contributors never judge each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import duckdb

from ...store.records import Algorithm, Collective, Phase, Protocol
from .book import Cell, Contributor

OUTLYING_Z: Final = 4.0
LEAST_SCALE: Final = 0.1
"""Floor (log) of the spread of contributors: a time that is 1.5 times as long is no outlier."""
LEAST_LEVEL_SCALE: Final = 0.35
"""Floor (log) of the spread of levels: another job on the links may double all times; a factor of four is outlying."""
LEAST_JUDGED: Final = 3
"""Least contributors for a judgement: if two differ, either may be wrong."""
BETWEEN_JOBS_STD: Final = 0.003
"""Usual standard deviation (log) of a setting's gain between jobs."""
MIN_GAIN: Final = 0.005
WINNER_Z: Final = 2.0
"""A winner gains (log) at least MIN_GAIN and WINNER_Z standard errors."""

_KEY: Final = "fabric_id, nccl_version, tuner_abi, n_ranks, n_nodes, collective, phase, size_class"
_SETTING: Final = "algorithm, protocol, n_channels, is_default"
_ANY: Final = ", ".join(f"any_value({name}) AS {name}" for name in f"{_KEY}, {_SETTING}".split(", "))

_LEVELLED: Final = f"""
CREATE OR REPLACE TEMP TABLE levelled AS
WITH numbered AS (
    SELECT *, dense_rank() OVER (ORDER BY fabric_id, contributor, job_id) AS job,
           dense_rank() OVER (ORDER BY {_KEY}) AS key, dense_rank() OVER (ORDER BY {_KEY}, {_SETTING}) AS cell
    FROM used),
own AS (SELECT cell, median(log_us) AS own FROM numbered GROUP BY cell, contributor),
usual AS (SELECT cell, median(own) AS usual, count(*) AS n FROM own GROUP BY cell HAVING count(*) <> 2),
common AS (
    SELECT job, log_us - usual AS longer FROM numbered JOIN usual USING (cell)
    QUALIFY n = max(n) OVER (PARTITION BY job)),
levels AS (SELECT job, median(longer) AS level FROM common GROUP BY job)
SELECT numbered.*, coalesce(level, 0) AS level, log_us - coalesce(level, 0) AS at_usual
FROM numbered LEFT JOIN levels USING (job)
"""
_JUDGED: Final = f"""
CREATE OR REPLACE TEMP TABLE judged AS
WITH own AS (
    SELECT fabric_id, contributor, cell, median(at_usual) AS own FROM levelled GROUP BY fabric_id, contributor, cell),
centre AS (
    SELECT cell, median(own) AS centre, 1.4826 * mad(own) AS scale, count(*) AS n FROM own GROUP BY cell)
SELECT own.*, n >= {LEAST_JUDGED} AND n = max(n) OVER (PARTITION BY fabric_id, contributor) AS is_judged,
       n >= {LEAST_JUDGED} AND abs(own - centre) > {OUTLYING_Z} * greatest(scale, {LEAST_SCALE}) AS is_outlying
FROM own JOIN centre USING (cell)
"""
_CONTRIBUTORS: Final = f"""
CREATE OR REPLACE TEMP TABLE judged_contributors AS
WITH own AS (
    SELECT fabric_id, contributor, median(level) AS level, count(DISTINCT job) AS n_jobs
    FROM levelled GROUP BY fabric_id, contributor),
centre AS (
    SELECT fabric_id, median(level) AS centre, 1.4826 * mad(level) AS scale, count(*) AS n FROM own GROUP BY fabric_id),
values_of AS (
    SELECT fabric_id, contributor, count(*) AS n_cells, count(*) FILTER (is_judged) AS n_judged,
           count(*) FILTER (is_judged AND is_outlying) AS n_outlying
    FROM judged GROUP BY fabric_id, contributor),
named AS (
    SELECT own.*, n_cells, n_judged, n_outlying, n >= {LEAST_JUDGED}
           AND abs(level - centre) > {OUTLYING_Z} * greatest(scale, {LEAST_LEVEL_SCALE}) AS is_off
    FROM own JOIN centre USING (fabric_id) JOIN values_of USING (fabric_id, contributor))
SELECT *, is_off OR 2 * n_outlying > n_judged AS is_set_aside FROM named
"""
_CELLS: Final = f"""
WITH kept AS (
    SELECT levelled.* FROM levelled
    ANTI JOIN (SELECT * FROM judged_contributors WHERE is_set_aside) out USING (fabric_id, contributor)
    ANTI JOIN (SELECT * FROM judged WHERE is_outlying) bad USING (fabric_id, contributor, cell)),
jobs AS (SELECT cell, 1.4826 * mad(at_usual) AS between_jobs FROM kept GROUP BY cell),
own AS (
    SELECT cell, any_value(key) AS key, {_ANY}, median(at_usual) AS own, median(spread) AS spread,
           sum(n_calls) AS n_calls, count(*) AS n_jobs, median(gain) FILTER (NOT isnan(gain)) AS gain,
           ({BETWEEN_JOBS_STD} * {BETWEEN_JOBS_STD} + pow(1.4826 * mad(gain) FILTER (NOT isnan(gain)), 2)
            + pow(median(gain_std) FILTER (NOT isnan(gain)), 2)) / count(*) FILTER (NOT isnan(gain)) AS gain_variance
    FROM kept GROUP BY cell, contributor),
gains AS (
    SELECT any_value(key) AS key, {_ANY}, exp(median(own)) AS median_us, median(spread) AS spread,
           any_value(between_jobs) AS between_jobs, sum(n_calls) AS n_calls, sum(n_jobs) AS n_jobs,
           count(*) AS n_contributors, count(gain) AS n_gains, median(gain) AS gain,
           sqrt((pow(1.4826 * mad(gain), 2) + median(gain_variance)) / count(gain)) AS gain_std
    FROM own JOIN jobs USING (cell) GROUP BY cell)
SELECT *, NOT is_default AND gain > greatest({MIN_GAIN}, {WINNER_Z} * gain_std)
       AND row_number() OVER (PARTITION BY key ORDER BY is_default, gain - gain_std DESC NULLS LAST) = 1 AS is_winner
FROM gains ORDER BY {_KEY}, is_default DESC, gain DESC NULLS LAST, {_SETTING}
"""


def agree(
    connection: duckdb.DuckDBPyConnection, listed: Mapping[str, str] | None = None
) -> tuple[list[Contributor], Iterator[Cell]]:
    """Merge the lines of all jobs to contributors and the cells of the book, sorted.

    The connection is that of `Merging`, with `lines` up to date. `listed` has the names, by key, of the contributors
    that are used; None: all are.
    """
    select_used = "CREATE OR REPLACE TEMP TABLE used AS FROM lines WHERE ? OR list_contains(?::VARCHAR[], contributor)"
    connection.execute(select_used, [listed is None, [*(listed or ())]])
    for statement in (_LEVELLED, _JUDGED, _CONTRIBUTORS):
        connection.execute(statement)
    found = connection.execute(
        "SELECT fabric_id, contributor, n_jobs, n_cells, n_judged, n_outlying, is_off, is_set_aside, level"
        " FROM judged_contributors ORDER BY fabric_id, contributor"
    ).fetchall()
    refused: dict[str, int] = dict(
        connection.execute(
            "SELECT contributor, sum(n_rows)::BIGINT FROM refused WHERE ? OR list_contains(?::VARCHAR[], contributor)"
            " GROUP BY ALL ORDER BY ALL", [listed is None, [*(listed or ())]],
        ).fetchall()
    )  # fmt: skip
    signed: dict[str, str] = dict(connection.execute("FROM names").fetchall())
    called = signed | {key: name for key, name in (listed or {}).items() if name}
    contributors = [
        Contributor(
            fabric_id=fabric_id, name=called.get(one, one), key=one if one in signed else "", n_jobs=n_jobs,
            n_cells=n_cells, n_judged=n_judged, n_outlying=n_outlying, n_refused_rows=refused.pop(one, 0),
            level=round(level, 4), is_level_off=is_off, is_set_aside=is_set_aside,
        )
        for fabric_id, one, n_jobs, n_cells, n_judged, n_outlying, is_off, is_set_aside, level in found
    ]  # fmt: skip
    contributors += [
        Contributor(fabric_id="", name=called.get(one, one), key=one if one in signed else "", n_refused_rows=n)
        for one, n in refused.items()
    ]
    # One line for all, so that unlisted contributors do not make a book longer.
    unused = "SELECT count(DISTINCT (fabric_id, contributor, job_id)) FROM lines ANTI JOIN used USING (contributor)"
    (n_unlisted,) = connection.execute(unused).fetchall()[0]
    if n_unlisted:
        contributors.append(Contributor(fabric_id="", name="not listed", n_jobs=n_unlisted, is_set_aside=True))
    return contributors, _cells(connection)


def _cells(connection: duckdb.DuckDBPyConnection) -> Iterator[Cell]:
    cursor = connection.execute(_CELLS)
    names = [column[0] for column in cursor.description or ()]
    while rows := cursor.fetchmany(10_000):
        for row in rows:
            yield _cell(dict(zip(names, row, strict=True)))


def _cell(row: dict[str, Any]) -> Cell:
    has_gain = bool(row["n_gains"]) and not row["is_default"]
    return Cell(
        fabric_id=row["fabric_id"],
        nccl_version=row["nccl_version"],
        tuner_abi=row["tuner_abi"],
        n_ranks=row["n_ranks"],
        n_nodes=row["n_nodes"],
        collective=Collective(row["collective"]).name,
        phase=Phase(row["phase"]).name,
        size_class=row["size_class"],
        algorithm=Algorithm(row["algorithm"]).name,
        protocol=Protocol(row["protocol"]).name,
        n_channels=row["n_channels"],
        is_default=bool(row["is_default"]),
        median_us=round(row["median_us"], 3),
        spread=round(row["spread"], 5),
        between_jobs=round(row["between_jobs"], 5),
        n_calls=int(row["n_calls"]),
        n_jobs=int(row["n_jobs"]),
        n_contributors=row["n_contributors"],
        gain=round(row["gain"], 5) if has_gain else None,
        gain_std=round(row["gain_std"], 5) if has_gain else None,
        is_winner=bool(row["is_winner"]),
    )
