"""`zerotune models list` and `compare` name each model once, also where a pin keeps a copy of it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from store.database import MEASUREMENT, Store
from store.errors import StoreError, UserError
from store.records import ModelRecord
from tuner import cli, models, trainer
from tuner.model.baked import RUNGS, Baked

FABRIC = "fabric"


def fitted(number: int) -> ModelRecord:
    shape = (1, 1, 1, len(RUNGS), 40)
    baked = Baked(
        np.array([[8, 1]]), np.array([2]), np.array([[1, 2]]), 60,
        np.full(shape, 0.1, np.float32), np.full(shape, 0.2, np.float32),
    )  # fmt: skip
    versions = trainer.versions("kriging")
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


def test_a_model_that_was_rolled_back_to_is_named_once(path: Path):
    with Store.open(path) as store:
        models.roll_back(store, None)
        listed = [(line.model_id, line.state) for line in models.listed(store)]
        compared = [one.model_id for one in models.compared(store)]
    assert listed == [
        ("kriging-00000002", "pinned"),
        ("kriging-00000003", "newest, not in use"),
        ("kriging-00000001", "earlier"),
    ]
    assert sorted(compared) == ["kriging-00000001", "kriging-00000002", "kriging-00000003"]


def test_pinning_the_one_in_use_shows_it_as_pinned_and_once(path: Path):
    with Store.open(path) as store:
        models.pin(store, "kriging-00000003", None)
        assert [line.state for line in models.listed(store)] == ["pinned", "earlier", "earlier"]
        models.roll_back(store, None)
        assert next(line.model_id for line in models.listed(store) if line.state == "pinned") == "kriging-00000002"
        models.release(store, None)
        assert [line.state for line in models.listed(store)] == ["in use", "earlier", "earlier"]


def test_what_was_set_aside_cannot_be_pinned_and_is_said_to_be_damaged(path: Path):
    """It is listed under its id: nobody may be told that there is no such model."""
    with Store.open(path) as store:
        aside = msgspec.structs.replace(fitted(9), name="kriging" + trainer.DAMAGED, blob=b"junk")
        store.save_model(aside)
        store.flush()
        assert ("kriging-00000009", "set aside") in [(line.model_id, line.state) for line in models.listed(store)]
        with pytest.raises(UserError, match="kriging-00000009 was set aside: it cannot be read; pin another"):
            models.pin(store, "kriging-00000009", None)
        with pytest.raises(UserError, match="there is no model 'kriging-00000009'"):
            models.pin(store, "kriging-00000009", "another fabric")


def test_names_that_people_copy_are_whole_on_80_columns(path: Path):
    out = io.StringIO()
    console = Console(file=out, width=80)
    with Store.open(path) as store:
        models.roll_back(store, None)  # its state is the widest
        lines = [msgspec.structs.replace(one, fabric_id="emulated-" + 40 * "x") for one in models.listed(store)]
        models.render(lines, console)
        found = [msgspec.structs.replace(one, fabric_id="emulated-" + 40 * "x") for one in models.compared(store)]
        models.render_comparison(found, console)
    text = out.getvalue()
    for number in (1, 2, 3):
        assert text.count(f"kriging-{number:08x}") == 2
    assert text.count("fabric emulated-" + 40 * "x") == 2
    assert max(map(len, text.splitlines())) <= 80


def test_changing_models_leaves_a_damaged_store_as_it_is(path: Path):
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is damaged; start `zerotune daemon` anew"):
        models.open_for_change(path)
    assert path.read_bytes() == content
    assert not [one for one in path.parent.iterdir() if "corrupt" in one.name]


@pytest.mark.parametrize("words", [["list"], ["compare"], ["pin", "kriging-00000001"], ["rollback"], ["release"]])
def test_a_fabric_that_is_not_there_is_no_fabric_without_models(words: list[str], path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerotune", "models", *words, "--store", str(path), "--fabric-id", "nope"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert f"no fabric 'nope' in {path}; use one of {FABRIC}\n" in capsys.readouterr().err
    Store.open(path).close()  # given back


def test_comparing_says_which_is_used_and_names_it_first(path: Path):
    with Store.open(path) as store:
        models.roll_back(store, None)
        found = [(one.model_id, one.state) for one in models.compared(store)]
    assert found == [
        ("kriging-00000002", "pinned"),
        ("kriging-00000003", "newest, not in use"),
        ("kriging-00000001", "earlier"),
    ]
