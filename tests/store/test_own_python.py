"""Our own programs import nothing that lies in the folder where a command is run."""

from __future__ import annotations

import subprocess
import sys

from zerotune.store.foreign.own_python import python_with


def test_a_module_in_the_current_folder_is_not_run(tmp_path):
    for name in ("zmq", "msgspec", "typer", "runpy", "zerotune"):
        (tmp_path / f"{name}.py").write_text("import os; open('ran', 'w').close(); raise SystemExit(7)\n")
    done = subprocess.run([*python_with("zerotune.tuner.cli"), "--version"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "ran").exists()


def test_launch_runs_no_python_from_the_working_folder(tmp_path):
    (tmp_path / "zerotune.py").write_text("import os; open('ran', 'w').close(); raise SystemExit(7)\n")
    command = [sys.executable, "-P", "-m", "zerotune.tuner.cli", "launch", "--", "true"]
    # Whoever watches the command has its standard error: that is read until both have ended.
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stderr, "the job's last line is told"
    assert not (tmp_path / "ran").exists()
