"""The daemons and jobs of `chaos.py`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.lib.faults.shifted_clock import ShiftedClock
from benchmarks.lib.free_port import free_port

ZEROTUNE: Final = (sys.executable, "-m", "zerotune.tuner.cli")
HANG_S: Final = 30.0
"""A longer wait counts as a hang."""
START_S: Final = 300.0
"""The same limit while a job begins: on a busy machine torch alone takes a minute to load."""


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.1)


class Node:
    """One node: a daemon with its store."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        *,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        folder.mkdir(mode=0o700)
        self.folder, self.prefix, self._options, self.address = folder, prefix, options, address
        self.socket, self.store = folder / "d.sock", folder / "store.db"
        self.endpoint = f"ipc://{self.socket}"
        own = {"ZEROTUNE_ENDPOINT": self.endpoint, "ZEROTUNE_RUNTIME_DIR": str(folder)}
        self.environment = environment | own
        (folder / "clock").mkdir()
        self.clock = ShiftedClock(folder / "clock")
        self.acknowledged: set[int] = set()
        """Rows that were in the store when a daemon died."""
        self.n_deaths = self.n_deaths_while_recording = 0
        self.start_daemon()

    def start_daemon(self) -> None:
        command = [*self.prefix, *ZEROTUNE, "daemon", "--endpoint", self.endpoint, "--store", str(self.store)]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [*command, *self._options], stdout=log, stderr=log, env=self.environment | self.clock.environment
            )

    def kill_daemon(self, records_within_s: float) -> None:
        """Kill the daemon once it has written measurements, or after so many seconds."""
        last = max(self.acknowledged, default=0)
        wait_for(lambda: bool(self.rows(last)), records_within_s)
        self.daemon.kill()
        self.daemon.wait()
        self.n_deaths += 1
        written = self.rows(last)
        self.acknowledged |= written
        self.n_deaths_while_recording += bool(written)

    def end_daemon(self) -> None:
        self.daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.wait(20.0)

    def rows(self, after: int = 0) -> set[int]:
        """Row ids of all measurements in the store from `after` on; empty if there is no store yet."""
        return set(self._ask(f"SELECT rowid FROM measurements WHERE rowid > {after}"))

    def n_steps(self, *, under_a_plan: bool) -> int:
        """Steps in the store; `under_a_plan`: only those that ran a plan of the daemon."""
        return sum(self._ask(f"SELECT count(*) FROM steps WHERE epoch >= {int(under_a_plan)}"))

    def _ask(self, query: str) -> list[int]:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self.store)) as db:
            return [row for (row,) in db.execute(query)]
        return []


class Job:
    """One training job under torchrun, on one node or several."""

    def __init__(
        self,
        runtime: str,
        folder: Path,
        nodes: Sequence[Node],
        n_ranks: int,
        environment: dict[str, str],
        *,
        with_agent: bool,
    ) -> None:
        self.runtime, self.folder = runtime, folder / runtime
        self.folder.mkdir()
        self.log = self.folder / "log"
        agent = ("--agent", "--name", runtime) if with_agent else ("--no-agent",)
        port = free_port()
        self.processes = []
        for number, node in enumerate(nodes):
            meeting = ["--standalone"]
            if len(nodes) > 1:
                meeting = [
                    f"--nnodes={len(nodes)}", f"--local-addr={node.address}", "--rdzv-backend=c10d",
                    f"--rdzv-endpoint={nodes[0].address}:{port}", f"--rdzv-conf=is_host={int(number == 0)}",
                    f"--rdzv-id={runtime}",
                ]  # fmt: skip
            command = [
                *node.prefix, *ZEROTUNE, "launch", "--fabric", "ethernet_boxes", *agent, "--",
                sys.executable, "-m", "torch.distributed.run", *meeting, "--max-restarts=100000",
                f"--nproc-per-node={n_ranks}", "-m", "benchmarks.agent.chaos_worker", runtime, str(self.folder),
            ]  # fmt: skip
            with self.log.open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=node.environment | environment)
            self.processes.append(process)
        self._n_seen, self._moved_at_s = 0, time.monotonic()

    def stop(self) -> None:
        """The job ends with its current step."""
        (self.folder / "stop").touch()

    @property
    def runs(self) -> bool:
        """No node's part has ended."""
        return all(process.poll() is None for process in self.processes)

    @property
    def has_ended(self) -> bool:
        """Every node's part has ended."""
        return all(process.poll() is not None for process in self.processes)

    @property
    def has_failed(self) -> bool:
        """A part ended with another code than 0."""
        return any(process.poll() != 0 for process in self.processes)

    def steps(self, ranks: str = "0") -> dict[str, list[dict[str, Any]]]:
        """The log of every start of the job, of rank 0 or of all ranks (`*`); a line that was cut off is left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self.folder.glob(f"*.{ranks}.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.setdefault(path.stem, []).append(json.loads(line))
        return found

    def n_steps_at_most(self) -> int:
        """Steps of the longest of its starts."""
        return max(map(len, self.steps().values()), default=0)

    def hangs(self) -> bool:
        """No step came for HANG_S, or for START_S if not all ranks have had a step since they began."""
        n_seen = sum(path.stat().st_size for path in self.folder.glob("*.jsonl"))
        if n_seen != self._n_seen:
            self._n_seen, self._moved_at_s = n_seen, time.monotonic()
        waited_s = time.monotonic() - self._moved_at_s
        return waited_s > START_S or (waited_s > HANG_S and self._trains())

    def _trains(self) -> bool:
        """All its live ranks have had a step."""
        logs = [[*self.folder.glob(f"{one.pid}.*.jsonl")] for one in self.ranks()]
        return bool(logs) and all(log and log[0].stat().st_size for log in logs)

    def ranks(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(process.pid).children()
                found += [one for one in children if "chaos_worker" in " ".join(one.cmdline())]
        return found
