"""Names that others chose cannot steer the terminal of who reads them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import zmq

from benchmarks.lib.command_line import zerotune
from zerotune.store import wire
from zerotune.store.records import ModelRecord, StepRecord
from zerotune.store.sqlite.database import Store

NAME = "a\x1b]0;title\x07b\x1b[2Jc\u202ed\x9be\rf[/x]g[link=http://h]i"
FORGED = "\nforged"
STEERING = ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x9b")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "s.db"
    with Store.open(path) as store:
        store.record_job(NAME, NAME, {"gpu": NAME}, 2)
        store.record_steps(NAME, [StepRecord(step, 0, 100.0) for step in range(1, 50)])
        store.update_job(NAME, name=NAME, ended_at_s=1.0)
        store.save_model(ModelRecord("kriging", NAME, b"none", {"model": "kriging"}, "hash", 0.1, 100.0))
    return path


@pytest.fixture(scope="module")
def daemon():
    """A daemon with a job whose names were all chosen by others, and its log."""
    folder = Path(tempfile.mkdtemp(prefix="zt-"))
    endpoint, log = f"ipc://{folder}/d.sock", folder / "log"
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--verbose", "--endpoint", endpoint]
    with log.open("wb") as file, zmq.Context() as context, context.socket(zmq.DEALER) as rank:
        rank.linger = 0
        with subprocess.Popen([*command, "--store", str(folder / "s.db")], stderr=file) as process:
            try:
                rank.connect(endpoint)
                for more in (FORGED, ""):  # the first is refused
                    hello = wire.Hello(NAME + more, 0, 1, 0, NAME, 1, NAME, {"gpu": NAME + FORGED}, 22809, 5)
                    rank.send_multipart(wire.encode(hello))
                assert rank.poll(60_000)
                yield endpoint, log
            finally:
                process.terminate()
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("words", "on_terminal"),
    [(["status"], True), (["status", "--watch", "--once"], True), (["status"], False), (["status", "--json"], False),
     (["status", "--watch", "--json"], False)],
)  # fmt: skip
def test_names_of_connected_jobs_steer_nothing(daemon, words, on_terminal):
    endpoint, log = daemon
    code, said = run(*words, "--endpoint", endpoint, on_terminal=on_terminal)
    assert code == 0, said
    assert not [mark for mark in STEERING if mark in said]
    assert "\\u202e" in said
    told = log.read_text()
    assert not [mark for mark in STEERING if mark in told]
    assert FORGED not in told + said, "a name makes no line of its own"


def run(*words, on_terminal=False) -> tuple[int, str]:
    command = [sys.executable, "-m", "zerotune.tuner.cli", *words]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    if not on_terminal:
        with patch.dict(os.environ, environment):
            done = zerotune(*words)
        return done.code, done.out + done.err
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


@pytest.mark.parametrize(
    ("words", "on_terminal"),
    [(["jobs"], True), (["jobs"], False), (["explain"], False), (["store", "models"], False),
     (["explain", "--job", "b\x1b[2J\x07\u202e\x9b"], False)],
)  # fmt: skip
def test_tables_and_errors_show_what_would_steer_a_terminal(store, words, on_terminal):
    code, said = run(*words, "--store", str(store), on_terminal=on_terminal)
    assert code in (0, 2)
    assert not [mark for mark in STEERING if mark in said]
    assert "\\u202e" in said


def test_brackets_in_names_of_files_are_no_markup(store, tmp_path):
    (tmp_path / "[").mkdir(mode=0o700)
    path = shutil.copy(store, tmp_path / "[" / "x][link=http:h]y.db")
    code, said = run("store", "check", path, on_terminal=True)
    assert code == 0, said
    assert not [mark for mark in STEERING if mark in said]


def test_names_of_files_are_shown_likewise(tmp_path):
    path = tmp_path / "t\x1b[2J\u202e.json"
    path.write_text("nothing")
    code, said = run("store", "import", str(path), "--store", str(tmp_path / "s.db"))
    assert code == 2
    assert not [mark for mark in STEERING if mark in said]
    assert os.fsencode(tmp_path) in said.encode()


def test_json_reads_as_what_was_recorded(store):
    code, said = run("jobs", "--json", "--store", str(store))
    assert code == 0
    assert not [mark for mark in STEERING if mark in said]
    assert NAME in list(texts(json.loads(said)))


def test_names_beyond_the_encoding_of_stdout_are_escaped(tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("müller", "müller", {}, 2)
    command = [sys.executable, "-m", "zerotune.tuner.cli", "jobs", "--all", "--store", str(tmp_path / "s.db")]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert b"m\\xfcller" in done.stdout


def test_a_closed_stdout_is_no_failure(store):
    command = [sys.executable, "-m", "zerotune.tuner.cli", "jobs", "--all", "--store", str(store)]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def texts(document):
    """All texts of a JSON document."""
    if isinstance(document, str):
        yield document
    for inner in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from texts(inner)
