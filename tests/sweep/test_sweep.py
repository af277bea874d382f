"""Sweeps with real worker processes on the emulated NCCL: resumed, interrupted, killed, with broken settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console

from zerotune.store.errors import UserError
from zerotune.store.records import Outcome, Source
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline.sweep import SweepRequest, SweepResult, render, run_sweep

REQUEST = SweepRequest(
    fabric="ethernet_boxes", n_ranks=2, collectives=("all_gather",), min_bytes=65536, max_bytes=131072
)


def quiet(_done: int, _total: int, _words: str) -> None:
    pass


def measured(path: Path) -> np.ndarray:
    with Store.open(path, read_only=True) as store:
        return store.measurements(source=Source.sweep)


def n_workers() -> int:
    """Sweep workers that are alive below this process."""
    alive = 0
    for child in psutil.Process().children(recursive=True):
        try:
            alive += "zerotune.tuner.offline.sweep.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
    return alive


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepResult]:
    path = tmp_path_factory.mktemp("sweep") / "store.db"
    return path, run_sweep(REQUEST, path, quiet)


def test_a_sweeps_measurements_are_in_the_store(first: tuple[Path, SweepResult]):
    path, result = first
    stored = measured(path)
    assert len(stored) == result.n_samples > 0
    assert set(stored["outcome"].tolist()) <= {Outcome.ok, Outcome.outlier}
    assert set(stored["message_bytes"].tolist()) == {65536, 131072}
    with Store.open(path, read_only=True) as store:
        (job,) = store.jobs()
        assert job.job_id == result.job_id
        assert store.fabrics()[result.fabric_id]["emulated"] == "ethernet_boxes"
    best = [row for row in result.rows if row.is_best]
    assert [row.message_bytes for row in best] == [65536, 131072]
    assert all(row.gain_percent is not None and row.gain_percent > 20 for row in best)
    assert n_workers() == 0


def test_a_second_run_repeats_nothing(first: tuple[Path, SweepResult]):
    path, result = first
    before = len(measured(path))
    again = run_sweep(REQUEST, path, quiet)
    assert again.n_restored == before
    assert again.n_samples == 0
    assert len(measured(path)) == before
    assert [row.setting for row in again.rows] == [row.setting for row in result.rows]


@pytest.mark.slow
def test_an_active_sweep_goes_beyond_what_a_full_one_measured(tmp_path: Path):
    fields = {name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__}
    one_size = {"full": True, "max_bytes": 65536}
    full = run_sweep(SweepRequest(**{**fields, **one_size}), tmp_path / "s.db", quiet)
    wider = SweepRequest(**{**fields, "min_bytes": 32768})
    active = run_sweep(wider, tmp_path / "s.db", quiet)
    assert active.n_restored == full.n_samples
    assert 0 < active.n_samples < full.n_samples
    measured_at = {row.message_bytes for row in active.rows if row.n_samples}
    assert measured_at == {32768, 65536, 131072}
    assert run_sweep(wider, tmp_path / "s.db", quiet).n_samples == 0


@pytest.mark.slow
def test_fresh_starts_from_nothing_and_a_spent_budget_says_so(first: tuple[Path, SweepResult]):
    path, _ = first
    fields = {name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__}
    result = run_sweep(SweepRequest(**{**fields, "fresh": True, "budget": 0.01}), path, quiet)
    assert (result.n_restored, result.n_samples) == (0, 5)
    assert result.n_unsettled == 2
    with pytest.raises(UserError, match=r"1e-09 .* 24 "):
        run_sweep(SweepRequest(**{**fields, "fresh": True, "budget": 1e-9}), path, quiet)


@pytest.mark.slow
def test_settings_that_hang_or_fail_are_recorded_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZEROTUNE_FAULTS", "hang:ring/simple/2,fail:ring/ll/4")
    request = SweepRequest(
        fabric="ethernet_boxes",
        collectives=("all_gather",),
        min_bytes=65536,
        max_bytes=65536,
        full=True,
        max_repeats=6,
        timeout_s=2.0,
    )
    result = run_sweep(request, tmp_path / "s.db", quiet)
    broken = {row.setting: row.outcome for row in result.rows if row.outcome != "ok"}
    assert broken == {"ring/simple/2ch": "hung", "ring/ll/4ch": "failed"}
    assert {row.setting for row in result.rows if row.is_best} == {"ring/ll/2ch"}
    assert all(row.n_samples >= 6 for row in result.rows if row.outcome == "ok")
    began_s = time.monotonic()
    again = run_sweep(request, tmp_path / "s.db", quiet)
    assert again.n_visited == 0
    assert again.n_broken == 2
    assert again.job_id == ""
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        assert [job.job_id for job in store.jobs()] == [result.job_id], "what found nothing new leaves no job"
    assert time.monotonic() - began_s < 2, "nothing is left to do: no process is started"
    assert n_workers() == 0
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    render(result, console)
    text = console.export_text()
    assert " 2 s" in text
    assert "ethernet_boxes" in text
    assert result.job_id in text
    narrow = Console(record=True, width=80, file=open(os.devnull, "w"))  # noqa: SIM115
    render(result, narrow)
    words = set(narrow.export_text().split())
    assert words >= {"all_gather", "65,536", *re.findall(r"\w+/\w+/\d+ch", text)}, "none is broken"


@pytest.mark.slow
def test_a_setting_that_keeps_failing_is_not_tried_at_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZEROTUNE_FAULTS", "fail:ring/simple/1")
    monkeypatch.setattr("zerotune.tuner.offline.sweep.broken.SETTING_FAILURES", 1)  # each costs a start of the workers
    request = SweepRequest(
        fabric="ethernet_boxes", collectives=("all_gather",), min_bytes=4096, max_bytes=65536, full=True,
        max_repeats=1, check=False,
    )  # fmt: skip
    result = run_sweep(request, tmp_path / "s.db", quiet)
    assert (result.n_broken, result.n_left_out, result.gave_up) == (1, 4, False)
    again = run_sweep(request, tmp_path / "s.db", quiet)
    assert (again.n_visited, again.n_broken, again.n_left_out) == (0, 1, 4)


@pytest.mark.slow
def test_too_many_failures_end_it_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZEROTUNE_FAULTS", "fail:ring/ll/4")
    monkeypatch.setattr("zerotune.tuner.offline.sweep.run.MAX_STARTS", 1)
    request = SweepRequest(
        fabric="ethernet_boxes", collectives=("all_gather",), min_bytes=4096, max_bytes=65536, full=True,
        max_repeats=1, check=False,
    )  # fmt: skip
    result = run_sweep(request, tmp_path / "s.db", quiet)
    assert result.gave_up
    assert result.n_broken == 1
    assert any(row.n_samples for row in result.rows)
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    render(result, console)
    assert "Given up" in console.export_text()


def sweep_process(path: Path) -> subprocess.Popen[str]:
    """A long sweep in its own process, which prints a line per visit."""
    script = (
        # Where the tests run in a shell's background, they ignore Ctrl-C, and what they start does too.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from zerotune.tuner.offline.sweep import *\n"
        "request = SweepRequest(fabric='ethernet_boxes', full=True, min_bytes=64, max_bytes=4 << 20)\n"
        f"result = run_sweep(request, Path({str(path)!r}), lambda done, total, words: print(words, flush=True))\n"
        "print('interrupted', result.interrupted, result.n_samples, flush=True)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def wait_for_visits(process: subprocess.Popen[str], n_visits: int) -> None:
    assert process.stdout is not None
    for _ in range(n_visits):
        assert process.stdout.readline() != ""


def test_kill_9_loses_at_most_one_visit_and_leaves_no_worker(tmp_path: Path):
    process = sweep_process(tmp_path / "s.db")
    wait_for_visits(process, 8)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=10)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []
    assert len(measured(tmp_path / "s.db")) >= 7 * 6
