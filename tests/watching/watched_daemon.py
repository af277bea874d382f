"""A real daemon with a job whose ranks are sockets of this process, and the status page beside it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from zerotune.store import wire
from zerotune.store.records import StepRecord
from zerotune.tuner.client.background_daemon import start_in_background

HOSTILE = "a<img src=x onerror=alert(1)>"
"""A fabric's id comes from ranks: whatever they send must stay text."""
N_RANKS = 2
WAIT_S = 60
COMMAND = [sys.executable, "-m", "zerotune.tuner.cli"]


class Job:
    """Ranks that greet and tell of steps."""

    def __init__(self, context: zmq.Context, endpoint: str, job_id: str = "job", n_ranks: int = N_RANKS) -> None:
        self.job_id = job_id
        self.sockets = [context.socket(zmq.DEALER) for _ in range(n_ranks)]
        for rank, socket in enumerate(self.sockets):
            socket.linger = 0
            socket.connect(endpoint)
            hello = wire.Hello(job_id, rank, n_ranks, rank, "node", os.getpid(), HOSTILE, {"gpu": "none"}, 22809, 5)
            socket.send_multipart(wire.encode(hello))

    def step(self, *numbers: int) -> None:
        steps = tuple(StepRecord(number, 0, 1000.0 + number, 100.0) for number in numbers)
        for rank, socket in enumerate(self.sockets):
            socket.send_multipart(wire.encode(wire.Steps(self.job_id, rank, steps)))

    def leave(self) -> None:
        for rank, socket in enumerate(self.sockets):
            socket.send_multipart(wire.encode(wire.Goodbye(self.job_id, rank)))


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A daemon's process and its endpoint."""
    endpoint = f"ipc://{folder}/d.sock"
    process = start_in_background(endpoint, folder / "store.db")
    try:
        yield process, endpoint
    finally:
        process.terminate()
        process.wait(WAIT_S)


@contextlib.contextmanager
def status_page(endpoint: str, *options: str) -> Iterator[str]:
    """The address that `zerotune status --web` prints."""
    words = [*COMMAND, "status", "--web", "--endpoint", endpoint, "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(WAIT_S)


class Browser:
    """Asks one status page as a browser would."""

    def __init__(self, url: str) -> None:
        place, _, self.token = url.removeprefix("http://").partition("/#")
        self.host, _, port = place.partition(":")
        self.port = int(port)

    def ask(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={"Authorization": f"Bearer {self.token}", **given})
        return connection.getresponse()

    def snapshot(self) -> dict:
        answer = self.ask("/snapshot.json")
        assert answer.status == 200
        return json.loads(answer.read())

    def events(self) -> Iterator[tuple[str, dict]]:
        """Events as they come."""
        with contextlib.closing(self.ask("/events")) as answer:
            assert answer.getheader("content-type", "").startswith("text/event-stream")
            name = ""
            for line in answer:
                key, _, value = line.decode().rstrip("\n").partition(": ")
                if key == "event":
                    name = value
                elif key == "data":
                    yield name, json.loads(value)


def wait_for(condition, timeout_s: float = WAIT_S):
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found
