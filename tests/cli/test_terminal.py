"""Names that others chose cannot steer the terminal of who reads them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store

NAME = "a\x1b]0;title\x07b\x1b[2Jc\u202ed\x9be\rf"
STEERING = ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x9b")


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.record_job(NAME, NAME, {"gpu": NAME}, 2)
        store.record_steps(NAME, [StepRecord(step, 0, 100.0) for step in range(1, 50)])
        store.update_job(NAME, name=NAME, ended_at_s=1.0)
    return path


def run(*words, on_terminal=False) -> tuple[int, str]:
    command = [sys.executable, "-m", "zerotune.tuner.cli", *words]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    if not on_terminal:
        done = subprocess.run(command, capture_output=True, env=environment)
        return done.returncode, (done.stdout + done.stderr).decode()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 1 << 16):
                said += piece
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    return process.returncode, said.decode()


@pytest.mark.parametrize("on_terminal", [False, True])
@pytest.mark.parametrize("words", [["jobs"], ["explain"], ["explain", "--job", "b\x1b[2J\x07\u202e\x9b"]])
def test_tables_and_errors_show_what_would_steer_a_terminal(store, words, on_terminal):
    code, said = run(*words, "--store", str(store), on_terminal=on_terminal)
    assert code in (0, 2)
    assert not [mark for mark in STEERING if mark in said]
    assert "\\u202e" in said


def test_names_of_files_are_shown_likewise(tmp_path):
    path = tmp_path / "t\x1b[2J\u202e.json"
    path.write_text("nothing")
    code, said = run("import", str(path), "--store", str(tmp_path / "s.db"))
    assert code == 2
    assert not [mark for mark in STEERING if mark in said]
    assert os.fsencode(tmp_path) in said.encode()


def test_json_reads_as_what_was_recorded(store):
    code, said = run("jobs", "--json", "--store", str(store))
    assert code == 0
    assert not [mark for mark in STEERING if mark in said]
    assert NAME in list(texts(json.loads(said)))


def texts(document):
    """All texts of a JSON document."""
    if isinstance(document, str):
        yield document
    for inner in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from texts(inner)
