"""Settings that NCCL cannot run: a file that names them is mistaken, and they would win wherever they were used."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import pytest
from import_runs import command, old_store

from zerotune.agent.nccl.catalog import legal_cells
from zerotune.store.records import Algorithm, Collective, Protocol
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.runnable import can_run
from zerotune.tuner.modeling.statistics import statistics

HEADER = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,latency_us\n"
SIZES = (4096, 65536, 1048576)
POSSIBLE = {"default,simple,-1": 50, "ring,simple,8": 40}
IMPOSSIBLE = {"tree,ll,8": 5, "nvls_tree,simple,8": 4}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """All-gathers on two nodes, of which the fastest cannot have been."""
    path = tmp_path / "mixed" / "mixed.csv"
    path.parent.mkdir()
    rows = (POSSIBLE | IMPOSSIBLE).items()
    path.write_text(HEADER + "".join(f"allgather,{size},{what},2,16,{us}\n" for size in SIZES for what, us in rows))
    return path


def test_the_import_leaves_them_out_and_says_how_many_and_one(mixed: Path, tmp_path: Path, monkeypatch, capsys):
    store = tmp_path / "s.db"
    told = json.loads(command(monkeypatch, capsys, mixed, "--store", store, "--json")[1])
    assert (told["n_measurements"], told["left_out"]) == (6, {"cannot_run": 6})
    assert told["examples"]["cannot_run"][0] == "tree/ll for all_gather on 2 nodes"
    assert json.loads(command(monkeypatch, capsys, mixed, "--dry-run", "--json")[1])["left_out"] == told["left_out"]
    with Store.open(store, read_only=True) as opened:
        assert set(opened.measurements()["algorithm"].tolist()) == {255, Algorithm.ring}


def test_a_store_that_has_them_does_not_show_them_and_says_so(tmp_path: Path, caplog):
    """To any reader: there is one place that decides."""
    path = old_store(tmp_path / "s.db")
    with Store.open(path, read_only=True) as store:
        assert store.measured() == {("j", "f"): 10}
        ran = {(line.key.size_class, str(line.candidate)) for line in statistics(store, "f")}
    assert len(ran) == 5, "what was measured here is known to have run"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(named in record.getMessage() for named in (str(path), "(1, ", "all_gather by tree/ll"))


def test_imports_refuse_no_setting_that_can_run():
    """The rule for what others wrote is never stricter than what some release offers on some hardware."""
    for collective, n_nodes in itertools.product(Collective, (1, 2, 16)):
        offered = {
            cell
            for collnet, nvls, version in itertools.product((False, True), (False, True), ((2, 20), (2, 28)))
            for cell in legal_cells(collective, n_nodes=n_nodes, collnet=collnet, nvls=nvls, nccl_version=version)
        }
        able = {cell for cell in itertools.product(Algorithm, Protocol) if can_run(collective, *cell, n_nodes)}
        assert offered <= able
        # NCCL_PAT_ENABLE=1 allows several ranks of one node.
        assert {algorithm for algorithm, _ in able - offered} <= {Algorithm.pat}
