"""`launch --daemon` with what makes a daemon one of many: shared measurements, a book, other nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.tuner.client.status import fetch_status

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet.signing import make_key, public_path

ZEROTUNE = [sys.executable, "-m", "zerotune.tuner.cli"]


def test_the_daemon_shares_reads_the_book_and_listens_as_launch_was_told(tmp_path: Path) -> None:
    endpoint, fleet, book = f"ipc://{tmp_path}/d.sock", tmp_path / "fleet", tmp_path / "fleet.book"
    keys, signing = tmp_path / "keys", tmp_path / "book.key"
    subprocess.run([*ZEROTUNE, "daemon", "keys", str(keys)], check=True, capture_output=True)
    make_key(signing)

    def launch(*options: object) -> subprocess.CompletedProcess[str]:
        command = [*ZEROTUNE, "launch", "--daemon", "--endpoint", endpoint, "--store", tmp_path / "s.db"]
        command += ["--fabric", "ethernet_boxes", *options, "--", "true"]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=False)

    options = ("--fleet", fleet, "--contributor", "rack7/node3", "--book", book, "--book-key", public_path(signing),
               "--listen", "tcp://127.0.0.1:*", "--curve-keys", keys)  # fmt: skip
    first = launch(*options)
    assert first.returncode == 0, first.stderr
    answer = fetch_status(endpoint)
    assert answer is not None
    try:
        assert (answer.fleet.url, answer.fleet.contributor, answer.fleet.book) == (str(fleet), "rack7/node3", str(book))
        host, _, port = answer.listen.rpartition(":")
        assert host == "tcp://127.0.0.1"
        assert port.isdigit()

        again = launch(*options)
        assert again.returncode == 0
        assert "--" not in again.stderr, "nothing is left unused"
        other = launch("--fleet", tmp_path / "other", "--listen", "tcp://127.0.0.1:*", "--curve-keys", keys)
        assert other.returncode == 0, "training goes on with the daemon that is there"
        assert "--fleet" in other.stderr
        assert "--listen" not in other.stderr
    finally:
        os.kill(answer.daemon_pid, signal.SIGTERM)
