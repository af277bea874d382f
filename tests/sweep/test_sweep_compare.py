"""Two sweeps side by side: real changes are found, noise is not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Candidate, Protocol, Source
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.offline.sweep.compare import compare, render_comparison

LL, SIMPLE = Candidate(Algorithm.ring, Protocol.ll, 4), Candidate(Algorithm.ring, Protocol.simple, 4)


def record(store: Store, job_id: str, fabric_id: str, medians: dict[Candidate, float], n_samples: int = 12) -> None:
    chance = np.random.default_rng(len(job_id))
    rows = []
    for candidate, us in medians.items():
        block = np.zeros(n_samples, MEASUREMENT)
        block["n_ranks"], block["n_nodes"], block["collective"], block["message_bytes"] = 2, 2, 2, 1 << 20
        block["algorithm"], block["protocol"], block["n_channels"] = candidate.algorithm, candidate.protocol, 4
        block["duration_us"], block["source"] = us * chance.lognormal(0, 0.01, n_samples), Source.sweep
        rows.append(block)
    store.record_job(job_id, fabric_id, {}, 2)
    store.record_measurements(fabric_id, job_id, np.concatenate(rows))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweeps") / "s.db"
    with Store.open(path) as store:
        record(store, "sweep-a", "old", {LL: 100.0, SIMPLE: 200.0})
        record(store, "sweep-b", "old", {LL: 100.5, SIMPLE: 201.0})
        record(store, "sweep-new", "new", {LL: 250.0, SIMPLE: 200.0})
        record(store, "sweep-short", "new", {LL: 400.0}, n_samples=3)
        store.flush()
    return path


def test_noise_is_no_change(path: Path):
    result = compare(path, "sweep-a", "sweep-b")
    assert {one.verdict for one in result.cells} == {"same"}
    assert result.changed_winners == ()


def test_a_real_change_and_a_new_winner(path: Path):
    result = compare(path, "sweep-a", "sweep-new")
    verdicts = {one.setting: one.verdict for one in result.cells}
    assert verdicts == {"ring/ll/4ch": "slower", "ring/simple/4ch": "same"}
    assert len(result.changed_winners) == 1
    assert re.search("ring/simple/4ch .*ring/ll/4ch", result.changed_winners[0])
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    render_comparison(result, console)
    text = console.export_text()
    assert "1 of 2 " in text
    assert "slower" in text


def test_unknown_sweeps_are_refused_by_name(path: Path):
    with pytest.raises(UserError, match=r"no sweep 'x'.*sweep-a"):
        compare(path, "x", "sweep-a")
