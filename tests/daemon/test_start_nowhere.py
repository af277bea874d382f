"""`launch --daemon` where no daemon can be: training runs, untuned, and one line says why."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from zerotune.store.errors import UserError
from zerotune.tuner.cli.live.launch import launch as launch_command


def test_training_runs_beside_a_store_that_cannot_be(private_path, monkeypatch, capsys):
    folder = private_path / "store"
    folder.mkdir()
    folder.chmod(0o777)
    store, launched = folder / "s.db", []
    there = [*folder.rglob("*")]
    monkeypatch.setattr(os, "execvpe", lambda *arguments: launched.append(arguments))
    launch_command(["true"], endpoint=f"ipc://{private_path}/d.sock", daemon=True, store=store)
    assert len(launched) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if str(store.parent) in line)
    assert "--store" in line
    assert [*folder.rglob("*")] == there, "nothing is written where all may write"


def test_training_runs_beside_a_full_disk(private_path):
    """Files of no size can still be made on one."""
    store = private_path / "s.db"
    command = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--daemon", "--store", str(store)]
    command += ["--endpoint", f"ipc://{private_path}/d.sock", "--fabric", "ethernet_boxes", "--", "echo", "trained"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # else it leaves compiled modules cut short
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert str(store.parent) in line
    assert "--store" in line


@pytest.mark.parametrize("listen", ["nowhere", "ipc:///other.sock", "tcp://host:port", "tcp://*:5577"])
def test_an_address_that_cannot_be_is_a_mistake(private_path, monkeypatch, listen):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("launched"))
    endpoint, store = f"ipc://{private_path}/d.sock", private_path / "s.db"
    with pytest.raises(UserError, match=listen.replace("*", ".")):
        launch_command(["true"], endpoint=endpoint, daemon=True, store=store, listen=listen)
