"""Several commands start a daemon for one address at once, as the ranks of a job under srun do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotune.store.errors import UserError
from zerotune.tuner.client import background_daemon
from zerotune.tuner.client.background_daemon import SlowDaemonError, ensure_daemon
from zerotune.tuner.client.status import fetch_status


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    where = f"ipc://{tmp_path}/d.sock"
    yield where
    if (answer := fetch_status(where)) is not None:
        os.kill(answer.daemon_pid, signal.SIGTERM)


def test_one_of_them_starts_it_and_all_train(endpoint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--daemon", "--endpoint", endpoint]
    command += ["--fabric", "ethernet_boxes", "--store", str(tmp_path / "s.db"), "--", sys.executable, "-c", "print(7)"]
    launched = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in launched]
    assert [process.returncode for process in launched] == [0] * 3
    assert [out for out, _ in said] == ["7\n"] * 3
    started = re.findall(r"started daemon (\d+)", "".join(error for _, error in said))
    answer = fetch_status(endpoint)
    assert answer is not None
    assert started == [str(answer.daemon_pid)]
    assert all(re.search(rf"daemon {answer.daemon_pid}\b", error) for _, error in said), "which one it is, all say"
    assert not any("not used" in error for _, error in said), said
    assert (tmp_path / "s.daemon.log").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_one_says_so_where_each_is_in_a_container_of_its_own(tmp_path: Path) -> None:
    """Which count their processes alike."""
    contained = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*contained, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("may make no PID namespaces")
    command = [*contained, sys.executable, "-m", "zerotune.tuner.cli", "launch", "--daemon"]
    command += ["--endpoint", f"ipc://{tmp_path}/d.sock", "--store", str(tmp_path / "s.db")]
    command += ["--fabric", "ethernet_boxes", "--", "cat"]
    launched = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        said = [next(line for line in process.stderr or () if "daemon" in line) for process in launched]
    finally:
        for process in launched:  # with `cat` its container ends
            process.communicate("", timeout=60)
    assert [process.returncode for process in launched] == [0] * 3
    assert sum("started daemon" in line for line in said) == 1, said


def test_a_log_that_is_a_link_is_not_followed(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "s.daemon.log").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"s\.daemon\.log"):
        ensure_daemon(endpoint, tmp_path / "s.db")
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_daemon_that_is_slow_to_answer_is_left_alone(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import signal, sys\nif 'daemon' in sys.orig_argv: signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(background_daemon, "START_TIMEOUT_S", 0.5)
    with pytest.raises(SlowDaemonError) as slow:
        ensure_daemon(endpoint, tmp_path / "s.db")
    assert slow.value.process.poll() is None
    slow.value.process.kill()
    slow.value.process.wait()
