"""Whoever has no key holds little of a daemon, and not for long."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.auth
from daemon_process import WAIT_S, hello, receive

from benchmarks.lib.free_port import free_port
from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.store import wire
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.endpoint import make_keys
from zerotune.tuner.service.network.gate import MAX_STRANGERS

MAX_FILES = 320
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(15 + 32)


class Listening:
    """A daemon that may have few files open."""

    def __init__(self, folder: Path) -> None:
        self.ipc, self.port, self.keys = f"ipc://{folder}/d.sock", free_port(), folder / "keys"
        self.tcp = f"tcp://127.0.0.1:{self.port}"
        make_keys(self.keys)
        command = ["prlimit", f"--nofile={MAX_FILES}", sys.executable, "-m", "zerotune.tuner.cli", "daemon"]
        command += ["--endpoint", self.ipc, "--listen", self.tcp, "--curve-keys", str(self.keys)]
        self.process = subprocess.Popen([*command, "--store", str(folder / "s.db")], stderr=subprocess.DEVNULL)
        assert until(lambda: self.answers(self.ipc) and self.answers(self.tcp))

    def answers(self, endpoint: str) -> bool:
        return fetch_status(endpoint, 5.0, curve_dir=self.keys) is not None

    @property
    def n_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def until(is_so: Callable[[], bool]) -> bool:
    ends_at_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_at_s:
        with suppress(OSError):
            if is_so():
                return True
        time.sleep(0.05)
    return False


@pytest.fixture
def listening(private_path) -> Iterator[Listening]:
    made = Listening(private_path)
    yield made
    made.process.kill()
    made.process.wait()


SILENT = pytest.param(b"", marks=pytest.mark.slow)


@pytest.mark.parametrize("begin", [SILENT, b"\xff", GREETING], ids=["silent", "begun", "greeting"])
def test_strangers_keep_nobody_from_a_daemon(listening, begin):
    before = listening.n_files
    held = []
    for _ in range(2 * MAX_FILES):
        held.append(socket.create_connection(("127.0.0.1", listening.port), timeout=WAIT_S))
        with suppress(OSError):
            held[-1].sendall(begin)
    assert listening.n_files <= before + MAX_STRANGERS
    assert listening.answers(listening.ipc)
    assert listening.answers(listening.tcp)
    for one in held:
        one.close()
    assert until(lambda: listening.n_files <= before + 1)
    listening.process.send_signal(signal.SIGTERM)
    assert listening.process.wait(WAIT_S) == 0


def test_a_stranger_who_says_nothing_is_cut_off(listening):
    with socket.create_connection(("127.0.0.1", listening.port), timeout=WAIT_S) as one:
        while one.recv(4096):
            pass


def test_a_key_that_is_taken_away_during_a_flood_ends_its_connection(listening, private_path):
    zmq.auth.create_certificates(private_path, "other")
    shutil.copy(private_path / "other.key", listening.keys / "clients")
    shutil.copytree(listening.keys, private_path / "revoked")
    for suffix in ("key", "key_secret"):
        shutil.copy(private_path / f"other.{suffix}", private_path / "revoked" / f"client.{suffix}")
    (private_path / "revoked" / "client.key_secret").chmod(0o600)
    held = [socket.create_connection(("127.0.0.1", listening.port), timeout=WAIT_S) for _ in range(MAX_FILES)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        use_client_keys(client, private_path / "revoked")
        ended = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.connect(listening.tcp)
        client.send_multipart(hello())
        assert isinstance(receive(client), wire.Welcome)
        (listening.keys / "clients" / "other.key").unlink()
        assert ended.poll(1000 * WAIT_S)
        client.disable_monitor()
    for one in held:
        one.close()


def test_a_doorkeeper_that_ends_is_followed_by_another(listening):
    (doorkeeper,) = psutil.Process(listening.process.pid).children()
    doorkeeper.kill()
    assert until(lambda: listening.answers(listening.tcp))


def test_too_few_files_are_told_before_anything_is_served(private_path):
    make_keys(private_path / "keys")
    command = ["prlimit", "--nofile=64", sys.executable, "-m", "zerotune.tuner.cli", "daemon"]
    command += ["--endpoint", f"ipc://{private_path}/d.sock", "--listen", "tcp://127.0.0.1:*"]
    command += ["--curve-keys", str(private_path / "keys"), "--store", str(private_path / "s.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 2
    assert "64" in done.stderr
    assert "ulimit" in done.stderr
    assert not (private_path / "d.sock").exists()
