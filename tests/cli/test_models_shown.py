"""`zerotune models list` and `compare` name each model once, also where a pin keeps a copy of it."""

from __future__ import annotations

import io
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from zerotune.store.errors import StoreError, UserError
from zerotune.store.records import ModelRecord
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner import cli
from zerotune.tuner.modeling import kept_models, trainer
from zerotune.tuner.modeling.correction.baked import RUNGS, Baked

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
        kept_models.roll_back(store, None)
        listed = [(line.model_id, line.state.partition(",")[0]) for line in kept_models.listed(store)]
        compared = [one.model_id for one in kept_models.compared(store)]
    assert listed == [
        ("kriging-00000002", "pinned"),
        ("kriging-00000003", "newest"),
        ("kriging-00000001", "earlier"),
    ]
    assert sorted(compared) == ["kriging-00000001", "kriging-00000002", "kriging-00000003"]


def test_pinning_the_one_in_use_shows_it_as_pinned_and_once(path: Path):
    with Store.open(path) as store:
        kept_models.pin(store, "kriging-00000003", None)
        assert [line.state for line in kept_models.listed(store)] == ["pinned", "earlier", "earlier"]
        kept_models.roll_back(store, None)
        assert next(line.model_id for line in kept_models.listed(store) if line.state == "pinned") == "kriging-00000002"
        kept_models.release(store, None)
        assert [line.state for line in kept_models.listed(store)] == ["in use", "earlier", "earlier"]


def test_from_the_oldest_one_there_is_no_way_back_but_another(path: Path):
    with Store.open(path) as store:
        kept_models.pin(store, "kriging-00000001", None)
        with pytest.raises(UserError, match="kriging-00000001"):
            kept_models.roll_back(store, None)


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


def test_names_that_people_copy_are_whole_on_80_columns(path: Path):
    out = io.StringIO()
    console = Console(file=out, width=80)
    with Store.open(path) as store:
        kept_models.roll_back(store, None)  # its state is the widest
        lines = [msgspec.structs.replace(one, fabric_id="emulated-" + 40 * "x") for one in kept_models.listed(store)]
        kept_models.render(lines, console)
        found = [msgspec.structs.replace(one, fabric_id="emulated-" + 40 * "x") for one in kept_models.compared(store)]
        kept_models.render_comparison(found, lines, console)
    text = out.getvalue()
    for number in (1, 2, 3):
        assert text.count(f"kriging-{number:08x}") == 2
    assert text.count("fabric emulated-" + 40 * "x") == 2
    assert max(map(len, text.splitlines())) <= 80


def test_changing_models_leaves_a_damaged_store_as_it_is(path: Path):
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is damaged: .*; `.* repair "):
        kept_models.open_for_change(path)
    assert path.read_bytes() == content
    assert not [one for one in path.parent.iterdir() if "corrupt" in one.name]


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


def test_a_new_fit_beside_a_damaged_one_sets_it_aside(path: Path):
    damage(path, "kriging")
    with Store.open(path) as store:
        trainer.keep(store, fitted(4))
        store.flush()
        states = [(line.model_id, line.state) for line in kept_models.listed(store)]
    assert states[0] == ("kriging-00000004", "in use")
    assert ("kriging.damaged", "set aside") in states


def test_a_damaged_pin_leaves_the_newest_in_use(path: Path):
    with Store.open(path) as store:
        kept_models.pin(store, "kriging-00000001", None)
    damage(path, "kriging.pinned")
    with Store.open(path) as store:
        states = {line.model_id: line.state for line in kept_models.listed(store)}
    assert states["kriging-00000003"] == "in use"
    assert states["kriging.pinned"].startswith("pinned, ")


@pytest.mark.parametrize("both", [False, True])
def test_a_pin_whose_bytes_are_cut_is_told_once_and_as_a_pin(path: Path, both: bool):
    with Store.open(path) as store:
        kept_models.pin(store, "kriging-00000001", None)
    for name in ("kriging.pinned", *(["kriging@00000001"] if both else [])):
        damage(path, name, "blob", b"cut")
    with Store.open(path) as store:
        states = [(line.model_id, line.state) for line in kept_models.listed(store)]
    told = [("kriging-00000001", "pinned, not in use: damaged")]
    assert sorted(one for one in states if one[0] == "kriging-00000001") == sorted(
        [*told, *([] if both else [("kriging-00000001", "earlier")])]
    )
    assert ("kriging-00000003", "in use") in states


def test_comparing_damaged_models_alone_says_so(path: Path):
    for name in ("kriging", "kriging@00000001", "kriging@00000002"):
        damage(path, name)
    out = io.StringIO()
    with Store.open(path) as store:
        kept_models.render_comparison(
            kept_models.compared(store), kept_models.listed(store), Console(file=out, width=120)
        )
    assert re.match(r"None of 3 .*", out.getvalue())


@pytest.mark.parametrize("words", [["list"], ["compare"], ["pin", "kriging-00000001"], ["rollback"], ["release"]])
def test_a_fabric_that_is_not_there_is_no_fabric_without_models(words: list[str], path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerotune", "models", *words, "--store", str(path), "--fabric-id", "nope"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert re.search(f"'nope' .*{path};.* {FABRIC}\n", capsys.readouterr().err)
    Store.open(path).close()  # given back


def test_comparing_says_which_is_used_and_names_it_first(path: Path):
    with Store.open(path) as store:
        kept_models.roll_back(store, None)
        found = [(one.model_id, one.state.partition(",")[0]) for one in kept_models.compared(store)]
    assert found == [
        ("kriging-00000002", "pinned"),
        ("kriging-00000003", "newest"),
        ("kriging-00000001", "earlier"),
    ]
