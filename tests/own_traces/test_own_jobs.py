"""Folders of our own traces: whose each file is, and which of them a command uses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.errors import TraceError, UserError
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline import stage_command
from zerotune.tuner.offline.replay.reading import load_table

N_CALLS = 60


def log(folder: Path, rank: int, n_calls: int = N_CALLS, job_id: str = "job-1") -> Path:
    """Two ranks of one node each write files; within their communicator each is of another number, 1 - rank."""
    block = np.zeros(n_calls, OBSERVATION_FIELDS)
    block["comm_id"], block["n_ranks"], block["n_nodes"], block["rank"] = 7, 2, 1, 1 - rank
    block["message_bytes"], block["collective"] = 1 << 20, 2
    block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 4
    block["sequence"], block["flags"], block["timing_source"] = np.arange(n_calls), 2, 4
    block["start_ns"], block["duration_us"] = 10**6 * (1 + np.arange(n_calls)), 50 + rank
    block["memory_pressure"] = -1
    made = TraceLog(folder, job_id=job_id, rank=rank, n_ranks=2, fabric_id="f", fabric={}, version="0")
    made.record(block)
    made.close()
    assert made.path is not None
    return made.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(2):
        log(tmp_path / "traces", rank)
    return tmp_path / "traces"


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    return done.exit_code, done.output + str(done.exception or "")


def test_a_copied_file_is_no_other_rank(folder: Path):
    shutil.copy(folder / "job-1.rank00000.zttrace", folder / "saved.zttrace")
    table = load_table(folder)
    assert (table.n_files, len(table.rows)) == (2, N_CALLS)
    (note,) = table.notes
    assert "saved.zttrace" in note
    assert "job-1.rank00000.zttrace" in note
    (folder / "job-1.rank00001.zttrace").unlink()
    table = load_table(folder)
    assert table.n_files == 1
    assert "Files of 1 of 2 ranks" in table.notes[1]
    assert stage_command.read(folder).n_calls == N_CALLS


def test_of_several_jobs_one_is_named(folder: Path):
    for rank in range(2):
        log(folder, rank, 20, job_id="job-2")
    for read in (load_table, stage_command.read):
        with pytest.raises(TraceError, match=r"\(job-1, job-2\);.* --job"):
            read(folder)
        with pytest.raises(UserError, match=r"job-3;.* job-1, job-2"):
            read(folder, job_id="job-3")
    assert [len(load_table(folder, job_id=name).rows) for name in ("job-1", "job-2")] == [N_CALLS, 20]
    assert load_table(folder, likely_job_id="job-2").job_id == "job-2", "a report's own job"
    code, shown = run("replay", folder, "--job", "job-2", "--json")
    assert (code, json.loads(shown)["n_collectives"]) == (0, 20)
    code, shown = run("explain", "--trace", folder, "--job", "job-1", "--json")
    assert (code, json.loads(shown)["n_calls"]) == (0, N_CALLS)


def test_several_files_are_one_job_or_several(tmp_path: Path, folder: Path):
    """Rank files of one job belong together; several jobs come one after the other."""
    files = sorted(folder.iterdir())
    other = log(tmp_path / "elsewhere", 1, 20, job_id="job-2")
    kineto = Path(__file__).parents[1] / "data" / "kineto"
    for words, jobs in (
        (files, ["job-1"]),
        ([*files, other, kineto], ["job-1", "job-2", ""]),
        ([folder, other.parent, "--job", "job-2"], ["job-2"]),
        ([*files, "--rank", "1"], ["job-1"]),
    ):
        words = [one for word in words for one in ([word] if str(word)[:2] in ("--", "1", "jo") else ["--trace", word])]
        code, shown = run("explain", *words, "--json")
        assert (code, [one["job"] for one in json.loads(shown)]) == (0, jobs)
        assert run("explain", *words)[0] == 0
    assert json.loads(shown)[0]["trace"] == str(files[1])


def test_a_restarted_job_is_replayed_by_its_longest_start(folder: Path):
    """Each start counts its collectives anew, in communicators of the same ids."""
    for rank in range(2):
        log(folder, rank, 10 * N_CALLS)
        log(folder, rank, 5)
    table = load_table(folder)
    assert (len(table.rows), table.n_files) == (10 * N_CALLS, 2)
    assert " 3 times" in table.notes[0]
