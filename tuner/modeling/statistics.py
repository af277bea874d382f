"""Statistics of a fabric's measurements by setting, corrected for times when the network was slower."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...store.records import (
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Outcome,
    Phase,
    size_class,
)
from ...store.sqlite.database import Store
from ...store.sqlite.rows.measurements import candidate_of
from .levels import Cells, Levelled, levelled

_SETTING_COLUMNS: Final = (
    "n_ranks", "n_nodes", "collective", "phase", "message_bytes", "algorithm", "protocol", "n_channels", "chunk_bytes",
    "is_default",
)  # fmt: skip
_TIMED: Final = ("id", "series", "job", "step", "duration_us", "measured_at_s")
_LEAST_LOG: Final = -20.0
"""Least log duration; shorter ones, practically zero, are clipped to it."""


def at_usual_level(
    store: Store, fabric_id: str, *, limit: int | None = None, without_job: str | None = None
) -> NDArray[np.void]:
    """Measurements with durations corrected to the network's usual speed: STORED, shape (n,), oldest first.

    So a setting that ran while the network was slow does not look slower than the others. `limit` takes the newest.
    """
    rows = store.stored(fabric_id, limit=limit, without_job=without_job)
    usable = np.flatnonzero(rows["outcome"] == Outcome.ok)
    settings, cell = _settings(store, fabric_id, rows[usable])
    if (levels := _levels_of(settings, cell, rows[usable])) is not None:
        rows["duration_us"][usable] *= np.exp(-levels.shift)
    return rows


def statistics(
    store: Store, fabric_id: str, job_id: str | None = None, *, without_job: str | None = None
) -> list[CandidateStatistics]:
    """Count, median, mean, spread and minimum of the successful measurements on a fabric.

    Durations are corrected for times when the network was slower. This takes two to three seconds per million rows.

    There is one entry per (key, candidate, chosen by NCCL or not), sorted by key.
    """
    rows = store.stored(
        fabric_id, job_id, without_job=without_job, outcome=Outcome.ok, names=_TIMED, any_chunk_size=True
    )
    if not len(rows):
        return []
    settings, cell = _settings(store, fabric_id, rows)
    durations_us, doubt = rows["duration_us"], np.zeros(len(settings))
    if (levels := _levels_of(settings, cell, rows)) is not None:
        durations_us = durations_us * np.exp(-levels.shift)
        doubt = levels.doubt
    groups: dict[tuple[DecisionKey, Candidate, bool], list[int]] = {}
    for at, (n_ranks, n_nodes, collective, phase, message_bytes, *setting, is_default) in enumerate(settings.tolist()):
        communicator = CommunicatorClass(n_ranks, n_nodes)
        key = DecisionKey(communicator, Collective(collective), Phase(phase), size_class(message_bytes))
        groups.setdefault((key, candidate_of(*setting), bool(is_default)), []).append(at)
    order = np.argsort(cell, kind="stable")
    of_cell = np.split(order, np.cumsum(np.bincount(cell, minlength=len(settings)))[:-1])
    found = []
    for (key, candidate, is_default), cells in groups.items():
        members = np.concatenate([of_cell[at] for at in cells])
        of_group = durations_us[members]
        found.append(
            CandidateStatistics(
                key=key,
                candidate=candidate,
                is_default=is_default,
                count=len(of_group),
                median_us=float(np.median(of_group)),
                mean_us=float(of_group.mean()),
                std_us=float(of_group.std(ddof=1)) if len(of_group) > 1 else 0.0,
                min_us=float(of_group.min()),
                last_seen_s=float(rows["measured_at_s"][members].max()),
                level_std=float(doubt[cells].max()),
            )
        )
    return sorted(found, key=lambda one: (one.key, str(one.candidate), one.is_default))


def _settings(
    store: Store, fabric_id: str, rows: NDArray[np.void]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The settings of STORED rows, in _SETTING_COLUMNS, and the index of each row's setting among them."""
    numbers, series = np.unique(rows["series"], return_inverse=True)
    known = store.series(fabric_id)
    columns = [[known[number][name] for name in _SETTING_COLUMNS] for number in numbers.tolist()]
    table = np.array(columns, np.int64).reshape(-1, len(_SETTING_COLUMNS))
    settings, setting = np.unique(table, axis=0, return_inverse=True)
    return settings, setting.reshape(-1)[series.reshape(-1)]


def _levels_of(
    settings: NDArray[np.int64], cell: NDArray[np.int64], rows: NDArray[np.void]
) -> Levelled | None:
    """Corrections of STORED rows for a slower network; see `levelled`.

    `settings` are rows of _SETTING_COLUMNS; `cell` has the index of each measurement's setting.
    """
    if not len(rows):
        return None
    _, place = np.unique(settings[:, :2], axis=0, return_inverse=True)
    of_key = settings[:, :5].copy()
    of_key[:, 4] = [size_class(one) for one in of_key[:, 4].tolist()]
    _, key = np.unique(of_key, axis=0, return_inverse=True)
    _, messages = np.unique(settings[:, :5], axis=0, return_inverse=True)
    messages = messages.reshape(-1)
    is_default = np.flatnonzero(settings[:, -1])
    default_of = np.full(int(messages.max()) + 1, -1)
    default_of[messages[is_default]] = is_default
    cells = Cells(place.reshape(-1).astype(np.int64), key.reshape(-1).astype(np.int64), default_of[messages])
    with np.errstate(divide="ignore"):
        logs = np.log(rows["duration_us"])
    step = rows["step"].astype(np.int64)
    return levelled(cells, cell, rows["job"], rows["id"], step, np.maximum(logs, _LEAST_LOG))
