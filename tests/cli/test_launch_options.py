"""`zerotune launch`: options that contradict each other or lead nowhere are refused before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from zerotune.agent.settings import ENV_ALL, AgentSettings, unpack_variables
from zerotune.agent.steps.summary import SummaryWriter
from zerotune.store import wire
from zerotune.store.job_options import JobOptions
from zerotune.store.records import StepRecord
from zerotune.tuner import cli
from zerotune.tuner.client.background_daemon import SlowDaemonError


class Launched(Exception):
    """In place of the training command."""


def environment_of_the_command(monkeypatch, capsys, *words: object) -> dict[str, str]:
    """What a command that is launched with these options finds in its environment."""
    found: list[dict[str, str]] = []

    def run(_file: str, _arguments: list[str], environment: dict[str, str]) -> None:
        found.append(environment)
        raise Launched

    monkeypatch.setattr(os, "execvpe", run)
    monkeypatch.setattr("zerotune.tuner.client.status.fetch_status", lambda *_, **__: ANSWER)
    monkeypatch.setattr(sys, "argv", ["zerotune", "launch", *map(str, words), "--", "true"])
    with pytest.raises(Launched):
        cli.main()
    assert "not used" not in capsys.readouterr().err
    return found[0]


def launch(monkeypatch, capsys, *words: object, command: tuple[str, ...] = ("true",)) -> tuple[int, str]:
    """Exit code, 0 where the command would have run, and what was said."""

    def run(*_: object) -> None:
        raise Launched

    monkeypatch.setattr(os, "execvpe", run)
    monkeypatch.setattr("zerotune.tuner.client.status.fetch_status", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["zerotune", "launch", *map(str, words), "--", *command])
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
        code = int(left.value.code or 0)
    except Launched:
        code = 0
    return code, capsys.readouterr().err


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text('{"zerotune_plan": 1, "rows": []}')
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    "words",
    [
        ("--no-agent", "--plan"),
        ("--no-agent", "--log-trace"),
        ("--no-agent", "--daemon"),
        ("--no-agent", "--shadow"),
        ("--plan", "--tune-for"),
        ("--shadow", "--compare"),
        ("--shadow", "--tune-environment"),
        ("--plan", "--daemon"),
        ("--store",),
        ("--budget-percent",),
        ("--memory-threshold",),
        ("--no-explore",),
        ("--listen",),
        ("--fleet",),
    ],
)
def test_useless_options_are_refused_by_name_with_the_remedy(words, plan, tmp_path, monkeypatch, capsys):
    values = {"--plan": plan, "--log-trace": tmp_path / "trace", "--store": tmp_path / "s.db"}
    values |= {"--budget-percent": 2, "--memory-threshold": 0.8, "--listen": "tcp://*:5577", "--fleet": "shared"}
    values |= {"--tune-for": 50, "--compare": 80}
    given = [part for word in words for part in ((word, values[word]) if word in values else (word,))]
    code, error = launch(monkeypatch, capsys, *given)
    assert (code, error.count("\n")) == (2, 1), error
    assert all(word in error for word in words)
    assert len(words) > 1 or "--no-daemon" in error
    assert not (tmp_path / "trace").exists()


def test_documented_commands_launch(plan, tmp_path, monkeypatch, capsys):
    for words in (
        ("--no-agent", "--summary", tmp_path / "before.json"),
        ("--summary", tmp_path / "after.json", "--log-trace", tmp_path / "trace"),
        ("--plan", plan, "--summary", tmp_path / "after.json"),
        ("--no-agent", "--endpoint", "ipc:///nowhere/d.sock"),
    ):
        code, error = launch(monkeypatch, capsys, *words)
        assert code == 0, error
        assert "not used" not in error


def test_a_summary_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "s.json").mkdir()
    summary = SummaryWriter(tmp_path / "s.json")
    summary.describe(None, 2)
    summary.add(StepRecord(1, 0, 10.0))
    with pytest.raises(OSError, match="directory"):
        summary.write()
    assert [one.name for one in tmp_path.iterdir()] == ["s.json"]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("ZEROTUNE_SEED", "abc", "0"),
        ("ZEROTUNE_COMPUTE", "nan", "model"),
        ("ZEROTUNE_COMPUTE", "measured:nan", "model"),
        ("ZEROTUNE_DEVICE_MB", "-5", "40000"),
    ],
)
def test_settings_of_the_emulation_are_checked_before_anything_starts(name, value, remedy, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    code, error = launch(monkeypatch, capsys, "--no-agent", "--fabric", "ethernet_boxes")
    assert (code, error.count("\n")) == (2, 1), error
    assert f"{name}={value!r}" in error
    assert f" {remedy}" in error
    code, error = launch(monkeypatch, capsys, "--no-agent")  # on the real NCCL they say nothing
    assert code == 0, error


@pytest.mark.parametrize(
    ("options", "n_ranks"),
    [
        (("--nproc-per-node", "9"), 9),
        (("--nproc_per_node=4", "--nnodes", "3:5"), 12),
        (("--nproc-per-node", "gpu"), 0),
        (("--nproc-per-node=8",), 0),
        ((__file__, "--nproc-per-node", "9"), 0),
    ],
)
def test_more_ranks_than_the_fabric_has_are_refused(options, n_ranks, monkeypatch, capsys):
    command = ("env", "true", *options)
    code, error = launch(monkeypatch, capsys, "--no-agent", "--fabric", "h100_node", command=command)
    assert code == (2 if n_ranks else 0), error
    if n_ranks:
        assert error.count("\n") == 1
        assert f"h100_node has 1 node of 8 ranks, too few for {n_ranks} ranks; use fewer ranks" in error


def test_limits_of_trials_reach_the_daemon_that_launch_starts(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        "zerotune.tuner.client.background_daemon.ensure_daemon",
        lambda *_, options, **__: asked.append(options) or (ANSWER, Started),
    )
    for words in (("--budget-percent", "2.5", "--memory-threshold", "0.8"), ("--no-explore",), ()):
        code, error = launch(monkeypatch, capsys, "--daemon", "--store", tmp_path / "s.db", *words)
        assert code == 0, error
        assert asked.pop() == list(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), JobOptions()),
        (("--shadow",), JobOptions(shadow=True)),
        (("--tune-for", 500, "--compare", 80), JobOptions(tune_steps=500, compare_steps=80)),
    ],
)
def test_options_of_a_job_hold_for_it_under_any_daemon(words, told, monkeypatch, capsys):
    environment = environment_of_the_command(monkeypatch, capsys, *words)
    taken: dict[str, str] = {ENV_ALL: environment[ENV_ALL]}
    unpack_variables(taken)
    assert AgentSettings.from_environment(taken).job_options == told


def test_training_starts_beside_a_daemon_that_is_slow_to_start(tmp_path, monkeypatch, capsys):
    def slow(*_, **__):
        raise SlowDaemonError("ipc://x", Started, tmp_path / "s.daemon.log")

    monkeypatch.setattr("zerotune.tuner.client.background_daemon.ensure_daemon", slow)
    code, error = launch(monkeypatch, capsys, "--daemon", "--store", tmp_path / "s.db")
    assert code == 0, error
    assert sum("s.daemon.log" in line for line in error.splitlines()) == 1, error


ANSWER = wire.StatusReply(1, "0", "ipc://x", "s.db", 1.0, 1, 0)


class Started:
    pid = 1


@pytest.mark.parametrize("n_files", [12, 16, 20])
def test_too_few_files_are_one_sentence(n_files, tmp_path):
    command = ["prlimit", f"--nofile={n_files}", sys.executable, "-m", "zerotune.tuner.cli", "launch"]
    done = subprocess.run(
        [*command, "--endpoint", f"ipc://{tmp_path}/d.sock", "--", "true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "ulimit" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_daemon_the_environment_is_as_it_was_and_training_starts(tmp_path, monkeypatch, capsys):
    own = tmp_path / "own.env"
    own.write_text("NCCL_BUFFSIZE=8388608\n")
    code, error = launch(monkeypatch, capsys, "--no-daemon", "--tune-environment", "--environment-file", own)
    assert code == 0, error
    assert "--tune-environment is not used" in error
    code, error = launch(monkeypatch, capsys, "--environment-file", own)
    assert (code, error.count("\n")) == (2, 1), error
    own.write_text("NCCL_ALGO=ring\n")
    code, error = launch(monkeypatch, capsys, "--no-daemon", "--tune-environment", "--environment-file", own)
    assert code == 2
    assert "own.env, line 1: NCCL_ALGO is not tried" in error


def test_a_store_that_cannot_be_read_keeps_nobody_from_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "s.db").write_bytes(b"no store" * 1000)
    answer = structs.replace(ANSWER, store_path=str(tmp_path / "s.db"))
    monkeypatch.setattr("zerotune.tuner.client.background_daemon.ensure_daemon", lambda *_, **__: (answer, Started))
    code, error = launch(monkeypatch, capsys, "--daemon", "--store", tmp_path / "s.db", "--tune-environment")
    assert code == 0, error
    assert "--tune-environment is not used" in error


def test_a_variable_that_is_neither_yes_nor_no_is_named_with_its_value(monkeypatch, capsys):
    monkeypatch.setenv("ZEROTUNE_AGENT", "maybe")
    code, error = launch(monkeypatch, capsys)
    assert code == 2
    assert "is 'maybe' in the environment (ZEROTUNE_AGENT); give 1 or 0" in error
