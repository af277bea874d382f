"""Fitted models in the store, as `zerotune store models` shows them; damaged ones are set aside and fitted anew."""

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
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.knowledge import Knowledge
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
        store.record_job("job", FABRIC, {}, 8)
        for number in (1, 2):
            trainer.keep(store, fitted(number))
    return tmp_path / "s.db"


def states(store: Store) -> dict[str, str]:
    return {line.model_id: line.state for line in kept_models.listed(store)}


def test_a_fit_takes_the_place_of_the_one_before(path: Path) -> None:
    with Store.open(path) as store:
        assert states(store) == {"kriging-00000002": "in use"}
        assert trainer.load_correction(store, FABRIC)[1] == "kriging-00000002"
        assert Knowledge.from_store(store, FABRIC).model_id == "kriging-00000002"
        with pytest.raises(UserError, match="no fabric 'other'"):
            kept_models.listed(store, "other")


def test_a_model_of_other_versions_is_shown_and_not_used(path: Path) -> None:
    with Store.open(path) as store:
        store.save_model(msgspec.structs.replace(fitted(3), versions={"features": "0"}))
        store.flush()
        assert states(store) == {"kriging-00000003": "other versions"}
        assert trainer.load_correction(store, FABRIC) == (None, "")


def test_a_damaged_model_is_set_aside_and_learning_goes_on(path: Path) -> None:
    with Store.open(path) as store:
        good = fitted(20)
        store.save_model(msgspec.structs.replace(good, blob=good.blob[:-200]))
        store.flush()
        assert states(store) == {"kriging-00000014": "damaged"}
        assert trainer.load_correction(store, FABRIC) == (None, "")
        store.flush()
        assert states(store) == {"kriging-00000014": "set aside"}
        trainer.keep(store, fitted(21))
        assert trainer.load_correction(store, FABRIC)[1] == "kriging-00000015"


@pytest.mark.parametrize(("column", "value"), [("versions", '{"cut": "'), ("error", "x"), ("training_hash", b"x")])
def test_a_model_with_a_damaged_cell_is_shown_as_damaged_and_not_used(path: Path, column: str, value: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE models SET {column} = ? WHERE name = 'kriging'", (value,))
    with Store.open(path) as store:
        assert states(store) == {"kriging": "damaged"}
        out = io.StringIO()
        kept_models.render(kept_models.listed(store), Console(file=out, width=80))
        assert "1970" not in out.getvalue()
        assert trainer.load_correction(store, FABRIC) == (None, "")
        store.flush()
        trainer.keep(store, fitted(4))
        assert trainer.load_correction(store, FABRIC)[1] == "kriging-00000004"
        assert states(store) == {"kriging-00000004": "in use", "kriging.damaged": "set aside"}
