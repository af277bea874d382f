"""Fitted models in the store: versions kept, compared, pinned and rolled back.

A fabric's model has one name (`kriging`). What the last fit left is in use under that name; the fits before it are
kept as `kriging@HASH`, HASH being the beginning of their training set's hash; what could not be read was set aside
as `kriging.damaged`. A pinned version is copied to `kriging.pinned` and used until it is released, whatever is
fitted meanwhile. A model is only a digest: one of other versions or with damaged bytes is never used.
"""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from zerotune.store.errors import StoreLockedError, UserError
from zerotune.store.records import Collective, CommunicatorClass, ModelRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build, candidate_at
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.modeling.trainer import DAMAGED, MODEL_NAME, PINNED, VERSION_MARK, hash_of

MAX_MEASUREMENTS: Final = 50_000


class ModelLine(msgspec.Struct, frozen=True):
    """One saved model as people see it."""

    model_id: str
    """NAME-HASH, as decisions name it."""
    fabric_id: str
    state: str
    """in use, pinned, earlier, set aside, other versions, damaged."""
    training_hash: str
    n_bytes: int
    held_out_error: float | None
    """Median absolute error (log) at sizes left out, when it was fitted."""
    created_at_s: float
    versions: dict[str, str]


class Judgement(msgspec.Struct, frozen=True):
    """How well a model predicts the present measurements."""

    model_id: str
    fabric_id: str
    state: str
    """As in `ModelLine`."""
    n_points: int
    median_error_percent: float
    worst_error_percent: float
    interval_coverage_90: float


def listed(store: Store, fabric_id: str | None = None) -> list[ModelLine]:
    """Every saved correction, by fabric, those in use first and then the newest."""
    return [line for line, _ in _in_order(store, fabric_id)]


def compared(store: Store, fabric_id: str | None = None) -> list[Judgement]:
    """Every readable model against the newest measurements of its fabric."""
    found = []
    facts, points = store.fabrics(), dict[str, TrainingSet]()
    for line, record in _in_order(store, fabric_id):
        name = line.fabric_id
        if name not in points:
            points[name] = build(store.measurements(name, limit=MAX_MEASUREMENTS), CostPrior(facts.get(name, {})))
        if not len(points[name]):
            continue
        try:
            baked = Baked.from_bytes(record.blob)
        except ValueError:
            continue
        found.append(_judged(line, baked, points[name]))
    return found


def pin(store: Store, model_id: str, fabric_id: str | None) -> ModelLine:
    """Use this model, and no other, on its fabric.

    Args:
        store: open for writing.
        model_id: NAME-HASH, as `zerotune models list` shows it.
        fabric_id: whose model; None if one fabric only has it.

    Raises:
        UserError: there is no such model, several fabrics have it, or it cannot be used.
    """
    record = _find(store, model_id, fabric_id)
    if not record.is_damaged and record.versions != trainer.versions():
        raise UserError(
            f"model {model_id} was fitted by other versions", "pin one that `zerotune models list` calls earlier"
        )
    if not _is_readable(record):
        raise UserError(f"model {model_id} is damaged", "pin another, see `zerotune models list`")
    store.save_model(msgspec.structs.replace(record, name=_base(record.name) + PINNED))
    store.commit()
    return next(line for line in listed(store, record.fabric_id) if line.state == "pinned")


def roll_back(store: Store, fabric_id: str | None) -> ModelLine:
    """Pin the model that was in use before the present one.

    Raises:
        UserError: there is no earlier one, or several fabrics have one.
    """
    pinned = {line.fabric_id: line for line in listed(store, fabric_id) if line.state == "pinned"}
    lines = [line for line in listed(store, fabric_id) if line.state == "earlier"]
    lines = [line for line in lines if line.fabric_id not in pinned or _is_before(line, pinned[line.fabric_id])]
    if not lines and len(pinned) == 1:
        (oldest,) = pinned.values()
        raise UserError(
            f"of the models that are kept none is earlier than {oldest.model_id}, which is pinned",
            "`zerotune models release` uses the newest fit again; or pin another, see `zerotune models list`",
        )
    if len({line.fabric_id for line in lines}) != 1:
        problem = "no earlier model is kept" if not lines else "several fabrics have earlier models"
        raise UserError(problem, "see `zerotune models list`, and name the fabric with --fabric-id")
    return pin(store, max(lines, key=lambda line: line.created_at_s).model_id, lines[0].fabric_id)


def release(store: Store, fabric_id: str | None) -> list[str]:
    """Undo pins: from now on the newest fit is used again. Returns the fabrics this concerns."""
    freed = [one for one in store.models() if one.name.endswith(PINNED) and fabric_id in (None, one.fabric_id)]
    for record in freed:
        store.delete_model(record.name, record.fabric_id)
    store.commit()
    return [record.fabric_id for record in freed]


def check_fabric(store: Store, fabric_id: str | None) -> Store:
    """The store, if it knows this fabric.

    Raises:
        UserError: it does not; the store is closed then.
    """
    known = {*store.fabrics(), *(one.fabric_id for one in store.models() if one.fabric_id)}
    if fabric_id is not None and fabric_id not in known:
        store.close()
        raise UserError(f"no fabric {fabric_id!r} in {store.path}", f"use one of {', '.join(sorted(known)) or 'none'}")
    return store


def open_for_change(path: Path) -> Store:
    """The store, for writing.

    Raises:
        UserError: there is none, or a daemon writes to it.
        StoreError: it is damaged: that is left to the daemon.
    """
    if not path.exists():
        raise UserError(f"there is no store at {path}", "name one with --store or run a job first")
    try:
        return Store.open(path, may_set_aside=False)
    except StoreLockedError as error:
        raise UserError(error.problem, "stop it first: models are changed while no daemon uses the store") from None


def render(lines: list[ModelLine], console: Console) -> None:
    """Print the list; says so when it is empty."""
    if not lines:
        console.print("No model is saved yet. One is fitted when a job's first measurements are in.")
        return
    for fabric_id, group in groupby(lines, key=lambda line: line.fabric_id):
        table = _table("model", "state", "fitted", "held-out error", "training set", "bytes")
        for line in group:
            error = "-" if line.held_out_error is None else f"{100 * line.held_out_error:.1f} %"
            known = bool(line.training_hash)
            fitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.created_at_s)) if known else "-"
            n_bytes = f"{line.n_bytes:,}" if known else "-"
            table.add_row(line.model_id, line.state, fitted, error, line.training_hash[:12] or "-", n_bytes)
        _print_fabric(fabric_id, table, console)


def render_comparison(found: list[Judgement], lines: list[ModelLine], console: Console) -> None:
    """Print how well each model predicts the present measurements, or why none can be compared.

    Args:
        found: what `compared` returned.
        lines: what `listed` returned: says why nothing was found.
    """
    if not found:
        unreadable = [line for line in lines if line.state in ("damaged", "set aside")]
        if lines and len(unreadable) == len(lines):
            console.print(
                f"None of {len(lines)} saved models can be read: `zerotune models list` shows them as damaged."
            )
        else:
            console.print("There is no model with measurements to compare it to.")
        return
    for fabric_id, group in groupby(found, key=lambda one: one.fabric_id):
        table = _table("model", "state", "settings", "median error", "worst error", "inside its 90 %")
        for one in group:
            errors = f"{one.median_error_percent:.1f} %", f"{one.worst_error_percent:.1f} %"
            table.add_row(one.model_id, one.state, str(one.n_points), *errors, f"{one.interval_coverage_90:.0f} %")
        _print_fabric(fabric_id, table, console)


def _table(*columns: str) -> Table:
    """The first column, the model's name, stays whole on narrow terminals: people copy it."""
    table = Table(*columns, box=None)
    table.columns[0].no_wrap = True
    return table


def _print_fabric(fabric_id: str, table: Table, console: Console) -> None:
    """A table below the name of its fabric, which would leave it no room beside."""
    console.print(f"fabric {fabric_id}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _in_order(store: Store, fabric_id: str | None) -> list[tuple[ModelLine, ModelRecord]]:
    records = _kept(store)
    pinned = {one.fabric_id: one.training_hash for one in records if one.name.endswith(PINNED) and _is_usable(one)}
    lines = [
        (
            ModelLine(
                _id_of(one),
                one.fabric_id,
                _state(one, pinned.get(one.fabric_id)),
                one.training_hash,
                len(one.blob),
                one.error,
                one.created_at_s,
                one.versions,
            ),
            one,
        )
        for one in records
        if fabric_id in (None, one.fabric_id)
    ]
    order = ("pinned", "in use")
    return sorted(lines, key=lambda one: (one[0].fabric_id, one[0].state not in order, -one[0].created_at_s))


def _kept(store: Store) -> list[ModelRecord]:
    """Every saved correction once: a pinned copy stands for the version it was made of."""
    records = [one for one in store.models() if _base(one.name) == MODEL_NAME]
    pinned = {(one.fabric_id, _id_of(one)): _is_readable(one) for one in records if one.name.endswith(PINNED)}

    def is_covered_by_pin(one: ModelRecord) -> bool:
        can_be_read = pinned.get((one.fabric_id, _id_of(one)))
        return can_be_read is not None and (can_be_read or not _is_readable(one))

    return [one for one in records if one.name.endswith((PINNED, DAMAGED)) or not is_covered_by_pin(one)]


def _is_usable(record: ModelRecord) -> bool:
    return _is_readable(record) and record.versions == trainer.versions()


def _is_readable(record: ModelRecord) -> bool:
    try:
        Baked.from_bytes(record.blob)
    except ValueError:
        return False
    return True


def _id_of(record: ModelRecord) -> str:
    """NAME-HASH; the store's name for a model whose hash is unknown."""
    return record.name if record.is_damaged else f"{_base(record.name)}-{hash_of(record)}"


def _base(name: str) -> str:
    return name.removesuffix(DAMAGED).removesuffix(PINNED).split(VERSION_MARK)[0]


def _state(record: ModelRecord, pinned_hash: str | None) -> str:
    if record.name.endswith(DAMAGED):
        return "set aside"
    is_pinned, problem = record.name.endswith(PINNED), ""
    if record.is_damaged:
        problem = "damaged"
    elif record.versions != trainer.versions():
        problem = "other versions"
    elif not _is_readable(record):
        problem = "damaged"
    if problem:
        return f"pinned, not in use: {problem}" if is_pinned else problem
    if is_pinned:
        return "pinned"
    if VERSION_MARK in record.name:
        return "earlier"
    return "in use" if pinned_hash is None else "newest, not in use"


def _is_before(line: ModelLine, pinned: ModelLine) -> bool:
    return line.created_at_s < pinned.created_at_s


def _find(store: Store, model_id: str, fabric_id: str | None) -> ModelRecord:
    found = {
        one.fabric_id: one
        for one in store.models()
        if _id_of(one) == model_id and fabric_id in (None, one.fabric_id)
        if not one.name.endswith((DAMAGED, PINNED))
    }
    if not found:
        names = [one.name for one in store.models() if _id_of(one) == model_id and fabric_id in (None, one.fabric_id)]
        if any(name.endswith(DAMAGED) for name in names):
            raise UserError(
                f"model {model_id} was set aside: it cannot be read", "pin another, see `zerotune models list`"
            )
        raise UserError(f"there is no model {model_id!r}", "see `zerotune models list` for those that are kept")
    if len(found) > 1:
        raise UserError(f"{len(found)} fabrics have a model {model_id}", "name the fabric with --fabric-id")
    return next(iter(found.values()))


def _judged(line: ModelLine, baked: Baked, points: TrainingSet) -> Judgement:
    shift, spread = np.zeros(len(points)), np.ones(len(points))
    table = np.stack([points.n_ranks, points.n_nodes, points.collective], axis=1)
    for n_ranks, n_nodes, collective in np.unique(table, axis=0).tolist():
        rows = np.flatnonzero((table == (n_ranks, n_nodes, collective)).all(axis=1))
        options = [
            candidate_at(int(points.algorithm[row]), int(points.protocol[row]), int(points.n_channels[row]))
            for row in rows
        ]
        communicator, classes = CommunicatorClass(n_ranks, n_nodes), points.size_class[rows]
        known = [one for one in dict.fromkeys(options) if one is not None]
        means, stds = baked.predict(communicator, Collective(collective), known, classes)
        columns = np.array([known.index(one) if one is not None else 0 for one in options])
        shift[rows], spread[rows] = means[np.arange(len(rows)), columns], stds[np.arange(len(rows)), columns]
    error = np.abs(points.residual - shift)
    return Judgement(
        line.model_id,
        line.fabric_id,
        line.state,
        len(points),
        100.0 * float(np.expm1(np.median(error))),
        100.0 * float(np.expm1(error.max())),
        100.0 * float(np.mean(error <= 1.645 * np.hypot(spread, points.noise))),
    )
