"""What an interrupted sweep says, and what a killed one leaves."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from zerotune.store.errors import StoreError
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Protocol
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline.sweep.grid import GridPoint, Place
from zerotune.tuner.offline.sweep.result import rows_of
from zerotune.tuner.scratch import ScratchFolder

PLACE = Place(Collective.all_gather, 1 << 20)
RING = Candidate(Algorithm.ring, Protocol.simple, 2)
OTHER_RING = Candidate(Algorithm.ring, Protocol.simple, 4)


@pytest.mark.parametrize("unseen", [BASELINE, RING, OTHER_RING])
def test_while_a_setting_is_not_measured_nothing_is_the_best(unseen: Candidate):
    points = [GridPoint(PLACE, one, [] if one == unseen else [10.0]) for one in (BASELINE, RING, OTHER_RING)]
    assert [row.is_best for row in rows_of(points, 2)] == [False, False]


def test_the_next_sweep_removes_files_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    script = (
        "import time; from zerotune.tuner.scratch import ScratchFolder; folder = ScratchFolder('zt-')\n"
        "(folder.path / 'log').write_text('x'); print(folder.path, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    (tmp_path / "zt-file").touch()
    (tmp_path / "zt-link").symlink_to(theirs)
    with ScratchFolder("zt-") as ours:
        assert (theirs / "log").exists(), "its owner is alive"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with ScratchFolder("zt-") as third:
            assert not theirs.exists()
            assert ours.exists()
            assert third.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"zt-file", "zt-link"}


def test_a_file_system_without_locks_is_not_filled_with_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "zt-other").mkdir()
    n_tries = 0

    def refused(*_: object) -> None:
        nonlocal n_tries
        n_tries += 1
        assert n_tries < 10
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with ScratchFolder("zt-") as ours:
        assert {path.name for path in tmp_path.iterdir()} == {"zt-other", ours.name}, "nobody knows whose it is"
    assert [path.name for path in tmp_path.iterdir()] == ["zt-other"]


def n_measured(path: Path) -> int:
    """0 as long as there is no store, or a store being made."""
    try:
        with Store.open(path, read_only=True) as store:
            return len(store.measurements())
    except StoreError:
        return 0


@pytest.mark.slow
def test_sigterm_ends_a_sweep_as_ctrl_c_does(tmp_path: Path):
    path = tmp_path / "s.db"
    command = [
        sys.executable,
        "-m",
        "zerotune.tuner.cli",
        "sweep",
        "--full",
        "--fabric",
        "as_believed",
        "--store",
        str(path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    while not n_measured(path) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    process.terminate()
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "have measurements" in " ".join(text.split())
