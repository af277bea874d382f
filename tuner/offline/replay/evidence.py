"""The store that replay learns from, and its evidence on a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from ....agent.nccl.fabric_model import Fabric
from ....store.errors import UserError
from ....store.records import Candidate, CandidateStatistics, CommunicatorClass
from ....store.sqlite.database import Store
from ...learning.knowledge import Knowledge
from ...modeling.correction.baked import Baked
from ...modeling.cost_prior import CostPrior
from ...modeling.statistics import statistics
from ...modeling.trainer import load_correction, model_id_of, record_of, train
from .estimates import Prediction, Predictor
from .legality import fits
from .medians import MAD_TO_SIGMA
from .table import Shape

UNKNOWN: Final = "The store has no measurements of this fabric by other runs"


@dataclass(frozen=True)
class FabricEvidence:
    """Evidence on one fabric."""

    statistics: Sequence[CandidateStatistics] = ()
    knowledge: Knowledge = field(default_factory=Knowledge)
    model_error: float = 0.0
    """Standard error of the learned model's log durations at sizes that it was not fitted to; 0: no model."""
    why_none: str = UNKNOWN
    """Why `statistics` is missing, as the beginning of a sentence."""

    def predictor(self, costs: CostPrior, fabric: Fabric) -> Predictor:
        """Predictor from (shape, candidate) to (us, standard error of the log); None for communicators that do not fit.

        A prediction's standard error is at least `model_error`: the model's own estimate of it may be too small.
        """

        @cache
        def has_room(communicator: CommunicatorClass) -> bool:
            return fits(fabric, communicator)

        def predict(shape: Shape, candidate: Candidate) -> Prediction | None:
            if not has_room(shape.communicator):
                return None
            means, stds = self.knowledge.prior(shape.key, shape.message_bytes, (candidate,), costs)
            mean, std = float(means[0]), max(float(stds[0]), self.model_error)
            return (float(np.exp(mean)), std) if np.isfinite(mean) else None

        return predict


def evidence_of(store_path: Path | None, fabric_id: str, trace: Path, without_job: str = "") -> FabricEvidence:
    """A store's evidence on a fabric.

    A model that was fitted since `without_job` began may have learned from that job. Then it is fitted again, which
    takes up to five seconds.

    With an empty `fabric_id`, nothing is known.

    Args:
        store_path: None, or no file: nothing is known.
        trace: the replayed trace; if the store knows nothing, a store beside the trace is suggested.
        without_job: job id whose measurements are left out; empty: none.
    """
    why_none = _why_none(store_path, trace) if fabric_id else "The trace does not name its fabric"
    if store_path is None or not store_path.exists() or not fabric_id:
        return FabricEvidence(why_none=why_none)
    with Store.open(store_path, read_only=True) as store:
        correction, model_id = load_correction(store, fabric_id)
        record = record_of(store, fabric_id, model_id)
        began_at_s = _measured_since_s(store, without_job, fabric_id)
        if record is not None and began_at_s is not None and record.created_at_s >= began_at_s:
            record = train(store, fabric_id, without_job=without_job)
            correction = None if record is None else Baked.from_bytes(record.blob)
            model_id = "" if record is None else model_id_of(record)
        knowledge = Knowledge.from_store(store, fabric_id, model=(correction, model_id), without_job=without_job)
        # A normal distribution's median absolute error is 0.67 of its standard error.
        error = 0.0 if record is None else MAD_TO_SIGMA * (record.error or 0.0)
        lines = statistics(store, fabric_id, without_job=without_job)
        plain = [line for line in lines if not line.candidate.chunk_bytes]  # as what is replayed
        return FabricEvidence(plain, knowledge.without_chunk_sizes(), error, why_none)


def _measured_since_s(store: Store, job_id: str, fabric_id: str) -> float | None:
    """Start of a job with measurements on the fabric; None: the store has none of it."""
    if (job_id, fabric_id) not in store.measured():
        return None
    return next(job.started_at_s for job in store.jobs() if job.job_id == job_id)


def named_store(store_path: Path, trace: Path) -> Path:
    """A store that the user named; UserError if there is none."""
    if not store_path.exists() and trace.exists():  # others report a missing trace
        beside = _other_beside(store_path, trace)
        remedy = "leave out --store (or ZEROTUNE_STORE) for the default one"
        remedy = remedy if beside is None else f"there is one at {beside}: --store"
        raise UserError(f"there is no store at {store_path}", remedy)
    return store_path


def _why_none(store_path: Path | None, trace: Path) -> str:
    if store_path is None:
        return UNKNOWN
    beside = _other_beside(store_path, trace)
    if store_path.exists():
        return UNKNOWN if beside is None else f"{UNKNOWN} (there is another at {beside}: --store)"
    remedy = "where the job's daemon used another, name that one" if beside is None else f"there is one at {beside}"
    return f"There is no store at {store_path} ({remedy}: --store)"


def _other_beside(store_path: Path, trace: Path) -> Path | None:
    beside = trace.resolve().parent / "store.db"
    return beside if beside.is_file() and beside != store_path.resolve() else None
