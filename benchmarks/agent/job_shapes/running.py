"""Runs one shape as one job: its ranks are forks of this process, which has loaded torch but has not used it.

Each rank gets the environment of `zerotune launch` and torchrun, activates the agent as `sitecustomize.py` does, and
runs all exit handlers. A process of its own serves the job's store, as under torchrun. If a rank fails, the others are
ended; the job begins again if its shape allows that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.agent.job_shapes.agent_counters import befall, counters
from benchmarks.agent.job_shapes.job import Job, Shape
from zerotune.agent.activate import activate

POLL_S: Final = 0.02
STORE_TIMEOUT: Final = timedelta(seconds=60)
HANG_S: Final = 30.0
"""A job hangs if no rank logs a loss for so long, and no rank ends."""
START_S: Final = 120.0
"""The limit before the first loss: a job makes its groups and compiles first."""
ENDED_BADLY: Final = 1
"""A rank's exit code after an exception."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    `code` is the exit code of the first rank that failed in the last start, or 0. `losses` has the text of each rank's
    log of each start, by name.
    """

    hangs: bool
    code: int
    losses: dict[str, str]
    counters: list[dict[str, Any]]
    output: str
    seconds: float

    def ends_as(self, other: Outcome) -> bool:
        """Exit codes and losses are the same, to the last bit."""
        return (self.code, self.losses) == (other.code, other.losses)


@dataclass
class Event:
    """An event of a job once half of its losses are logged: `happen` gets the ranks' process ids; `later` follows."""

    happen: Callable[[Sequence[int]], None]
    later: Callable[[Sequence[int]], None] | None = None
    later_s: float = 0.0


def run(
    shape: Shape, folder: Path, environment: dict[str, str], *, half: int = 0, event: Event | None = None
) -> Outcome:
    folder.mkdir()
    began_s = time.monotonic()
    host, port = _serve_store()
    code, hangs = 0, False
    try:
        for attempt in range(shape.max_restarts + 1):
            started = {**environment, **_torchrun(shape, port, attempt)}
            pids = [_fork(shape, rank, attempt, folder, started) for rank in range(shape.n_ranks)]
            try:
                code = _wait(pids, folder, attempt, _Pending(event, folder, half))
            except TimeoutError:
                hangs = True
            event = event if hangs or not attempt else None
            if hangs or code == 0:
                break
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("counters.*"))]
    return Outcome(
        hangs,
        code,
        {path.name: path.read_text() for path in sorted(folder.glob("losses.*"))},
        [one for one in told if one is not None],
        "".join(path.read_text(errors="replace") for path in sorted(folder.glob("output.*"))),
        time.monotonic() - began_s,
    )


class _Pending:
    def __init__(self, event: Event | None, folder: Path, half: int) -> None:
        self._event, self._folder, self._half = event, folder, half
        self._happened_s: float | None = None

    def look(self, pids: Sequence[int]) -> None:
        if self._event is None:
            return
        if self._happened_s is None:
            if sum(path.stat().st_size for path in self._folder.glob("losses.0.*")) >= self._half:
                self._event.happen(pids)
                self._happened_s = time.monotonic()
        elif time.monotonic() >= self._happened_s + self._event.later_s:
            if self._event.later is not None:
                self._event.later(pids)
            self._event = None


def _wait(pids: Sequence[int], folder: Path, attempt: int, pending: _Pending) -> int:
    """Wait for all ranks of a start, and end those that are left. Raises TimeoutError if the job hangs."""
    left = list(pids)
    seen, moved_at_s = (0, 0), time.monotonic()
    try:
        while left:
            for pid in tuple(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                left.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                if code:
                    return code
            now = (sum(path.stat().st_size for path in folder.glob(f"losses.*.{attempt}")), len(left))
            if now != seen:
                seen, moved_at_s = now, time.monotonic()
            if time.monotonic() - moved_at_s > (HANG_S if seen[0] else START_S):
                raise TimeoutError
            pending.look(left)
            time.sleep(POLL_S)
        return 0
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve_store() -> tuple[int, int]:
    """A process that serves a job's store, and its port."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        with os.fdopen(reads) as pipe:
            return pid, int(pipe.readline())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    os.write(writes, f"{store.port}\n".encode())
    while True:
        signal.pause()


def _torchrun(shape: Shape, port: int, attempt: int) -> dict[str, str]:
    """The environment of torchrun, except the rank."""
    return {
        "WORLD_SIZE": str(shape.n_ranks), "LOCAL_WORLD_SIZE": str(shape.n_ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": shape.name, "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(shape.max_restarts), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def _fork(shape: Shape, rank: int, attempt: int, folder: Path, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = ENDED_BADLY
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit._clear()  # a rank must not run this process's handlers
        with open(folder / f"output.{rank}.{attempt}", "wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        code = _train(shape, rank, attempt, folder)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _train(shape: Shape, rank: int, attempt: int, folder: Path) -> int:
    try:
        befall()
        activate()
        with open(folder / f"losses.{rank}.{attempt}", "w") as log:
            if shape.makes_group:
                dist.init_process_group("nccl")
            torch.manual_seed(0)
            shape.run(Job(rank, shape.n_ranks, folder, attempt, log))
        (folder / f"counters.{rank}.{attempt}").write_text(json.dumps(counters()))
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ENDED_BADLY
    except BaseException as error:
        sys.last_type = type(error)  # as the interpreter does
        traceback.print_exc()
        return ENDED_BADLY
    return 0
