"""Attacks on what many share: the places of those who wait for an answer, and root's service for all users.

Each is made in a folder of its own and tells whether the product held. Those that act as other users need root.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final
from unittest.mock import patch

import psutil
import zmq

from benchmarks.lib.free_port import free_port
from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.store import wire
from zerotune.store.paths import SERVICE_DOOR
from zerotune.tuner.all_users.folders import Share
from zerotune.tuner.all_users.service import AllUsers, Policy
from zerotune.tuner.cli.live import all_users
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.endpoint import make_keys

STRANGER: Final = 25_001
LENT: Final = 2**32 - 6
"""Directories of users lend numbers from 2^31 on."""
WAITING: Final = 32
"""For whom the attacked service has room: a quarter of its descriptors."""
ANSWER_S: Final = 5.0
"""An honest client's patience."""
START_S: Final = 20.0
SILENT: Final = "127.0.0.77"
"""A name server that answers nothing."""
COMMAND: Final = [sys.executable, "-P", "-m", "zerotune.tuner.cli"]


@contextmanager
def running(words: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process of ours, which ends with the attack."""
    with subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def is_served(port: int, path: str, token: str) -> bool:
    """Whether an honest client of a web server has an answer in time."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as one:
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
            one.sendall(head.encode())
            return one.recv(4096).startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
    except OSError:
        return False


def until_listening(port: int) -> None:
    """Wait for a server."""
    ends_at_s = time.monotonic() + START_S
    while time.monotonic() < ends_at_s:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), ANSWER_S).close()
        time.sleep(0.05)


def greedy(stack: ExitStack, port: int, n: int, asked: bytes) -> None:
    """Make connections that say as much as is taken, and read nothing."""
    made = []
    for _ in range(n):
        made.append(one := stack.enter_context(socket.socket()))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        one.setblocking(False)
    for _ in range(20):
        for one in made:
            with suppress(OSError):
                while True:
                    one.send(asked)
        time.sleep(0.05)


def status_page_asked_without_end(folder: Path, environment: Mapping[str, str]) -> bool:
    """A stranger without the token asks for the page without end, on as many connections as there are places."""
    from zerotune.tuner.watching.web.patience import MAX_CONNECTIONS

    words = [*COMMAND, "status", "--web", "--listen", f"127.0.0.1:{(port := free_port())}"]
    with ExitStack() as stack:
        process = stack.enter_context(running(words, folder, environment))
        assert process.stdout is not None
        token = process.stdout.readline().rpartition("#")[2].strip()
        until_listening(port)
        greedy(stack, port, MAX_CONNECTIONS, b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50)
        return all(is_served(port, "/snapshot.json", token) for _ in range(3))


def metrics_asked_slowly(folder: Path, environment: Mapping[str, str]) -> bool:
    """All places of the metrics are held by requests that never end."""
    from zerotune.tuner.metrics.server import MAX_CONNECTIONS

    words = [*COMMAND, "daemon", "metrics", "--serve", f"127.0.0.1:{(port := free_port())}"]
    with ExitStack() as stack:
        stack.enter_context(running(words, folder, environment))
        until_listening(port)
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        return all(is_served(port, "/metrics", "") for _ in range(3))


def absurd_width(folder: Path, environment: Mapping[str, str]) -> bool:
    """The environment says that the terminal has millions of columns."""
    wide = {**environment, "COLUMNS": "20000000"}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*COMMAND, "jobs", "--help"], cwd=folder, env=wide, capture_output=True, timeout=START_S, check=False
        )
        return done.returncode == 0
    return False


def silent_names(folder: Path, environment: Mapping[str, str]) -> bool:
    """A peer with keys names leading daemons whose names nobody answers for."""
    make_keys(folder / "keys")
    (folder / "resolv.conf").write_text(f"nameserver {SILENT}\n")
    ipc, tcp = f"ipc://{folder}/d.sock", f"tcp://127.0.0.1:{free_port()}"
    words = ["daemon", "--endpoint", ipc, "--listen", tcp, "--curve-keys", str(folder / "keys"), "--store", "s.db"]
    mounting = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    begun = ["unshare", "--mount", "sh", "-c", mounting, str(folder / "resolv.conf"), *COMMAND, *words]
    with ExitStack() as stack:
        stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).bind((SILENT, 53))
        stack.enter_context(running(begun, folder, environment))
        ends_at_s = time.monotonic() + START_S
        while fetch_status(ipc, 1.0) is None and time.monotonic() < ends_at_s:
            time.sleep(0.05)
        rank = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
        rank.linger = 0
        use_client_keys(rank, folder / "keys")
        rank.connect(tcp)
        for at in range(3):
            leader = f"tcp://leader{at}.example:5555"
            hello = wire.Hello(f"job{at}", 1, 4, 0, "node", 1, "fabric", {}, 22809, 5, leader=leader)
            rank.send_multipart(wire.encode(hello))
        is_heard = all(rank.poll(int(ANSWER_S * 1000)) and rank.recv_multipart() for _ in range(3))
        return is_heard and all(fetch_status(ipc, ANSWER_S / 2) is not None for _ in range(4))


@contextmanager
def service(folder: Path) -> Iterator[tuple[psutil.Process, Callable[[int], socket.socket]]]:
    """Root's service with daemons that stand still, and how a user comes to its door."""
    folder.chmod(0o755)
    daemon = folder / "daemon"
    daemon.write_text("#!/bin/sh\nkill -STOP $$\n")
    daemon.chmod(0o755)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.executable = str(daemon)
            resource.setrlimit(resource.RLIMIT_NOFILE, (4 * WAITING, 4 * WAITING))
            serving = AllUsers(folder / "run", folder / "state", Policy(Share.private, None, [], None, ""))
            signal.signal(signal.SIGTERM, lambda *_: serving.stop())
            signal.set_wakeup_fd(serving.wake_fd)
            os.write(told, b"x")
            serving.run()
        finally:
            os._exit(1)
    os.close(told)
    try:
        os.read(ready, 1)

        def come(uid: int) -> socket.socket:
            os.seteuid(uid)  # the kernel tells the effective user
            try:
                one = socket.socket(socket.AF_UNIX)
                one.settimeout(ANSWER_S)
                one.connect(str(folder / "run" / SERVICE_DOOR))
            finally:
                os.seteuid(0)
            return one

        yield psutil.Process(child), come
    finally:
        os.close(ready)
        started = psutil.Process(child).children() if psutil.pid_exists(child) else []
        for one in started:
            with suppress(psutil.Error):
                one.kill()
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


def has_address(visitor: socket.socket) -> bool:
    """Whether a visitor is told where their daemon will be."""
    with visitor, suppress(OSError, ValueError):
        return "endpoint" in json.loads(visitor.recv(4096))
    return False


def number_used_again(folder: Path) -> bool:
    """The first of those who wait leaves in the moment in which others come, one of whom is given its descriptor."""
    with service(folder) as (process, come), ExitStack() as stack:
        waiting = [stack.enter_context(come(STRANGER)) for _ in range(WAITING)]
        for one in waiting:
            one.recv(4096)
        time.sleep(0.2)  # until it waits for what comes next
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        for _ in range(2):
            waiting.append(stack.enter_context(come(STRANGER)))
        waiting[0].close()
        process.resume()
        select.select([waiting[-1]], [], [], ANSWER_S)
        return has_address(come(STRANGER + 1))


def high_number(folder: Path) -> bool:
    """A user comes whose number has its highest bit set."""
    with service(folder) as (_, come):
        return has_address(come(LENT)) and has_address(come(STRANGER))


def link_for_a_socket(folder: Path) -> bool:
    """A user puts a link with a name beyond any bound where root looks for their daemon's socket."""
    (folder / str(STRANGER)).mkdir()
    (folder / str(STRANGER) / "daemon.sock").symlink_to("a" * 300)
    with patch.object(all_users, "SERVICE_RUNTIME_DIR", str(folder)):
        return list(all_users.all_status()) == []


def lies_to_root(_: Path) -> bool:
    """A user's process says of itself what another's daemon would say, or numbers beyond any bound."""
    path = Path(f"/run/zerotune/{STRANGER}/daemon.sock")
    said = {"type": "status", "daemon_pid": 2**31 - 1, "version": "0", "endpoint": f"ipc://{path}", "store_path": "s"}
    said |= {"uptime_s": 1.0, "resident_bytes": 1, "n_errors": 99}
    lies: list[dict[str, object]] = [{"resident_bytes": 10**400}, {"uptime_s": 10**400}, {"daemon_pid": 1}]
    lies.append({"endpoint": f"ipc:///run/zerotune/{STRANGER + 1}/daemon.sock"})
    believed = [all_users.believed(json.dumps(said | lie).encode(), STRANGER, path) for lie in ({}, *lies)]
    return believed[0] is not None and not any(believed[1:])
