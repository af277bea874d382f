"""Attacks on shared resources: the places of clients that wait for an answer.

Each runs in a folder of its own and returns whether the product held. `silent_names` needs root.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import zmq

from benchmarks.lib.free_port import free_port
from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.store import wire
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.endpoint import make_keys

ANSWER_S: Final = 5.0
"""An honest client's patience."""
START_S: Final = 20.0
SILENT: Final = "127.0.0.77"
"""A name server that answers nothing."""
COMMAND: Final = [sys.executable, "-P", "-m", "zerotune.tuner.cli"]


@contextmanager
def running(words: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the attack."""
    with subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def is_served(port: int, path: str, token: str) -> bool:
    """An honest client of a web server has an answer in time."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as one:
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
            one.sendall(head.encode())
            return one.recv(4096).startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
    except OSError:
        return False


def until_listening(port: int) -> None:
    ends_at_s = time.monotonic() + START_S
    while time.monotonic() < ends_at_s:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), ANSWER_S).close()
        time.sleep(0.05)


def greedy(stack: ExitStack, port: int, n: int, asked: bytes) -> None:
    """Open connections that send as much as is taken, and read nothing."""
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
    """The environment sets the terminal's width to millions of columns."""
    wide = {**environment, "COLUMNS": "20000000"}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*COMMAND, "jobs", "--help"], cwd=folder, env=wide, capture_output=True, timeout=START_S, check=False
        )
        return done.returncode == 0
    return False


def silent_names(folder: Path, environment: Mapping[str, str]) -> bool:
    """A peer with keys names leading daemons whose names nobody resolves."""
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
