"""Reads the starts of one training from the store, for the policy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ..call_effects import effects_on
from ..same_machine import Facts, hardware_of, variables_of
from .trials import Elsewhere, JobResult, Outcome

if TYPE_CHECKING:
    from ...store.records import JobRecord
    from ...store.sqlite.database import Store

FEW_STEPS: Final = 8
"""A job that vanished after fewer steps hung or died at its start; so short a job has no step time."""
EARLY_SHARE: Final = 0.5
"""A job that vanished before this share of the usual number of steps ended early."""
WARM_UP_STEPS: Final = 4
"""First steps that are left out, since they also connect, compile and allocate."""
LEAST_OWN_STEPS: Final = 8
"""Least steps with NCCL's own choice after these for a start to count."""
INTERRUPTED: Final = ("KeyboardInterrupt", "SystemExit")
"""Exceptions by which the user ended a job."""
ROBUST_STD: Final = 1.4826
"""Ratio of a normal quantity's standard deviation to its median absolute deviation."""


class History(NamedTuple):
    """The starts of one training on one machine, oldest first."""

    jobs: list[JobResult]
    job_ids: list[str]
    hardware: Facts
    """The machine's description; empty: no job has reported it yet."""
    is_multi_node: bool
    elsewhere: Elsewhere
    """How changes affected calls on other nodes with this hardware."""


def training_id(command: Sequence[str], name: str | None) -> str:
    """The id of a training, the same for all its starts: its name, or else its command."""
    words = ["name", name] if name else ["command", *command]
    return hashlib.sha256(json.dumps(words).encode(errors="surrogateescape")).hexdigest()[:16]


def history(store: Store, training: str) -> History:
    """The results of a training's starts on the machine of its last report, with the same variables set by the user."""
    mine = [job for job in store.jobs() if training and job.training == training]
    fabrics = store.fabrics()
    last = next((job for job in mine[::-1] if job.fabric_id), None)
    if last is not None:
        usual = _usual(last, fabrics)
        mine = [job for job in mine if not job.fabric_id or _usual(job, fabrics) == usual]
    hardware = {} if last is None else hardware_of(fabrics.get(last.fabric_id, {}))
    n_usual = [len(store.steps(job.job_id)) for job in mine if not job.environment and job.fabric_id]
    early = EARLY_SHARE * median(n_usual) if n_usual else 0.0
    results = [_result(store, job, early, is_last=job is mine[-1]) for job in mine]
    is_multi_node = last is not None and _n_nodes(last, fabrics.get(last.fabric_id, {})) > 1
    elsewhere = {one.change.lower(): (one.longer, one.longer_std) for one in effects_on(store.path, hardware)}
    return History(results, [job.job_id for job in mine], hardware, is_multi_node, elsewhere)


def _usual(job: JobRecord, fabrics: Mapping[str, Facts]) -> Facts:
    """The machine and the variables that the user set, without those that the job tried."""
    facts = fabrics.get(job.fabric_id, {})
    tried = {one.partition("=")[0] for one in job.environment.split()}
    return hardware_of(facts) | {name: value for name, value in variables_of(facts).items() if name not in tried}


def _n_nodes(job: JobRecord, facts: Facts) -> int:
    per_node, n_nodes = facts.get("ranks_per_node"), facts.get("n_nodes")
    if isinstance(per_node, int) and per_node > 0:  # an emulated machine
        return -(-job.n_ranks // per_node)
    return n_nodes if isinstance(n_nodes, int) else 1


def _result(store: Store, job: JobRecord, early: float, *, is_last: bool) -> JobResult:
    found = store.steps(job.job_id)
    timed = [one for one in found if one.is_whole and 0.0 < one.duration_us < math.inf]
    own_epochs = {0, *(one.epoch for one in store.decisions(job_id=job.job_id) if one.is_control)}
    # Compare steps with NCCL's own choice: other settings differ between starts, as knowledge of calls grows.
    own = [one for one in timed if one.epoch in own_epochs and one.step >= WARM_UP_STEPS]
    settled = np.log([one.duration_us for one in own])
    level = float(np.median(settled)) if len(settled) else math.nan
    spread = ROBUST_STD * float(np.median(np.abs(settled - level))) if len(settled) else 0.0
    step_us = math.exp(level) if len(own) >= LEAST_OWN_STEPS else None
    outcome = _outcome(job, len(found), early, is_last=is_last)
    return JobResult(job.environment, step_us, spread, len(settled), job.started_at_s, outcome)


def _outcome(job: JobRecord, n_steps: int, early: float, *, is_last: bool) -> Outcome:
    if job.ended_at_s is None and not job.is_lost:  # it still runs, or never greeted a daemon
        return Outcome.unknown if is_last or n_steps >= FEW_STEPS else Outcome.failed
    if job.failure.partition(": ")[2] in INTERRUPTED:
        return Outcome.ended
    if job.failure or (job.is_lost and n_steps < max(early, FEW_STEPS)):
        return Outcome.failed
    return Outcome.ended
