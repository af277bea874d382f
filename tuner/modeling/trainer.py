"""Fits the correction to the store's measurements, and loads it.

A model is only a digest of measurements: if a saved one is damaged or was made by other versions, a new one is
fitted. Call `train` in a process of its own; nothing else here imports scikit-learn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...agent.nccl.catalog import CHANNEL_LADDER, legal_cells
from ...store.records import BASELINE, Collective, CommunicatorClass, ModelRecord
from .correction.baked import BAKED_VERSION, MOST_CHANNELS, UNKNOWN_STD, Baked, grid_classes
from .correction.kriging import Kriging
from .correction.training_set import TrainingSet, build, candidate_at, training_hash
from .cost_prior import CostPrior
from .features import DEFAULT_CELL, FEATURES_VERSION, Ints
from .statistics import at_usual_level

if TYPE_CHECKING:
    from ...store.sqlite.database import Store

_log = logging.getLogger("zerotune.trainer")

MODEL_NAME: Final = "kriging"
MIN_POINTS: Final = 4
MAX_MEASUREMENTS: Final = 200_000
MAX_COMMUNICATORS: Final = 4
DAMAGED: Final = ".damaged"
"""Suffix of the name under which a model that cannot be read is set aside."""


def train(store: Store, fabric_id: str, *, without_job: str | None = None) -> ModelRecord | None:
    """Fit a model to everything measured on a fabric, without saving it; None if that is too little."""
    facts = store.fabrics().get(fabric_id)
    if facts is None:
        return None
    block = at_usual_level(store, fabric_id, limit=MAX_MEASUREMENTS, without_job=without_job)
    return fit(block, fabric_id, facts)


def fit(
    block: npt.NDArray[np.void], fabric_id: str, facts: Mapping[str, str | int | float | bool]
) -> ModelRecord | None:
    """Fit a model to measurements of one fabric, described by `facts` (see `CostPrior`); None if points are too few.

    Its `error` is the median absolute error (log) at size classes left out.
    """
    costs = CostPrior(facts)
    points = build(block, costs)
    if len(points) < MIN_POINTS:
        return None
    model = Kriging().fit(points)
    return ModelRecord(
        name=MODEL_NAME,
        fabric_id=fabric_id,
        blob=bake(model, points, costs).to_bytes(),
        versions=versions(),
        training_hash=training_hash(block),
        error=held_out_error(model, points),
        created_at_s=time.time(),
    )


def versions() -> dict[str, str]:
    """The versions that a saved model depends on, for a comparison with the installed ones."""
    from importlib.metadata import version

    return {
        "features": str(FEATURES_VERSION),
        "baked": str(BAKED_VERSION),
        "scikit-learn": version("scikit-learn"),
        "model": MODEL_NAME,
    }


def hash_of(record: ModelRecord) -> str:
    """The beginning of the training set's hash, as model ids and names show it."""
    return record.training_hash[:8]


def model_id_of(record: ModelRecord) -> str:
    """The model's name in decisions that rest on its predictions."""
    return f"{MODEL_NAME}-{hash_of(record)}"


def keep(store: Store, record: ModelRecord) -> None:
    """Save a new fit in place of the one before; a damaged one is set aside."""
    previous = store.load_model(record.name, record.fabric_id)
    if previous is not None and previous.is_damaged:
        store.rename_model(record.name, record.fabric_id, record.name + DAMAGED)
    store.save_model(record)
    store.flush()


def load_correction(store: Store, fabric_id: str) -> tuple[Baked | None, str]:
    """The correction that the last fit left for a fabric, and its model id; (None, "") if none can be used.

    A damaged model is set aside under another name, so that the next fit replaces it. A read-only store is not changed.
    """
    record = store.load_model(MODEL_NAME, fabric_id)
    if record is None:
        return None, ""
    if not record.is_damaged and record.versions != versions():
        _log.info("the saved model of fabric %s is of other versions; it will be fitted anew", fabric_id)
        return None, ""
    try:
        return Baked.from_bytes(record.blob), model_id_of(record)
    except ValueError:  # do not show numpy's text: it may recommend to unpickle
        if not store.is_read_only:
            _log.warning("the saved model of fabric %s is damaged: set aside, to be fitted anew", fabric_id)
            store.rename_model(MODEL_NAME, fabric_id, MODEL_NAME + DAMAGED)
        return None, ""


def record_of(store: Store, fabric_id: str, model_id: str) -> ModelRecord | None:
    """The saved model with an id that `load_correction` returned; None if it no longer exists."""
    for record in store.models():
        if record.fabric_id == fabric_id and model_id and model_id.endswith(f"-{hash_of(record)}"):
            return record
    return None


def bake(model: Kriging, points: TrainingSet, costs: CostPrior) -> Baked:
    """Evaluate a fitted model on a grid: the settings of its points, and others that NCCL offers there.

    Cells that were never measured are predicted, too. Otherwise they would keep NCCL's cost and look fast beside
    measured cells that are slower than NCCL's cost.

    The points give the communicators (the `MAX_COMMUNICATORS` with most points), collectives and sizes.
    """
    shapes, counts = np.unique(np.stack([points.n_ranks, points.n_nodes], axis=1), axis=0, return_counts=True)
    shapes = shapes[np.argsort(-counts, kind="stable")[:MAX_COMMUNICATORS]]
    collectives = np.unique(points.collective)
    offered = {
        (m, c): _cells(points, CommunicatorClass(int(n_ranks), max(1, int(n_nodes))), collective)
        for m, (n_ranks, n_nodes) in enumerate(shapes.tolist())
        for c, collective in enumerate(collectives.tolist())
    }
    cells = sorted(set().union(*offered.values()))
    classes = grid_classes(int(points.size_class.min()), int(points.size_class.max()))
    # Evaluated every half octave and interpolated between: surfaces are smooth over at least an octave.
    asked_classes = np.unique([classes[0], *classes[classes % 2 == 0], classes[-1]])
    between = np.stack([np.interp(classes, asked_classes, row) for row in np.eye(len(asked_classes))])
    channels = _channels_asked(points, shapes, costs)
    shape = (len(shapes), len(collectives), len(cells), len(channels), len(classes))
    mean, std = np.zeros(shape, np.float32), np.full(shape, UNKNOWN_STD, np.float32)
    for (m, c), cells_there in offered.items():
        for cell in cells_there:
            communicator = CommunicatorClass(int(shapes[m, 0]), max(1, int(shapes[m, 1])))
            # NCCL chooses the baseline's channels: one count stands for all.
            asked = channels if cell != DEFAULT_CELL else channels[-1:]
            grid = _grid(communicator, Collective(collectives[c]), cell, asked, asked_classes, costs)
            shift, spread = model.predict(grid)
            at = m, c, cells.index(cell)
            mean[at] = shift.reshape(len(asked), -1) @ between
            std[at] = np.clip(spread.reshape(len(asked), -1) @ between, 1e-3, 2.0)
    return Baked(shapes, collectives, np.array(cells, dtype=np.int64), channels, int(classes[0]), mean, std)


def _channels_asked(points: TrainingSet, shapes: Ints, costs: CostPrior) -> Ints:
    """Channel counts that may be requested at any of the communicators (ranks, nodes); the last: NCCL chooses."""
    most = {costs.max_channels(CommunicatorClass(n_ranks, max(1, n_nodes))) for n_ranks, n_nodes in shapes.tolist()}
    most.add(int(points.n_channels[points.n_channels < MOST_CHANNELS].max(initial=1)))
    ladder = [count for count in CHANNEL_LADDER if count <= max(most)]
    return np.array(sorted({*ladder, *most, MOST_CHANNELS}), dtype=np.int64)


def _cells(points: TrainingSet, communicator: CommunicatorClass, collective: int) -> set[tuple[int, int]]:
    """Cells that were measured anywhere or that NCCL offers for `collective` at `communicator`, and NCCL's own choice.

    A cell that ran in one collective is predicted in the others, even if NCCL is not known to offer it there.
    """
    measured = np.unique(np.stack([points.algorithm, points.protocol], axis=1), axis=0)
    legal = legal_cells(Collective(collective), n_nodes=communicator.n_nodes, n_ranks=communicator.n_ranks)
    return {DEFAULT_CELL, *((int(a), int(p)) for a, p in (*measured, *legal))}


def held_out_error(model: Kriging, points: TrainingSet) -> float | None:
    """Median absolute error (log) of a fitted model at every third size class, left out; None below four classes."""
    classes = np.unique(points.size_class)
    if len(classes) < 4:
        return None
    return float(np.median(np.abs(model.left_out(np.flatnonzero(np.isin(points.size_class, classes[1::3]))))))


def _grid(
    communicator: CommunicatorClass,
    collective: Collective,
    cell: tuple[int, int],
    channels: Ints,
    classes: Ints,
    costs: CostPrior,
) -> TrainingSet:
    n_points = len(channels) * len(classes)
    ones = np.ones(n_points, dtype=np.int64)
    # Middle of each class, a quarter octave wide.
    log2_bytes = classes / 4.0 + 0.125
    candidates = [candidate_at(*cell, count) or BASELINE for count in channels.tolist()]
    return TrainingSet(
        communicator.n_ranks * ones,
        communicator.n_nodes * ones,
        int(collective) * ones,
        cell[0] * ones,
        cell[1] * ones,
        np.repeat(channels, len(classes)),
        np.tile(log2_bytes, len(channels)),
        np.zeros(n_points),
        np.zeros(n_points),
        ones,
        costs.log_jump(communicator, collective, candidates, 2.0**log2_bytes).T.ravel(),
        costs.log_idle(communicator, collective, candidates, 2.0**log2_bytes).T.ravel(),
    )
