"""Who may reach a real daemon: endpoints, folders, users and keys."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import zmq
import zmq.auth
from daemon_process import WAIT_S, hello, receive

from benchmarks.lib.free_port import free_port
from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.store import wire
from zerotune.store.errors import UserError
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.endpoint import make_keys
from zerotune.tuner.service.serving import run_daemon


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [
        ("tcp://127.0.0.1:5555", "--curve-keys"),
        ("udp://127.0.0.1:5555", "ipc:// .*tcp://"),
        ("tcp://127.0.0.1:99999", "'99999'.* 65535.*tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:x", "'x'.*tcp://HOST:PORT"),
        ("nonsense", "'nonsense'.*ipc:// .*tcp://"),
        ("ipc://", "ipc:// .*tcp://"),
        ("ipc:///proc/zerotune/d.sock", "/proc/zerotune"),
        ("ipc:///tmp/" + "x" * 120, " 107 "),
        ("ipc:///t/" + "x" * 95, " 85 "),
        ("ipc://@zerotune", "@zerotune"),
    ],
)
def test_unsafe_and_impossible_endpoints_are_refused(private_path, endpoint, named):
    with pytest.raises(UserError, match=named):
        run_daemon(endpoint, private_path / "store.db")
    assert not (private_path / "store.db").exists()


def test_folders_that_others_can_enter_or_change_are_refused(private_path, monkeypatch):
    shared = private_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UserError, match=str(shared)):
        run_daemon(f"ipc://{shared}/d.sock", private_path / "store.db")
    shared.chmod(0o1777)  # as /tmp
    with pytest.raises(UserError, match=str(shared)) as refused:
        run_daemon(f"ipc://{shared}/d.sock", private_path / "store.db")
    assert "chmod" not in str(refused.value)
    shared.chmod(0o755)
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(shared))
    with pytest.raises(UserError, match="chmod 700"):
        run_daemon(f"ipc://{shared}/d.sock", private_path / "store.db")


def test_only_the_owner_may_connect(daemon, private_path):
    assert (private_path / "d.sock").stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_taken_away_lets_nobody_in_any_more(private_path, connect):
    make_keys(private_path / "keys")
    clients = private_path / "keys" / "clients"
    zmq.auth.create_certificates(private_path, "other")
    shutil.copy(private_path / "other.key", clients)
    endpoint, known = f"tcp://127.0.0.1:{free_port()}", private_path / "keys"
    revoked = private_path / "revoked"
    shutil.copytree(known, revoked)
    for suffix in ("key", "key_secret"):
        shutil.copy(private_path / f"other.{suffix}", revoked / f"client.{suffix}")
    (revoked / "client.key_secret").chmod(0o600)
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--endpoint", endpoint]
    command += ["--curve-keys", str(known), "--store", str(private_path / "s.db")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process, zmq.Context() as context:
        try:
            stays, leaves = (context.socket(zmq.DEALER) for _ in range(2))
            for socket, keys in ((stays, known), (leaves, revoked)):
                socket.linger = 0
                use_client_keys(socket, keys)
                socket.connect(endpoint)
                socket.send_multipart(wire.encode(wire.StatusRequest()))
                assert isinstance(receive(socket), wire.StatusReply)
            (clients / "other.key").unlink()
            assert fetch_status(endpoint, 0.3, curve_dir=revoked) is None, "no new connection, at once"
            deadline_s = time.monotonic() + WAIT_S
            while True:  # the connection that there was
                leaves.send_multipart(wire.encode(wire.StatusRequest()))
                if not leaves.poll(500):
                    break
                leaves.recv_multipart()
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            stays.send_multipart(wire.encode(wire.StatusRequest()))
            assert isinstance(receive(stays), wire.StatusReply)
            shutil.copy(private_path / "other.key", clients)
            assert fetch_status(endpoint, curve_dir=revoked) is not None, "a key put back lets in again"
            for socket in (stays, leaves):
                socket.close()
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.fixture
def curve_dir(private_path):
    folder = private_path / "keys"
    make_keys(folder)
    with pytest.raises(UserError, match="already"):
        make_keys(folder)
    return folder


def test_tcp_serves_known_keys_only(curve_dir, private_path, connect):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    code = f"""
import sys; from pathlib import Path; from zerotune.tuner.service.serving import run_daemon
sys.exit(run_daemon({endpoint!r}, {str(private_path / "s.db")!r}, curve_dir=Path({str(curve_dir)!r})))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline_s = time.monotonic() + WAIT_S
        while (status := fetch_status(endpoint, 0.5, curve_dir=curve_dir)) is None:
            assert time.monotonic() < deadline_s
        assert status.daemon_pid == process.pid
        with pytest.raises(UserError, match="wants keys"):
            fetch_status(endpoint, 0.3)
        keyless = connect(endpoint)
        keyless.send_multipart(hello())
        assert not keyless.poll(300)
        zmq.auth.create_certificates(curve_dir, "client")  # keys that the daemon does not know
        assert fetch_status(endpoint, 0.3, curve_dir=curve_dir) is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_clients_secret_that_others_can_read_is_refused(curve_dir, mode):
    (curve_dir / "client.key_secret").chmod(mode)
    with pytest.raises(UserError, match=r"client\.key_secret.*chmod 600"):
        fetch_status("tcp://127.0.0.1:5555", 0.1, curve_dir=curve_dir)


@pytest.mark.parametrize("folder", [".", "clients"])
def test_folders_that_others_may_put_keys_into_are_refused(curve_dir, private_path, folder):
    (curve_dir / folder).chmod(0o777)
    with pytest.raises(UserError, match="chmod go-w"):
        run_daemon("tcp://127.0.0.1:5555", private_path / "store.db", curve_dir=curve_dir)


@pytest.mark.parametrize("folders", [[], ["keys", "keys/clients"]])
def test_keys_are_closed_to_others_under_any_umask(private_path, folders):
    umask = os.umask(0)
    try:
        for folder in folders:
            (private_path / folder).mkdir()
        make_keys(private_path / "keys")
    finally:
        os.umask(umask)
    made = [private_path / "keys", *private_path.rglob("keys/**/*")]
    assert len(made) == 7
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("spoiled", ["server.key_secret", "clients", "readable"])
def test_incomplete_or_exposed_keys_are_refused(curve_dir, private_path, spoiled):
    if spoiled == "readable":
        (curve_dir / "server.key_secret").chmod(0o644)
    elif spoiled == "clients":
        shutil.rmtree(curve_dir / "clients")
    else:
        (curve_dir / spoiled).write_text("nonsense")
    with pytest.raises(UserError, match=r"key|client"):
        run_daemon("tcp://127.0.0.1:5555", private_path / "store.db", curve_dir=curve_dir)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        use_client_keys(socket, curve_dir)
        (curve_dir / "server.key").unlink()
        with pytest.raises(UserError, match=r"server\.key"):
            use_client_keys(socket, curve_dir)
