"""One node of its own: a real daemon and real training processes, as a user would start them."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.lib.free_port import free_port
from zerotune.tuner.client.status import fetch_status

ZEROTUNE = [sys.executable, "-m", "zerotune.tuner.cli"]
FABRIC = "ethernet_boxes"
RANKS = Path(__file__).with_name("ranks.py")
STEPS = Path(__file__).with_name("steps_job.py")
MARK = "ZEROTUNE_TEST_WORLD"
SMALL = ("--batch", 1, "--layers", 2, "--width", 32)
"""What is asked here does not depend on how much a step computes."""


class World:
    """One node of its own: runtime directory, store, daemon, training jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "r"
        self.store = folder / "store.db"
        self.endpoint = f"ipc://{self.runtime}/d.sock"
        self.keys = None
        self.processes: list[subprocess.Popen] = []
        # The mark finds every process that was started here, however many sessions deep.
        mark = {MARK: str(folder), "ZEROTUNE_RUNTIME_DIR": str(self.runtime), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **mark}

    def zerotune(self, *words, timeout=60):
        return subprocess.run(
            [*ZEROTUNE, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
        )

    def start(self, *command):
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=log, env=self.environment, start_new_session=True
        )
        process.log = Path(log.name)
        self.processes.append(process)
        return process

    def use_tcp(self):
        """The daemon's address is tcp:// from now on, with new keys."""
        self.keys = self.folder / "keys"
        assert self.zerotune("daemon", "keys", self.keys).returncode == 0
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.environment["ZEROTUNE_CURVE_KEYS"] = str(self.keys)

    def start_daemon(self, *words):
        daemon = self.start(*ZEROTUNE, "daemon", "--endpoint", self.endpoint, "--store", self.store, "-v", *words)
        self.wait_for(self.status, "the daemon's answer", daemon)
        return daemon

    def status(self):
        return fetch_status(self.endpoint, timeout_s=0.3, curve_dir=self.keys)

    def jobs(self):
        """What the daemon knows; nothing while it is too busy to answer."""
        status = self.status()
        return status.jobs if status else ()

    def train(self, *words, agent=True, fabric=FABRIC, n_ranks=2, losses="losses.jsonl", launch=()):
        """Start our ZeRO example; the process and its loss log's path."""
        path = self.folder / losses
        process = self.launch(
            RANKS, n_ranks, "-m", "zerotune.zero_runtime.examples.train",
            "--stage", "3", *SMALL, "--losses", path, *words,
            launch=("--agent" if agent else "--no-agent", *launch), fabric=fabric,
        )  # fmt: skip
        return process, path

    def losses_without_us(self, n_steps):
        """Of the same two ranks on gloo: there is one order to add in. They are forks of what has torch loaded."""
        path, port, context = self.folder / "without.jsonl", free_port(), multiprocessing.get_context("forkserver")
        ranks = [context.Process(target=_plain_rank, args=(rank, port, path, n_steps)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(90)
            assert rank.exitcode == 0
        return losses_of(path)

    def take_steps(self, n_steps, launch=()):
        """Start two ranks that train nothing: a second of torch less for each than an optimizer takes."""
        return self.launch(RANKS, 2, STEPS, n_steps, launch=launch)

    def launch(self, *command, launch=(), fabric=FABRIC):
        """Start Python with `command` under `zerotune launch` with the options `launch`."""
        return self.start(
            *ZEROTUNE, "launch", "--fabric", fabric, "--endpoint", self.endpoint, *launch, "--",
            sys.executable, *command,
        )  # fmt: skip

    def wait_for(self, condition, what, process=None, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            if process is not None and process.poll() is not None:
                break
            time.sleep(0.05)
        tail = process.log.read_text()[-3000:] if process is not None else ""
        raise AssertionError(f"waited in vain for {what}\n{tail}")

    def finish(self, process, timeout_s=90):
        process.wait(timeout=timeout_s)
        return process.returncode, process.log.read_text()

    def living(self, rank=None):
        """Living processes that descend from this world, orphans too; `rank` keeps those of a rank."""
        found = []
        for process in psutil.process_iter():
            environment = environment_of(process)
            if environment.get(MARK) == str(self.folder) and rank in (None, environment.get("RANK")):
                found.append(process)
        return found

    def close(self):
        for process in self.living():
            process.kill()
        for process in self.processes:
            process.wait(timeout=10)


def _plain_rank(rank, port, path, n_steps):
    from zerotune.zero_runtime.examples.train import main

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["train", "--stage", "3", *map(str, SMALL), "--losses", str(path), "--steps", str(n_steps)]
    main()


def environment_of(process):
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


def losses_of(path):
    if not path.exists():
        return []
    return [json.loads(line)["loss_hex"] for line in path.read_text().splitlines() if line.endswith("}")]
