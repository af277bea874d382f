"""Which job is meant where none is named."""

from __future__ import annotations

from zerotune.store.errors import UserError
from zerotune.store.records import JobRecord
from zerotune.store.sqlite.database import Store


def job_of(store: Store, job_id: str | None) -> JobRecord:
    """The job of this id; when None the newest that trained, for sweeps and imports are jobs of the store, too.

    Where none trained it is the newest of all.

    Raises:
        UserError: there is no such job, or none at all.
    """
    jobs = {one.job_id: one for one in store.jobs()}
    if not jobs:
        raise UserError(f"{store.path} holds no job yet", "run one with `zerotune launch`")
    if job_id is None:
        newest_first = list(jobs.values())[::-1]
        trained = (one for one in newest_first if store.steps(one.job_id) or store.decisions(one.job_id, limit=1))
        return next(trained, newest_first[0])
    if job_id not in jobs:
        raise UserError(f"no job {job_id!r} in {store.path}", f"use one of {', '.join(list(jobs)[-5:])}")
    return jobs[job_id]
