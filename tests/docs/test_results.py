"""docs/results.md and the README's figures say what benchmarks/results holds, and nothing else is said there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.__main__ import programs
from benchmarks.lib.reporting import Result
from benchmarks.recording import record, runs
from benchmarks.recording.results import PAGE, README, page, readme, worst
from benchmarks.recording.runs import README_FIGURES, RESULTS, ROOT, RUNS, Recorded, Run

RECORDED = [run for run in RUNS if run.path.exists()]


def test_page_is_made_of_the_files():
    assert PAGE.read_text() == page()


def test_readme_is_made_of_the_files():
    assert README.read_text() == readme()


def test_readme_is_short_and_has_the_two_commands():
    text = README.read_text()
    assert len(text.splitlines()) <= 140
    assert "make run" in text
    assert "make test" in text


def test_every_run_names_a_benchmark_once():
    assert {run.benchmark for run in RUNS} <= set(programs())
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_every_file_is_a_run_of_today():
    assert {path.stem for path in RESULTS.glob("*.json")} <= {run.name for run in RUNS}
    for run in RECORDED:
        assert Recorded.load(run.path).command == f"python -m benchmarks {run.command}"


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.name)
def test_every_target_can_be_judged(run):
    recorded = Recorded.load(run.path)
    assert recorded.results
    assert all((one.is_met is None) == (not one.target) for one in recorded.results)
    assert {"cpu", "n_cores", "memory_gib", "load"} <= set(recorded.environment)
    assert recorded.date
    assert recorded.commit


def test_readme_figures_come_from_runs():
    names = {run.name: run for run in RUNS}
    for shown in README_FIGURES:
        assert shown.run in names


@pytest.mark.parametrize(
    ("target", "good", "bad"),
    [("<= 5", 5, 5.1), (">= 2.5", 2.5, 2.4), ("< 0", -1, 0), ("> -10", -9, -10), ("85 to 95", 90, 96), ("0", 0, 1)],
)
def test_targets(target: str, good: float, bad: float):
    assert Result("figure", good, "", target).is_met is True
    assert Result("figure", bad, "", target).is_met is False


def test_a_target_that_nobody_can_read():
    with pytest.raises(ValueError, match="figure"):
        assert Result("figure", 1, "", "about 5").is_met


@pytest.mark.parametrize(("target", "value"), [("<= 5", 9), (">= 5", 1), ("4 to 8", 1), ("4", 1)])
def test_the_worst_of_several_is_shown(target: str, value: float):
    assert worst([Result(f"figure@{one}", one, "", target) for one in (4, 1, 9)]).value == value


def test_what_is_recorded_reads_back(tmp_path):
    recorded = Recorded((Result("figure", 1.5, "us", "<= 2", "peer", 0.5),), {"load": 0.1}, "command", "day", "abc", 3)
    recorded.save(tmp_path / "one.json")
    assert Recorded.load(tmp_path / "one.json") == recorded


def test_what_met_this_code_is_not_run_again(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    for folder in record.CODE[:-1]:
        (tmp_path / folder).mkdir()
    code, run = tmp_path / "agent" / "code.py", Run("one", "demo")
    code.write_text("first")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "benchmarks" / "results")
    (tmp_path / "benchmarks" / "results").mkdir()
    assert not record.is_current(run)
    command = f"python -m benchmarks {run.command}"
    Recorded((Result("figure", 1, ""),), {}, command, "day", record.commit_now(), 1).save(run.path)
    git("add", ".")
    git("commit", "-m", "recorded")
    assert record.is_current(run)
    assert not record.is_current(Run("one", "demo --steps 9"))
    code.write_text("second")
    assert not record.is_current(run)
    assert record.commit_now().endswith("+")


def test_a_run_that_is_not_there():
    command = [sys.executable, "-m", "benchmarks", "record", "nope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nope" in done.stderr
