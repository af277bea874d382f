"""`zerotune models list` and `compare` name each model once, also where a pin keeps a copy of it."""

from __future__ import annotations

import io
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from zerotune.store.errors import UserError
from zerotune.store.records import ModelRecord
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.modeling import kept_models, trainer
from zerotune.tuner.modeling.correction.baked import Baked

FABRIC = "fabric"


def fitted(number: int) -> ModelRecord:
    shape = (1, 1, 1, 1, 40)
    baked = Baked(
        np.array([[8, 1]]), np.array([2]), np.array([[1, 2]]), np.array([64]), 60,
        np.full(shape, 0.1, np.float32), np.full(shape, 0.2, np.float32),
    )  # fmt: skip
    versions = trainer.versions()
    return ModelRecord("kriging", FABRIC, baked.to_bytes(), versions, f"{number:08x}rest", 0.01, 100.0 + number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "s.db") as store:
        block = np.zeros(10, MEASUREMENT)
        block["n_ranks"], block["n_nodes"], block["collective"] = 8, 1, 2
        block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 16
        block["message_bytes"], block["duration_us"] = 1 << 20, 50.0
        store.record_job("job", FABRIC, {}, 8)
        store.record_measurements(FABRIC, "job", block)
        for number in (1, 2, 3):
            trainer.keep(store, fitted(number))
        store.flush()
    return tmp_path / "s.db"


def test_what_was_set_aside_cannot_be_pinned_and_is_said_to_be_damaged(path: Path):
    """It is listed under its id: nobody may be told that there is no such model."""
    with Store.open(path) as store:
        aside = msgspec.structs.replace(fitted(9), name="kriging" + trainer.DAMAGED, blob=b"junk")
        store.save_model(aside)
        store.flush()
        assert ("kriging-00000009", "set aside") in [(line.model_id, line.state) for line in kept_models.listed(store)]
        with pytest.raises(UserError, match="kriging-00000009"):
            kept_models.pin(store, "kriging-00000009", None)
        with pytest.raises(UserError, match="'kriging-00000009'"):
            kept_models.pin(store, "kriging-00000009", "another fabric")


def damage(path: Path, name: str, column: str = "versions", value: object = '{"features": "3') -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE models SET {column} = ? WHERE name = ?", (value, name))


@pytest.mark.parametrize(("column", "value"), [("versions", '{"cut": "'), ("error", "x"), ("training_hash", b"x")])
def test_a_model_with_a_damaged_cell_is_shown_as_damaged_and_not_used(path: Path, column: str, value: object):
    damage(path, "kriging", column, value)
    with Store.open(path) as store:
        assert [(line.model_id, line.state) for line in kept_models.listed(store)][-1] == ("kriging", "damaged")
        out = io.StringIO()
        kept_models.render(kept_models.listed(store), Console(file=out, width=80))
        assert out.getvalue().count("1970") == 2, "of the two that are whole"
        with pytest.raises(UserError, match="model kriging "):
            kept_models.pin(store, "kriging", None)
        assert sorted(one.model_id for one in kept_models.compared(store)) == ["kriging-00000001", "kriging-00000002"]
        assert trainer.load_correction(store, FABRIC) == (None, "")
        store.flush()
        trainer.keep(store, fitted(4))
        store.flush()
        _, in_use = trainer.load_correction(store, FABRIC)
        assert in_use == "kriging-00000004"
        states = {line.model_id: line.state for line in kept_models.listed(store)}
        assert states["kriging-00000004"] == "in use"
        assert states["kriging.damaged"] == "set aside"


def test_a_damaged_pin_leaves_the_newest_in_use(path: Path):
    with Store.open(path) as store:
        kept_models.pin(store, "kriging-00000001", None)
    damage(path, "kriging.pinned")
    with Store.open(path) as store:
        states = {line.model_id: line.state for line in kept_models.listed(store)}
    assert states["kriging-00000003"] == "in use"
    assert states["kriging.pinned"].startswith("pinned, ")
