"""Finds the job that a user means by an id, by a name, or by neither."""

from __future__ import annotations

from pathlib import Path

from ....store.errors import UserError
from ....store.records import JobRecord
from ....store.records.job_names import titled
from ....store.sqlite.database import Store

MAX_OFFERED = 5


def job_of(store: Store, job: str | None) -> JobRecord:
    """The job of this id or name; None: the newest that trained, or else the newest sweep or import.

    Raises:
        UserError: there is no such job, several have that name, or there is none at all.
    """
    if job is not None:
        return named_job(store, job)
    newest_first = store.jobs()[::-1]
    if not newest_first:
        raise UserError(f"{store.path} holds no job yet", "run one with `zerotune launch`")
    have_steps = store.last_steps()
    trained = (one for one in newest_first if one.job_id in have_steps or store.decisions(one.job_id, limit=1))
    return next(trained, newest_first[0])


def id_of(path: Path, job: str | None) -> str | None:
    """The id of the only job named `job` in the store at `path`, else `job` itself: traces have only ids.

    Raises:
        UserError: several jobs have this name; the message lists their ids.
    """
    if job is None or not path.exists():
        return job
    with Store.open(path, read_only=True) as store:
        return named_job(store, job).job_id if any(one.name == job for one in store.jobs()) else job


def named_job(store: Store, job: str) -> JobRecord:
    """The job of this id, or else of this name.

    Raises:
        UserError: there is none, or several have this name; the message lists ids, the newest first.
    """
    newest_first = store.jobs()[::-1]
    for one in newest_first:
        if one.job_id == job:
            return one
    found = [one for one in newest_first if one.name == job]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(one.job_id for one in found[:MAX_OFFERED])
        raise UserError(f"{len(found)} jobs are called {job!r}", f"use the id of one, the newest first: {ids}")
    offered = ", ".join(titled(one.job_id, one.name) for one in newest_first[:MAX_OFFERED])
    raise UserError(f"no job {job!r} in {store.path}", f"use one of {offered}" if offered else "it holds none yet")
