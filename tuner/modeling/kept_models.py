"""Fitted models in the store, as `zerotune store models` shows them.

A fabric's newest model is named `kriging`. A model that could not be read was set aside as `kriging.damaged`. A model
is only a digest of measurements: if it is damaged or of other versions, a new one is fitted.
"""

from __future__ import annotations

import time
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table

from ...store.errors import UserError
from ...store.records import ModelRecord
from ...store.sqlite.database import Store
from . import trainer
from .correction.baked import Baked
from .trainer import DAMAGED, MODEL_NAME, hash_of


class ModelLine(msgspec.Struct, frozen=True):
    """One saved model as people see it."""

    model_id: str
    """NAME-HASH, as in decisions."""
    fabric_id: str
    state: str
    """One of: in use, set aside, other versions, damaged."""
    training_hash: str
    n_bytes: int
    held_out_error: float | None
    """Median absolute error (log) at sizes left out of the fit."""
    created_at_s: float
    versions: dict[str, str]


def listed(store: Store, fabric_id: str | None = None) -> list[ModelLine]:
    """Every saved correction, by fabric, those in use first and then the newest; UserError for an unknown fabric."""
    records = store.models()
    known = {*store.fabrics(), *(one.fabric_id for one in records if one.fabric_id)}
    if fabric_id is not None and fabric_id not in known:
        raise UserError(f"no fabric {fabric_id!r} in {store.path}", f"use one of {', '.join(sorted(known)) or 'none'}")
    lines = [
        ModelLine(
            record.name if record.is_damaged else f"{MODEL_NAME}-{hash_of(record)}",
            record.fabric_id,
            _state(record),
            record.training_hash,
            len(record.blob),
            record.error,
            record.created_at_s,
            record.versions,
        )
        for record in records
        if record.name in (MODEL_NAME, MODEL_NAME + DAMAGED) and fabric_id in (None, record.fabric_id)
    ]
    return sorted(lines, key=lambda one: (one.fabric_id, one.state != "in use", -one.created_at_s))


def render(lines: list[ModelLine], console: Console) -> None:
    """Print the list; says so when it is empty."""
    if not lines:
        console.print("No model is saved yet. One is fitted when a job's first measurements are in.")
    for fabric_id, group in groupby(lines, key=lambda line: line.fabric_id):
        table = Table("model", "state", "fitted", "held-out error", "training set", "bytes", box=None)
        table.columns[0].no_wrap = True  # people copy it
        for line in group:
            error = "-" if line.held_out_error is None else f"{100 * line.held_out_error:.1f} %"
            known = bool(line.training_hash)
            fitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.created_at_s)) if known else "-"
            n_bytes = f"{line.n_bytes:,}" if known else "-"
            table.add_row(line.model_id, line.state, fitted, error, line.training_hash[:12] or "-", n_bytes)
        console.print(f"fabric {fabric_id}", markup=False, highlight=False, soft_wrap=True)
        console.print(table)


def _state(record: ModelRecord) -> str:
    if record.name.endswith(DAMAGED):
        return "set aside"
    if not record.is_damaged and record.versions != trainer.versions():
        return "other versions"
    try:
        Baked.from_bytes(record.blob)
    except ValueError:
        return "damaged"
    return "damaged" if record.is_damaged else "in use"
