"""What may stand where a daemon is expected: clients make sure of it before their first byte."""

from __future__ import annotations

import logging
import os
import shutil
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from zerotune.agent.daemon_link.channel import HELLO_EVERY_S, Channel
from zerotune.store import wire
from zerotune.store.errors import UntrustedError
from zerotune.store.lockfile import LockFile
from zerotune.tuner.cli.live.launch import launch as launch_command
from zerotune.tuner.cli.live.status import status as status_command
from zerotune.tuner.client.holders import holder_of
from zerotune.tuner.client.status import fetch_status

STRANGER = 65534
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="acts as another user")
LISTEN_AS = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    os.setuid(int(sys.argv[2]))
    listener.listen()
    print(flush=True)
    sys.stdin.read()
    listener.setblocking(False)
    try:
        print(listener.accept()[0].recv(100))
    except BlockingIOError:
        print("nobody came")
"""


class Listener:
    """Accepts connections as an impostor would, and tells whether one came."""

    def __init__(self, path: Path) -> None:
        self._socket = sockets.socket(sockets.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._socket.setblocking(False)

    def has_visitors(self) -> bool:
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def folder(private_path: Path) -> Path:
    made = private_path / "r"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def listener(folder: Path) -> Iterator[Listener]:
    made = Listener(folder / "d.sock")
    yield made
    made.close()


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def as_sticky_as_tmp(folder: Path) -> None:
    folder.chmod(0o1777)


def open_to_the_group(folder: Path) -> None:
    folder.chmod(0o770)


def of_another_user(folder: Path) -> None:
    os.chown(folder, STRANGER, STRANGER)


def socket_of_another_user(folder: Path) -> None:
    os.chown(folder / "d.sock", STRANGER, STRANGER)


def socket_open_to_all(folder: Path) -> None:
    (folder / "d.sock").chmod(0o777)


UNTRUSTED = [
    open_to_all,
    as_sticky_as_tmp,
    open_to_the_group,
    socket_open_to_all,
    pytest.param(of_another_user, marks=ROOT_ONLY),
    pytest.param(socket_of_another_user, marks=ROOT_ONLY),
]
Spoil = Callable[[Path], None]


@pytest.mark.parametrize("spoil", UNTRUSTED)
def test_commands_refuse_what_others_could_have_put_there(folder, listener, spoil: Spoil):
    spoil(folder)
    endpoint = f"ipc://{folder}/d.sock"
    with pytest.raises(UntrustedError) as refused:
        fetch_status(endpoint, 1.0)
    assert str(folder) in refused.value.problem
    assert refused.value.remedy
    with pytest.raises(UntrustedError):
        status_command(endpoint)


@pytest.mark.parametrize("spoil", [open_to_all, pytest.param(of_another_user, marks=ROOT_ONLY)])
def test_launch_trains_untuned_and_starts_no_daemon_there(folder, listener, monkeypatch, capsys, spoil: Spoil):
    spoil(folder)
    launched = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: launched.append(arguments))
    endpoint = f"ipc://{folder}/d.sock"
    launch_command(["true"], endpoint=endpoint)
    assert len(launched) == 1
    assert capsys.readouterr().err.count(str(folder)) >= 1
    launch_command(["true"], endpoint=endpoint, daemon=True, store=folder / "s.db")
    assert len(launched) == 2
    assert capsys.readouterr().err.count(str(folder)) >= 1
    assert [one.name for one in folder.iterdir()] == ["d.sock"]
    assert not listener.has_visitors()


class Silent:
    """An outbox without messages."""

    def tick_s(self) -> float:
        return 0.02

    def collect(self) -> list[tuple[wire.AgentMessage, object]]:
        return []


@pytest.fixture
def connect() -> Iterator[Callable[[Path], Channel]]:
    made = []

    def make(folder: Path) -> Channel:
        hello = wire.Hello("job", 0, 1, 0, "node", 1, "fabric", {}, 0, 5)
        made.append(Channel(f"ipc://{folder}/d.sock", lambda: hello, Silent(), lambda _: None, lambda _: None))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("spoil", [open_to_all, pytest.param(of_another_user, marks=ROOT_ONLY)])
def test_a_training_process_says_so_once_and_sends_nothing(folder, listener, connect, caplog, spoil: Spoil):
    spoil(folder)
    connect(folder)
    time.sleep(1.3 * HELLO_EVERY_S)
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert str(folder) in warnings[0].getMessage()
    assert not listener.has_visitors()


@ROOT_ONLY
def test_the_owner_of_a_socket_is_checked_before_anything_is_sent(folder):
    path = folder / "d.sock"
    command = [sys.executable, "-c", LISTEN_AS, str(path), str(STRANGER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UntrustedError, match=str(STRANGER)):
            fetch_status(f"ipc://{path}", 1.0)
        assert process.communicate("")[0] == "b''\n", "a connection without a byte"


class Daemon:
    """Answers greetings."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{folder}/d.sock")

    def was_greeted(self, timeout_s: float = 10.0) -> bool:
        if not self._socket.poll(1000 * timeout_s):
            return False
        sender, *frames = self._socket.recv_multipart()
        self._socket.send_multipart([sender, *wire.encode(wire.Welcome(1, "0"))])
        return isinstance(wire.decode_agent(frames)[0], wire.Hello)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def daemon() -> Iterator[Callable[[Path], Daemon]]:
    made = []

    def make(folder: Path) -> Daemon:
        made.append(Daemon(folder))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_replaced_folder_is_not_met_during_training(folder, connect, daemon):
    mine = daemon(folder)
    connect(folder)
    assert mine.was_greeted()
    mine.close()
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    folder.chmod(0o777)
    impostor = daemon(folder)
    assert not impostor.was_greeted(1.5 * HELLO_EVERY_S)
    impostor.close()
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    again = daemon(folder)
    assert again.was_greeted(), "a folder made anew by its owner"


def test_a_folder_that_comes_later_is_found(private_path, connect, daemon):
    connect(private_path / "later")
    time.sleep(0.1)
    (private_path / "later").mkdir(mode=0o700)
    assert daemon(private_path / "later").was_greeted()


@pytest.mark.parametrize("spoil", [open_to_all, pytest.param(of_another_user, marks=ROOT_ONLY)])
def test_processes_named_by_a_strangers_lock_are_not_told(folder, spoil: Spoil):
    lock = LockFile(folder / "d.sock.lock")
    assert holder_of(f"ipc://{folder}/d.sock") is not None
    spoil(folder)
    assert holder_of(f"ipc://{folder}/d.sock") is None
    lock.release()
