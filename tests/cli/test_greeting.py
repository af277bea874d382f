"""`zerotune` without a command, and how quickly help answers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from zerotune.store.lockfile import LockFile
from zerotune.tuner import cli
from zerotune.tuner.cli.app import app
from zerotune.tuner.cli.greeting import next_commands


@pytest.mark.parametrize(("has_daemon", "has_store"), [*itertools.product((False, True), repeat=2)])
def test_three_commands_that_there_are(has_daemon, has_store, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ZEROTUNE_ENDPOINT", f"ipc://{tmp_path}/d.sock")
    monkeypatch.setenv("ZEROTUNE_STORE", str(tmp_path / "s.db"))
    if has_store:
        (tmp_path / "s.db").touch()
    lock = LockFile(tmp_path / "d.sock.lock") if has_daemon else None
    monkeypatch.setattr(sys, "argv", ["zerotune"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    if lock is not None:
        lock.release()
    assert left.value.code == 0
    offered = [command for command, _ in next_commands(has_daemon=has_daemon, has_store=has_store)]
    assert len(offered) == 3
    text = capsys.readouterr().out
    assert [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")] == offered
    assert {command.split()[1] for command in offered} <= get_command(app).commands.keys()


@pytest.mark.parametrize("words", [[], ["--help"], ["launch", "--help"]])
def test_nothing_heavy_is_loaded(words: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {words!r}; from zerotune.tuner import cli\n"
    code += "try: cli.main()\nexcept SystemExit: print(*sys.modules)"
    environment = {**os.environ, "ZEROTUNE_ENDPOINT": "ipc:///nowhere/d.sock"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not {"torch", "sklearn", "numpy", "sqlite_utils", "zmq", "matplotlib"} & {
        *done.stdout.splitlines()[-1].split()
    }
