"""Starts of one training as the store remembers them, as the policy wants them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ..same_machine import Facts, hardware_of
from .trials import JobResult, Outcome

if TYPE_CHECKING:
    from ...store.records import JobRecord
    from ...store.sqlite.database import Store

FEW_STEPS: Final = 8
"""A job that vanished after fewer hung or died in its first steps, and of none that short the time is known."""
EARLY_SHARE: Final = 0.5
"""A job that vanished after a smaller share of the usual number of steps ended early."""
LEAST_OWN_STEPS: Final = 6
"""With fewer steps of NCCL's own choice the newer half of all steps is compared."""
INTERRUPTED: Final = ("KeyboardInterrupt", "SystemExit")
"""The user's own wish."""
ROBUST_STD: Final = 1.4826
"""Standard deviation of a normal quantity by its median absolute deviation."""


class History(NamedTuple):
    """Of one training on one machine, the oldest first."""

    jobs: list[JobResult]
    job_ids: list[str]
    hardware: Facts
    """What the machine is; empty: no job has told yet."""
    is_multi_node: bool


def training_id(command: Sequence[str], name: str | None) -> str:
    """What all starts of the same training have in common: the name that they were given, else the command itself."""
    words = ["name", name] if name else ["command", *command]
    return hashlib.sha256(json.dumps(words).encode(errors="surrogateescape")).hexdigest()[:16]


def history(store: Store, training: str) -> History:
    """What became of the starts of a training on the machine on which a rank of it reported last."""
    mine = [job for job in store.jobs() if training and job.training == training]
    fabrics = store.fabrics()
    hardware = next((hardware_of(fabrics.get(job.fabric_id, {})) for job in mine[::-1] if job.fabric_id), {})
    mine = [job for job in mine if not job.fabric_id or hardware_of(fabrics.get(job.fabric_id, {})) == hardware]
    last = next((job for job in mine[::-1] if job.fabric_id), None)
    n_usual = [len(store.steps(job.job_id)) for job in mine if not job.environment and job.fabric_id]
    early = EARLY_SHARE * median(n_usual) if n_usual else 0.0
    results = [_result(store, job, early, is_last=job is mine[-1]) for job in mine]
    is_multi_node = last is not None and _n_nodes(last, fabrics.get(last.fabric_id, {})) > 1
    return History(results, [job.job_id for job in mine], hardware, is_multi_node)


def _n_nodes(job: JobRecord, facts: Facts) -> int:
    per_node, n_nodes = facts.get("ranks_per_node"), facts.get("n_nodes")
    if isinstance(per_node, int) and per_node > 0:  # an emulated machine's
        return -(-job.n_ranks // per_node)
    return n_nodes if isinstance(n_nodes, int) else 1


def _result(store: Store, job: JobRecord, early: float, *, is_last: bool) -> JobResult:
    found = store.steps(job.job_id)
    timed = [one for one in found if one.is_whole and 0.0 < one.duration_us < math.inf]
    controls = {one.epoch for one in store.decisions(job_id=job.job_id) if one.is_control}
    # What else runs differs from start to start by what is known of calls: NCCL's own choice does not.
    own = [one for one in timed if one.epoch in controls]
    compared = own if len(own) >= LEAST_OWN_STEPS else timed[len(timed) // 2 :]
    settled = np.log([one.duration_us for one in compared])
    level = float(np.median(settled)) if len(settled) else math.nan
    spread = ROBUST_STD * float(np.median(np.abs(settled - level))) if len(settled) else 0.0
    step_us = math.exp(level) if len(timed) >= FEW_STEPS else None
    outcome = _outcome(job, len(found), early, is_last=is_last)
    return JobResult(job.environment, step_us, spread, len(settled), job.started_at_s, outcome)


def _outcome(job: JobRecord, n_steps: int, early: float, *, is_last: bool) -> Outcome:
    if job.ended_at_s is None and not job.is_lost:  # it runs, or did not get as far as to greet a daemon
        return Outcome.unknown if is_last or n_steps >= FEW_STEPS else Outcome.failed
    if job.failure.partition(": ")[2] in INTERRUPTED:
        return Outcome.ended
    if job.failure or (job.is_lost and n_steps < max(early, FEW_STEPS)):
        return Outcome.failed
    return Outcome.ended
