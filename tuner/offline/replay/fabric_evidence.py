"""What the store knows of a fabric, as replay's policies and its estimates use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerotune.store.records import CandidateStatistics, ModelRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.statistics import statistics
from zerotune.tuner.modeling.trainer import load_correction, model_id_of, record_of, train
from zerotune.tuner.offline.replay.estimates import MAD_TO_SIGMA


@dataclass(frozen=True)
class FabricEvidence:
    """What is known of the fabric asked about."""

    statistics: Sequence[CandidateStatistics] = ()
    knowledge: Knowledge = field(default_factory=Knowledge)
    model_error: float = 0.0
    """Standard error of the learned model's log durations at sizes that it was not fitted to; 0: no model."""


def evidence_of(store_path: Path | None, fabric_id: str, without_job: str = "") -> FabricEvidence:
    """What the store knows of a fabric.

    A model that was fitted since `without_job` began may have learned from that job: then it is fitted anew, which
    takes up to five seconds.

    Args:
        store_path: the SQLite file; None, or no file: nothing is known.
        fabric_id: the fabric; empty: nothing is known.
        without_job: job id whose measurements are left out; empty: none.

    Returns:
        Statistics, knowledge and the model's error.

    Raises:
        StoreError: the store cannot be read.
    """
    if store_path is None or not store_path.exists() or not fabric_id:
        return FabricEvidence()
    with Store.open(store_path, read_only=True) as store:
        correction, model_id = load_correction(store, fabric_id)
        record = record_of(store, fabric_id, model_id)
        began_at_s = _measured_since_s(store, without_job, fabric_id)
        if record is not None and began_at_s is not None and record.created_at_s >= began_at_s:
            record = train(store, fabric_id, without_job=without_job)
            correction = None if record is None else Baked.from_bytes(record.blob)
            model_id = "" if record is None else model_id_of(record)
        knowledge = Knowledge.from_store(store, fabric_id, model=(correction, model_id), without_job=without_job)
        return FabricEvidence(statistics(store, fabric_id, without_job=without_job), knowledge, _error(record))


def _measured_since_s(store: Store, job_id: str, fabric_id: str) -> float | None:
    """When a job with measurements on the fabric began; None: the store has none of it."""
    if (job_id, fabric_id) not in store.measured():
        return None
    return next(job.started_at_s for job in store.jobs() if job.job_id == job_id)


def _error(record: ModelRecord | None) -> float:
    """A model's standard error: a normal distribution's median absolute error is 0.67 of it."""
    return 0.0 if record is None else MAD_TO_SIGMA * (record.error or 0.0)
