"""Fitted models in the store: kept, compared, pinned, rolled back; damaged ones are set aside."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from zerotune.store.errors import UserError
from zerotune.store.records import ModelRecord
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import kept_models, trainer
from zerotune.tuner.modeling.correction.baked import Baked

FABRIC = "fabric"


def _model(number: int, *, shift: float = 0.1, versions: dict[str, str] | None = None) -> ModelRecord:
    shape = (1, 1, 1, 1, 40)
    baked = Baked(
        np.array([[8, 1]]),
        np.array([2]),
        np.array([[1, 2]]),
        np.array([64]),
        60,
        np.full(shape, shift, np.float32),
        np.full(shape, 0.2, np.float32),
    )
    known = trainer.versions() if versions is None else versions
    return ModelRecord("kriging", FABRIC, baked.to_bytes(), known, f"{number:08x}rest", 0.01 * number, 100.0 + number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "s.db"
    with Store.open(found) as store:
        block = np.zeros(30, MEASUREMENT)
        block["n_ranks"], block["n_nodes"], block["collective"] = 8, 1, 2
        block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 16
        block["message_bytes"] = np.repeat([1 << 20, 1 << 21, 1 << 22], 10)
        block["duration_us"] = np.repeat([50.0, 80.0, 150.0], 10)
        store.record_job("job", FABRIC, {}, 8)
        store.record_measurements(FABRIC, "job", block)
        for number in range(1, 9):
            trainer.keep(store, _model(number))
        store.flush()
    return found


def states(store: Store) -> dict[str, str]:
    return {line.model_id: line.state for line in kept_models.listed(store)}


def test_pin_outlives_the_next_fit_until_it_is_released(path: Path) -> None:
    with Store.open(path) as store:
        assert kept_models.pin(store, "kriging-00000005", None).state == "pinned"
        trainer.keep(store, _model(9))
        store.flush()
        assert trainer.load_correction(store, FABRIC)[1] == "kriging-00000005"
        assert Knowledge.from_store(store, FABRIC).model_id == "kriging-00000005"
        assert states(store)["kriging-00000009"].startswith("newest")
        assert kept_models.release(store, None) == [FABRIC]
        assert trainer.load_correction(store, FABRIC)[1] == "kriging-00000009"


def test_what_cannot_be_used_is_not_pinned(path: Path) -> None:
    with Store.open(path) as store:
        old = msgspec.structs.replace(_model(2, versions={"features": "0"}), name="kriging@00000002")
        cut = msgspec.structs.replace(_model(1), name="kriging@00000001", blob=b"cut")
        store.save_model(old)
        store.save_model(cut)
        store.flush()
        for model_id, problem in (("00000002", "other versions"), ("00000001", "damaged"), ("ffffffff", "no model")):
            with pytest.raises(UserError, match=problem):
                kept_models.pin(store, f"kriging-{model_id}", None)
        assert {"other versions", "damaged"} <= set(states(store).values())


@pytest.mark.parametrize("name", ["kriging", "kriging.pinned"])
def test_a_damaged_model_is_set_aside_and_learning_goes_on(path: Path, name: str) -> None:
    with Store.open(path) as store:
        good = _model(20)
        store.save_model(msgspec.structs.replace(good, name=name, blob=good.blob[:-200]))
        store.flush()
        used = trainer.load_correction(store, FABRIC)[1]
        store.flush()
        assert used == ("" if name == "kriging" else "kriging-00000008")
        assert any(line.state == "set aside" for line in kept_models.listed(store))
        assert store.load_model(name, FABRIC) is None
        trainer.keep(store, _model(21))
        store.flush()
        assert trainer.load_correction(store, FABRIC)[1] == "kriging-00000015"
