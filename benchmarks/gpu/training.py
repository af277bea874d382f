"""Steps that train: whether losses are the same without zerotune, and how long steps take."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.steps import Context, NotAsItMust
from benchmarks.rehearse.settings import FABRIC as REHEARSAL
from zerotune.tuner.client.background_daemon import start_in_background

SCRIPTS = Path(__file__).parents[2] / "tests" / "frameworks" / "scripts"
N_TRAINING_RANKS = 2
"""With two ranks a sum has one order only, so that losses must not change by a bit."""


@dataclass(frozen=True)
class Training:
    """A training run under `zerotune launch`: one launch per rank, since each claims to be a host."""

    context: Context
    name: str
    script: str
    words: tuple[str, ...] = ()
    endpoint: str | None = None
    agent: bool = True

    @property
    def folder(self) -> Path:
        """The folder of its losses, summary and logs."""
        return self.context.folder / self.name

    def start(self) -> Ranks:
        self.folder.mkdir(parents=True)
        machine = self.context.machine
        launch = ["--fabric", machine.fabric] if machine.fabric else []
        launch += ["--endpoint", self.endpoint or f"ipc://{self.folder}/no-daemon"]
        launch += ["--agent" if self.agent else "--no-agent", "--summary", str(self.folder / "summary.json")]
        script = [sys.executable, str(SCRIPTS / self.script), "--losses", str(self.folder / "losses"), *self.words]
        command = [sys.executable, "-m", "zerotune.tuner.cli", "launch", *launch, "--", *script]
        return Ranks(machine, command, self.folder, n_ranks=N_TRAINING_RANKS, extra={"ZEROTUNE_TICK_MS": "50"})

    def run(self) -> list[list[float]]:
        """Run it to its end; losses by rank."""
        self.start().wait(self.context.left_s)
        return self.losses()

    def losses(self) -> list[list[float]]:
        """Every loss so far, by rank."""
        files = [self.folder / "losses" / f"rank{rank}.txt" for rank in range(N_TRAINING_RANKS)]
        return [[float.fromhex(line) for line in file.read_text().split()] if file.exists() else [] for file in files]

    def steps_us(self) -> list[float]:
        """Step times of the second half, when all is warm."""
        steps = json.loads((self.folder / "summary.json").read_text())["steps"]
        return [step["duration_us"] for step in steps[len(steps) // 2 :]]

    def last_epoch(self) -> int:
        """Epoch of the plan that its last step ran under."""
        return int(json.loads((self.folder / "summary.json").read_text())["steps"][-1]["epoch"])


class Daemon:
    """A daemon in the step's folder, ended with the block."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/d.sock"
        self.process = start_in_background(self.endpoint, folder / "store.db", idle_exit_s=120)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            psutil.Process(self.process.pid).terminate()
            self.process.wait(20)


def compare_losses(mine: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Whether all bits agree, and the largest relative difference."""
    pairs = [(a, b) for m, r in zip(mine, reference, strict=True) for a, b in zip(m, r, strict=True)]
    largest = max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=float("nan"))
    return {"n_losses": len(pairs), "same_bits": all(a == b for a, b in pairs), "largest_difference": largest}


SAME_LOSS = 1e-4
"""GPU kernels that add with atomics give other last bits from run to run, with or without zerotune."""


def _are_other(compared: dict[str, Any]) -> bool:
    """The losses are wrong. A rehearsal computes nothing, so that they only need to exist."""
    return not compared["n_losses"] or (REHEARSAL not in os.environ and not compared["largest_difference"] <= SAME_LOSS)


def _train_and_compare(context: Context, name: str, script: str, words: tuple[str, ...], endpoint: str) -> Any:
    reference = Training(context, f"{name}-off", script, words, agent=False).run()
    tuned = Training(context, f"{name}-on", script, words, endpoint)
    return {**compare_losses(tuned.run(), reference), "last_epoch": tuned.last_epoch()}


def training(context: Context) -> dict[str, Any]:
    """FSDP2 and our ZeRO-3 train to the same losses as without zerotune, while a daemon tunes them."""
    words = ("--steps", str(context.n_steps))
    results = {}
    with Daemon(context.folder) as daemon:
        for name, script in (("fsdp2", "fsdp2.py"), ("zero3", "zero3.py")):
            results[name] = _train_and_compare(context, name, script, words, daemon.endpoint)
    for name, seen in results.items():
        if _are_other(seen):
            raise NotAsItMust(f"{name} trains to other losses", results)
    return results


def kill_daemon(context: Context) -> dict[str, Any]:
    """kill -9 of the daemon in the middle of training: nothing stops, no loss changes."""
    words = ("--steps", str(4 * context.n_steps))
    reference = Training(context, "off", "fsdp2.py", words, agent=False).run()
    with Daemon(context.folder) as daemon:
        tuned = Training(context, "on", "fsdp2.py", words, daemon.endpoint)
        ranks = tuned.start()
        while len(tuned.losses()[0]) < context.n_steps and None in [process.poll() for process in ranks.processes]:
            time.sleep(0.005)
        daemon.process.kill()
        daemon.process.wait()
        at_kill = len(tuned.losses()[0])
        ranks.wait(context.left_s)
    results = {**compare_losses(tuned.losses(), reference), "steps_at_kill": at_kill}
    if not 0 < at_kill < 4 * context.n_steps:
        raise NotAsItMust(f"the daemon was killed outside of training, at step {at_kill}", results)
    if _are_other(results):
        raise NotAsItMust("losses have changed", results)
    return results


def _step_times(context: Context, endpoint: str | None) -> dict[str, Any]:
    """Median step times of interleaved runs, agent on over agent absent."""
    # Sockets that move a gigabyte per second make this a tenth of a second per step: four runs should fit.
    big = ("--width", "512", "--blocks", "4") if context.machine.fabric is None else ()
    words = ("--steps", str(2 * context.n_steps), *big)
    on_us: list[float] = []
    off_us: list[float] = []
    epoch = 0
    for pair in range(context.n_pairs):
        for agent in (True, False) if pair % 2 else (False, True):
            job = Training(context, f"{pair}-{'on' if agent else 'off'}", "fsdp2.py", words, endpoint, agent)
            job.run()
            (on_us if agent else off_us).append(statistics.median(job.steps_us()))
            epoch = max(epoch, job.last_epoch()) if agent else epoch
    ratios = [on / off for on, off in zip(on_us, off_us, strict=True)]
    return {
        "step_on_us": statistics.median(on_us), "step_off_us": statistics.median(off_us),
        "on_over_off": statistics.median(ratios), "ratios": ratios, "last_epoch": epoch,
    }  # fmt: skip


def overhead(context: Context) -> dict[str, Any]:
    """Step time with the agent on and no daemon, so that nothing is tuned, against the agent absent."""
    return _step_times(context, None)


def tuned(context: Context) -> dict[str, Any]:
    """Step time with agent and daemon against NCCL's own choices."""
    with Daemon(context.folder) as daemon:
        return _step_times(context, daemon.endpoint)
